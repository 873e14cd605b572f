"""Every kind of file that the project reads, small, made once by its own commands."""

from __future__ import annotations

import gzip
import shutil
from importlib.util import find_spec
from pathlib import Path

import pyarrow
import pyarrow.parquet
import yaml
import zstandard

from tests.conftest import generated_text, write_jsonl
from tests.data_prep.helpers import json_lines
from tests.eval.long_range import files
from tests.fuzz.place import Files, Place
from tests.fuzz.server import Server
from tests.fuzz.targets import BYTES, CELL, LONG_CELL, SPLIT, TEXT, Target
from tests.runs import run_values
from tests.zero_shot_rows import write_rows

HAS_HARNESS = find_spec("lm_eval") is not None


def make_world(server: Server) -> Place:
    """Return a place with all files.

    Raises:
        RuntimeError: a command that makes some of them failed.
    """
    place = Place(server)
    folder = place.here
    folder.mkdir(parents=True)

    def run(command: str) -> None:
        target = Target("world", command)
        ended = place.run(target.words(target.line), "", 300.0)
        if ended.code != 0:
            raise RuntimeError(f"{command}: {ended.stderr or ended.stdout}")

    _write_inputs(folder)
    run(f"{SPLIT} --out data")
    run(f"{BYTES} --stage encode --out unfinished")
    run(f"{TEXT} --tokenizer train:sentencepiece:300 --out trained")
    run("train config.yaml")
    for out in ("run/model", "model", "exported"):
        run(f"cat_lm.export run {out}")
    run("eval.length_sweep run --data data --lengths 16,32 --max-tokens 200 --out run/eval")
    run(CELL)
    run(LONG_CELL)
    if HAS_HARNESS:
        run("eval.zero_shot run --tasks piqa --data-dir tasks --limit 3")
    run("tests.fuzz.world")
    place.entries = Files(
        {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and not path.name.endswith(".lock")
        }
    )
    return place


def _write_inputs(folder: Path) -> None:
    (folder / "text").mkdir()
    texts = generated_text(80)
    (folder / "text/a.txt").write_text("\n\n".join(texts[:60]), encoding="utf-8")
    write_jsonl(folder / "text/b.jsonl", texts[60:70])
    lines = json_lines(texts[70:])
    (folder / "text/c.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))
    (folder / "text/d.jsonl.zst").write_bytes(zstandard.compress(lines))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts[70:]}), folder / "text/e.parquet")
    values = run_values(Path("data"), Path("run"), max_steps=2, global_batch_size=4)
    values["optimizer"] |= {"warmup_steps": 1}
    values["validation"] = {"every_steps": 2, "max_tokens": 128}
    values["checkpoint"] = {"every_steps": 1, "keep_last": 2}
    values["train"]["precision"] = "fp32"
    base = {key: values.pop(key) for key in ("model", "data", "validation")}
    (folder / "base.yaml").write_text(yaml.safe_dump(base), encoding="utf-8")
    values = {"base": "base.yaml", **values}
    (folder / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    write_rows(folder / "tasks")
    _write_long_range(folder / "long")
    site = {"partition": "p", "time": "1:00:00", "cpus_per_task": 2, "sbatch": ["--hint=x"]}
    site |= {"srun": ["--cpu-bind=none"], "setup": ["true"], "env": {"A": "b"}}
    (folder / "site.yaml").write_text(yaml.safe_dump(site), encoding="utf-8")


def _write_long_range(folder: Path) -> None:
    """Write the official files of each long-range task that has any."""
    files.write_mnist(folder / "mnist", packed=False)
    files.write_cifar(folder / "cifar-10-batches-bin")
    files.write_folder(folder)
    files.write_pairs(folder / "tsv_data")
    files.write_reviews(folder)
    trees = [("( [MAX 4 ( [MIN 7 2 ] ) ] )", 4), ("[SM 8 5 ]", 3)]
    files.write_files(folder / "listops-1000", trees)


def main() -> None:
    """Write further forms of the exported model, and the files of a submitted run.

    It runs as a command in the folder of the others.
    """
    import torch
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    from cat_lm.pretrained.loading import load_model

    model = load_model("model")
    ignored = shutil.ignore_patterns("*.safetensors", "export.json")
    for name in ("sharded", "pickled", "pythia"):
        shutil.copytree("model", name, ignore=ignored)
    model.save_pretrained("sharded", max_shard_size="60KB")
    torch.save(model.state_dict(), "pickled/pytorch_model.bin")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"vocab_size": 257, "intermediate_size": 64, "max_position_embeddings": 32}
    GPTNeoXForCausalLM(GPTNeoXConfig(**sizes)).save_pretrained("pythia")
    _submitted(Path("run").absolute())


def _submitted(run: Path) -> None:
    """Write what `launch.slurm submit` leaves in a run, without a cluster."""
    from cat_lm.config import load_config
    from launch.slurm import snapshot
    from launch.slurm.folder import JobRecord, RunFolder
    from launch.slurm.options import Options

    folder = RunFolder(run)
    folder.slurm.mkdir()
    snapshot.save_config(folder, snapshot.resolve_paths(load_config("config.yaml")))
    config, options = str(Path("config.yaml").absolute()), Options(nodes=2, tasks_per_node=1)
    jobs = [{"id": "12", "time": "2026-01-01T00:00:00+00:00", "command": ["python"]}]
    record = {"format": 1, "config": config, "overrides": [], "site": None, "jobs": jobs}
    JobRecord(options=options, **record).write(folder)
    folder.reset_attempts("submitted")
    folder.begin_attempt("12", 0)


if __name__ == "__main__":
    main()
