"""Files that others read: exports, prepared data, job scripts, metrics and results of evaluations.

What differs between machines and moments is replaced: paths, the interpreter, versions, times and
hashes of weights. Computed numbers are rounded to `DIGITS` significant digits.
"""

from __future__ import annotations

import hashlib
import json
import random
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.guards.losses import WORDS, configuration, preparation, write_text
from tests.guards.models import MODELS
from tests.guards.processes import Command, Job, run_jobs

STEPS = 2
# Its loss depends on what it reads, after so many steps at this learning rate.
EVALUATED = "cat"
LESSONS, RATE = 35, 1e-2
# One model of each family, and of those with convolutions one with and one without.
EXPORTED = ("pythia", "cat", "tfpp", "tfpp_cat", "gla", "delta_net", "gated_deltanet")
EXPORTED += ("mamba", "mamba2", "mixer_cat")
# The library, transformers or flash-linear-attention, has a class of its own for these.
LIBRARY = ("pythia", "tfpp", "gla", "delta_net", "gated_deltanet", "mamba", "mamba2")
TASKS = ("lambada_openai", "piqa")
# Other processors add in another order. Results then differed by up to 6e-7 of their value, and
# none of them is nearer than 3e-6 to where it would be rounded to another number.
DIGITS = 4
# The types alone are kept of what differs between machines, moments, versions and revisions, and of
# input files that another version of zstandard or pyarrow writes in other bytes.
VOLATILE = ("commit", "date", "harness", "machine", "seconds", "tokens_per_second", "tool_version")
VOLATILE += ("versions", "model_sha256")
COMPRESSED = ("contents_sha256", "file_bytes", "listing_sha256")

SETS = ("RedPajamaArXiv", "RedPajamaC4", "RedPajamaGithub")
# A repository's files: split, and the documents in it.
SPLITS = {"train": ((0, 60), (60, 150)), "validation": ((150, 180),), "test": ((180, 200),)}

# Name: the cluster's own settings, and the options and overrides of `submit`.
SITES: dict[str, tuple[dict[str, Any], str]] = {
    "CPUs": ({"python": "python3"}, "--nodes 2 --tasks-per-node 2 --time 10"),
    "GPUs": (
        {
            "partition": "gpu",
            "account": "my-project",
            "time": "24:00:00",
            "gpu_request": "gres",
            "sbatch": ["--hint=nomultithread"],
            "srun": ["--mpi=none"],
            "setup": ["module load cuda/12.8"],
            "env": {"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "ib0"},
        },
        "--nodes 4 --gpus-per-node 8 --cpus-per-task 12 --constraint 'a100&nvlink' --exclusive "
        "--env 'NOTE=two words' train.global_batch_size=64",
    ),
    "container": (
        {"qos": "long", "mem": "0", "container": "/images/cat_lm.sqsh"},
        "--nodes 1 --gpus-per-node 4 --container-mounts /datasets:/data:ro --lead-seconds 600 "
        "--max-restarts 5 data.cache_dir=/scratch/cache",
    ),
}


def measure(folder: Path) -> dict[str, Any]:
    """Return what the files of each format hold, by format and name."""
    found: dict[str, Any] = {}
    data = folder / "data"

    def prepare() -> Job:
        yield preparation(folder, data)

    run_jobs([prepare(), *(_prepare(name, folder, found) for name in PREPARATIONS)])
    # Each training and export would import this anew, which takes longer than all else in it.
    import transformers.modeling_utils  # noqa: F401

    (folder / "rows").mkdir()
    _write_rows(folder / "rows")
    jobs = [_train(name, data, folder, found) for name in EXPORTED]
    run_jobs([*jobs, *(_render_script(name, data, folder, found) for name in SITES)])
    return dict(sorted(found.items()))


# Prepared data.


def _prepare(name: str, folder: Path, found: dict[str, Any]) -> Job:
    """Prepare generated documents, and add the manifest and the hashes of the files."""
    write, options = PREPARATIONS[name]
    source, out = folder / f"source of {name}", folder / f"prepared {name}"
    source.mkdir()
    write(source)
    words = ["-m", "data_prep.prepare", *options, "--path", str(source), "--out", str(out)]
    words += ["--tokenizer", "bytes", "--shard-tokens", "8000", "--workers", "1"]
    yield Command(words, folder / f"{name}.log")
    manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    volatile = () if name in ("text", "jsonl") else COMPRESSED
    found[f"prepared, {name}"] = {
        "manifest": _stable(manifest, folder, volatile),
        "files": {path.name: _sha256(path) for path in sorted(out.glob("*-*"))},
    }


def _write_jsonl(folder: Path) -> None:
    for name, documents in (("a", slice(90)), ("b", slice(90, None))):
        lines = [json.dumps({"content": text, "id": 7}) for text in _texts()[documents]]
        (folder / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")


def _write_zst(folder: Path) -> None:
    """Write SlimPajama's own layout; chunks are in natural order, 2 before 10."""
    import zstandard

    for split, parts in SPLITS.items():
        for chunk, documents in zip((2, 10), parts, strict=False):
            path = folder / split / f"chunk{chunk}/example_0.jsonl.zst"
            path.parent.mkdir(parents=True)
            lines = "".join(f"{json.dumps(record)}\n" for record in _records(*documents))
            path.write_bytes(zstandard.compress(lines.encode()))


def _write_parquet(folder: Path) -> None:
    """Write the layout of SlimPajama's mirrors; one of them has `meta` as JSON text."""
    import pyarrow
    import pyarrow.parquet

    for split, parts in SPLITS.items():
        for number, documents in enumerate(parts):
            path = folder / f"data/{split}-{number:05}-of-{len(parts):05}-0123456789abcdef.parquet"
            path.parent.mkdir(exist_ok=True)
            records = _records(*documents)
            columns = {
                "text": [record["text"] for record in records],
                "meta": [json.dumps(record["meta"]) for record in records],
            }
            pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=20)


def _records(start: int, end: int) -> list[dict[str, Any]]:
    """Return documents with their sets, as SlimPajama's files have them."""
    texts = _texts()
    return [
        {"text": texts[number], "meta": {"redpajama_set_name": SETS[number % len(SETS)]}}
        for number in range(start, end)
    ]


def _texts() -> list[str]:
    """Return 200 documents whose words are drawn by seed; one is empty, some are not ASCII."""
    draw = random.Random(1)
    words = [*WORDS.split(), "café", "木"]
    texts = [" ".join(draw.choices(words, k=draw.randint(5, 60))) for _ in range(200)]
    texts[17] = ""
    return texts


FRACTION = ["--validation-fraction", "0.1", "--seed", "3"]
# Name: what writes the source into a folder, and options of the preparation.
PREPARATIONS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "text": (write_text, ["--source", "files", "--document-separator", r"\n\n", *FRACTION]),
    "jsonl": (_write_jsonl, ["--source", "files", "--text-key", "content", *FRACTION]),
    "zst": (_write_zst, ["--source", "slimpajama"]),
    "parquet": (_write_parquet, ["--source", "slimpajama", "--exclude-sets", SETS[0]]),
    "mixture": (
        _write_zst,
        ["--source", "slimpajama", "--mixture", f"{SETS[1]}=3,{SETS[2]}=1", "--tokens", "15000"],
    ),
}


# Job scripts.


def _render_script(name: str, data: Path, folder: Path, found: dict[str, Any]) -> Job:
    """Show the job of a run, and add the script's lines."""
    site, options = SITES[name]
    path, run = folder / f"site {name}.yaml", folder / f"run {name}"
    path.write_text(yaml.safe_dump(site), encoding="utf-8")
    config, log = folder / f"job {name}.yaml", folder / f"job {name}.log"
    config.write_text(yaml.safe_dump(configuration({"model": MODELS["cat"]}, data, run)))
    words = ["-m", "launch.slurm", "submit", str(config), *shlex.split(options)]
    yield Command([*words, "--site", str(path), "--print"], log)
    found[f"job script, {name}"] = _stable(log.read_text(encoding="utf-8").splitlines(), folder)


# Runs, their exports and evaluations.


def _train(name: str, data: Path, folder: Path, found: dict[str, Any]) -> Job:
    """Train and export a model, and add what the export's files hold."""
    path, run, log = folder / f"{name}.yaml", folder / name, folder / f"{name}.log"
    values = configuration({"model": MODELS[name]}, data, run)
    steps = LESSONS if name == EVALUATED else STEPS
    values["train"]["max_steps"] = values["validation"]["every_steps"] = steps
    values["checkpoint"]["every_steps"] = steps
    values["optimizer"] |= {"lr": RATE, "warmup_steps": 1}
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    yield Command(["train.py", str(path)], log)
    for suffix, options in (("", []), (" for the library", ["--library"])):
        if not options or name in LIBRARY:
            out = folder / f"exported {name}{suffix}"
            yield Command(["-m", "cat_lm.export", str(run), str(out), *options], log)
            found[f"export, {name}{suffix}"] = _list_export(out)
    if name == EVALUATED:
        found["metrics.jsonl"] = _columns(run / "metrics.jsonl")
        yield from _evaluate(folder / f"exported {name}", data, folder, found)


def _list_export(folder: Path) -> dict[str, Any]:
    """Return an export's files, the keys of its config.json, and its parameters."""
    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    parameters = {}
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name in sorted(file.keys()):
            tensor = file.get_slice(name)
            parameters[name] = f"{tensor.get_dtype()} {tensor.get_shape()}"
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return {"files": files, "config.json": sorted(config), "parameters": parameters}


def _columns(path: Path) -> list[list[str]]:
    """Return the keys of each type of record in a file of JSON lines."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return sorted(map(list, {tuple(sorted(json.loads(line))) for line in lines}))


def _evaluate(model: Path, data: Path, folder: Path, found: dict[str, Any]) -> Job:
    """Score zero-shot tasks and a length sweep, and add their results."""
    tasks, sweep, log = folder / "zero_shot", folder / "sweep", folder / "evaluation.log"
    common = [str(model), "--device", "cpu", "--dtype", "float32"]
    words = ["-m", "eval.zero_shot", *common, "--tasks", ",".join(TASKS), "--out", str(tasks)]
    words += ["--data-dir", str(folder / "rows"), "--max-length", "128", "--batch-size", "4"]
    yield Command([*words, "--bootstrap-iterations", "50"], log)
    found["zero_shot.json"] = _read_result(tasks / "zero_shot.json", folder)
    words = ["-m", "eval.length_sweep", *common, "--data", str(data), "--out", str(sweep)]
    words += ["--lengths", "64,128", "--methods", "all", "--max-tokens", "1000"]
    yield Command(words, log)
    found["length_sweep.json"] = _read_result(sweep / "length_sweep.json", folder)


def _write_rows(folder: Path) -> None:
    """Write a dozen rows of each task, in the Hub's columns."""
    texts = _texts()
    rows = {
        "lambada_openai": [{"text": f"{texts[number][:80]} cat"} for number in range(12)],
        "piqa": [
            {
                "goal": texts[number][:30],
                "sol1": texts[number + 20][:25],
                "sol2": texts[number + 40][:35],
                "label": number % 2,
            }
            for number in range(12)
        ],
    }
    for task, values in rows.items():
        lines = "".join(f"{json.dumps(row)}\n" for row in values)
        (folder / f"{task}.jsonl").write_text(lines, encoding="utf-8")


def _read_result(path: Path, folder: Path) -> Any:
    """Return a result; the only hash under the key `sha256` that matters here is the model's."""
    return _stable(json.loads(path.read_text(encoding="utf-8")), folder, ("sha256",))


# What is the same everywhere.


def _stable(value: Any, folder: Path, volatile: Sequence[str] = ()) -> Any:
    """Return a value with rounded numbers, without paths, and of volatile keys the types alone."""
    if isinstance(value, dict):
        return {
            key: type(item).__name__
            if key in (*VOLATILE, *volatile)
            else _stable(item, folder, volatile)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_stable(item, folder, volatile) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, str):
        return value.replace(str(folder), "FOLDER").replace(sys.executable, "PYTHON")
    return value


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
