"""The commands that are fuzzed: how each is called where all is well, and what it reads.

A new option of a command needs nothing here: options come from its parser, keys from the schema.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from tests.fuzz.child import LIMIT_BYTES, LIMIT_SECONDS
from tests.fuzz.fakes import DEEDS as FAKE_DEEDS
from tests.fuzz.world import LONG_RANGE


@dataclass(frozen=True)
class Target:
    """A command with a line that it accepts.

    Attributes:
        name: of the target, in the numbers of its cases.
        module: what is called, `python -m MODULE` or a program at the top.
        family: of the processes that it is forked from.
        line: its words; it runs in the case's folder, all names are relative.
        needs: what of the world lies in the case's folder.
        files: patterns of the files that may be damaged; none: only the command line is.
        outputs: what it may write.
        guarded: patterns of files whose bytes a checksum vouches for: damage must be noticed.
        codes: exit codes that it documents.
        keys: whether it takes keys of the run's configuration.
        file_weight, line_weight: how often files and command lines are drawn.
        usual: its exit code where nothing is damaged.
        stdin: what stands there.
        limit_seconds, limit_bytes: what it may take.
    """

    name: str
    module: str
    family: str
    line: tuple[str, ...]
    needs: tuple[str, ...]
    files: tuple[str, ...]
    outputs: tuple[str, ...]
    guarded: tuple[str, ...]
    codes: tuple[int, ...] = (0, 2)
    keys: bool = False
    file_weight: float = 1.0
    line_weight: float = 1.0
    usual: int = 0
    stdin: str = ""
    limit_seconds: float = LIMIT_SECONDS
    limit_bytes: int = LIMIT_BYTES


def target(
    name: str,
    command: str,
    line: str,
    needs: str = "",
    files: str = "",
    weights: tuple[float, float] = (1, 1),
    outputs: str = "out",
    guarded: str = "",
    **more: object,
) -> Target:
    """Make a target of texts with spaces between words; `command` is the family and the module."""
    family, module = command.split()
    words = tuple(tuple(text.split()) for text in (needs, files, outputs, guarded))
    file, odd = weights
    given = {"file_weight": file, "line_weight": odd, **more}
    return Target(name, module, family, tuple(shlex.split(line)), *words, **given)


SHARDS, RECORDS = "data/*.bin data/*.idx", "data/manifest.json data/tokenizer/*"
WEIGHTS, CONFIG = "model/*.safetensors", "config.yaml base.yaml"
STEP = "run/checkpoints/step-00000002"
CHECKPOINT = f"{STEP}/* {STEP}/*/* {STEP}/* {STEP}/*/* run/metrics.jsonl run/config.yaml"
_STATE = ("model/*", "state/*", "tokenizer/*", "random-*", "state.json", "run_config.yaml")
STATE = " ".join(f"{STEP}/{name}" for name in _STATE)
RESULTS = "run/config.yaml run/metrics.jsonl run/eval/*.json run/zero_shot/*.json"
FILES = "--source files --tokenizer bytes --path text"
SPLIT = r"--workers 1 --document-separator '\n\n' --validation-fraction 0.2"
UNFINISHED = f"{FILES} --workers 1 --validation-fraction 0.2 --out unfinished"
PARTS = "unfinished/unfinished/* unfinished/unfinished/parts/*"
SWEEP = "--lengths 16,32 --max-tokens 200 --methods none,yarn --out out"
LANDMARK = "--blocks 4 --top-k 1 --local 1 --out out"
ZERO_SHOT = "--tasks piqa --data-dir tasks --out out --limit 3"
CELL = "--task mqar:keys=2 --mixer cat --d-model 16 --seq-len 16 --epochs 1 --train-examples 32"
SUBMIT = "config.yaml --nodes 2 --tasks-per-node 1 --site site.yaml --print"
TINY = "--models cat --layers 1 --hidden-size 16 --heads 2 --vocab-size 64 --repeats 1"
CONV = "conv --shape 1,8,2,4 --windows 2,3 --repeats 1 --device cpu --kernels cpu"
STREAMS = "streams --data data --scale smoke --estimate-only --out out --workers 1 --device cpu"


def model_files(folder: str) -> str:
    return " ".join(f"{folder}/{end}" for end in ("*.json", "*.safetensors", "*.bin", "*.jinja"))


# Tasks of eval.long_range and the files that they read.
LONG = {
    "smnist": "long/mnist/*",
    "cifar10": "long/cifar-10-batches-bin/*",
    "imdb": "long/aclImdb/*/*/*",
    "aan:max_length=20": "long/tsv_data/*",
    "listops:source=official": "long/listops-1000/*",
    "pathfinder": "long/pathfinder32/*/*/*",
}
TARGETS = (
    target(
        *("config", "plain launch.doctor"),
        "config.yaml --ranks 1,2 --device h100 train.peak_tflops=100",
        *(f"{CONFIG} data", f"{CONFIG} data/manifest.json", (6, 6)),
        keys=True,
    ),
    target(
        *("doctor", "torch launch.doctor", "config.yaml --ranks 2 --json out/found.json"),
        *(f"{CONFIG} data", f"{CONFIG} {RECORDS} {SHARDS}", (0.1, 0.1)),
        codes=(0, 1, 2),
        keys=True,
    ),
    target(
        *("submit", "plain launch.slurm", f"submit {SUBMIT} train.global_batch_size=4"),
        *(f"{CONFIG} data site.yaml", f"{CONFIG} site.yaml site.yaml", (3, 3)),
        keys=True,
    ),
    target(
        *("status", "plain launch.slurm", "status run --json out/status.json", "run"),
        *(f"run/slurm/* run/metrics.jsonl {STEP}/complete.json", (4, 1)),
    ),
    target(
        *("resume", "plain launch.slurm", "resume run --site site.yaml --print"),
        *("run site.yaml data", "run/slurm/* site.yaml", (3, 1)),
    ),
    target(
        *("array", "plain launch.slurm", f"prepare --tasks 2 --print -- {FILES} --out out"),
        needs="text",
        weights=(1, 3),
    ),
    target(
        *("prepare", "plain data_prep.prepare", f"{FILES} {SPLIT} --out out"),
        *("text", "text/*", (4, 6)),
    ),
    target(
        *("prepare-tokenizer", "plain data_prep.prepare"),
        r"--source files --path text/a.txt --document-separator '\n\n' --workers 1 --out out "
        "--tokenizer trained/tokenizer",
        *("text trained", "trained/tokenizer/*", (3, 1)),
    ),
    target(
        *("prepare-again", "plain data_prep.prepare", f"{FILES} {SPLIT} --out data"),
        *("text data", f"{RECORDS} {SHARDS}", (3, 0), ""),
    ),
    target(
        *("prepare-on", "plain data_prep.prepare", UNFINISHED),
        *("text unfinished", PARTS, (4, 0), "unfinished"),
    ),
    target(
        *("prepare-over", "plain data_prep.prepare", f"{UNFINISHED} --overwrite"),
        *("text unfinished", PARTS, (3, 0), "unfinished"),
    ),
    target(
        *("inspect", "plain data_prep.inspect"),
        "data --workers 1 --samples 1 --context-length 32 --json out/found.json",
        *("data", f"{RECORDS} {SHARDS}", (6, 3)),
        guarded=SHARDS,
        codes=(0, 1, 2),
    ),
    target(
        *("adopt", "plain data_prep.adopt"),
        "web=data/train-00000 --validation data/validation-00000 --tokenizer bytes --link copy "
        "--out out",
        *("data", SHARDS, (4, 3)),
    ),
    target(
        *("train", "torch train", "config.yaml train.output_dir=out"),
        *(f"{CONFIG} data", f"{CONFIG} {RECORDS} {SHARDS}", (1, 3)),
        guarded=SHARDS,
        keys=True,
    ),
    target(
        *("continue", "torch train", "config.yaml train.resume=auto train.max_steps=3"),
        *(f"{CONFIG} data run", CHECKPOINT, (4, 2), "run", STATE),
        keys=True,
    ),
    target(
        *("init", "torch train"),
        "config.yaml train.output_dir=out train.init_from=model train.max_steps=1",
        *(f"{CONFIG} data model", "model/*.json model/*.safetensors", (1, 0)),
        guarded=WEIGHTS,
    ),
    target(
        *("export", "torch cat_lm.export", "run out", "run", CHECKPOINT, (6, 3)),
        guarded=STATE,
    ),
    target(
        *("export-over", "torch cat_lm.export", "run exported", "run exported"),
        *("exported/export.json exported/*", (2, 0), "exported"),
    ),
    target(
        *("generate", "torch cat_lm.generate", "model 'the cat' --max-new-tokens 3"),
        *("model", model_files("model"), (6, 4)),
        guarded=WEIGHTS,
    ),
    target(
        *("generate-stdin", "torch cat_lm.generate", "run - --max-new-tokens 2 --greedy"),
        *("run", "run/model/*"),
        guarded="run/model/*.safetensors",
        stdin="a dog",
    ),
    target(
        *("generate-sharded", "torch cat_lm.generate", "sharded 'the cat' --max-new-tokens 2"),
        "sharded",
        "sharded/*.safetensors sharded/model.safetensors.index.json sharded/config.json",
        (2, 0),
    ),
    target(
        *("generate-bin", "torch cat_lm.generate", "pickled 'the cat' --max-new-tokens 2"),
        *("pickled", "pickled/*.bin pickled/*.bin pickled/*.json", (1, 0)),
    ),
    target(
        *("upcycle", "torch cat_lm.upcycle", "pythia out --window 4"),
        *("pythia", model_files("pythia"), (2, 2)),
    ),
    target(
        *("sparsify", "torch cat_lm.sparsify", "model out --block 4 --top-k 2"),
        *("model", model_files("model"), (1, 2)),
    ),
    target(
        *("sweep", "torch eval.length_sweep", f"model --data data {SWEEP}", "model data"),
        *(f"{RECORDS} {SHARDS} model/*.json {WEIGHTS}", (3, 3)),
        guarded=f"{WEIGHTS} data/validation-*",
    ),
    target(
        *("sweep-text", "torch eval.length_sweep", f"model --text text/a.txt {SWEEP}"),
        *("model text", "text/a.txt", (0.5, 1)),
    ),
    target(
        *("landmark-sweep", "torch eval.landmark"),
        f"sweep model --data data --lengths 16 --max-tokens 64 {LANDMARK}",
        *("model data", "model/*.json", (0.3, 1)),
        guarded=f"{WEIGHTS} data/validation-*",
    ),
    target(
        *("landmark-diagnose", "torch eval.landmark"),
        f"diagnose model --data data --length 16 --windows 2 {LANDMARK}",
        *("model data", "model/*.json", (0.3, 1)),
        guarded=f"{WEIGHTS} data/validation-*",
    ),
    target(
        *("report", "torch eval.report", "run --out out", "run data"),
        f"{RESULTS} {RESULTS} run/model/*.json run/model/*.safetensors data/manifest.json",
        (1, 0.1),
    ),
    target(
        *("zero-shot", "harness eval.zero_shot", f"model {ZERO_SHOT}", "model tasks"),
        f"tasks/piqa.jsonl tasks/piqa.jsonl model/*.json {WEIGHTS}",
        guarded=WEIGHTS,
    ),
    target(
        *("zero-shot-table", "harness eval.zero_shot"),
        "model --data-dir tasks --out out --limit 2 --bootstrap-iterations 0",
        *("model tasks", "tasks/*.jsonl", (1, 0)),
    ),
    target(
        *("recall", "torch eval.recall"),
        f"run {CELL} --test-examples 16 --batch-size 16 --out recall",
        *("recall", "recall/cells/*.json", (2, 2), "recall"),
    ),
    *(
        target(
            *(f"long-{task.partition(':')[0]}", "torch eval.long_range"),
            f"prepare {task} --data long --cache out",
            *("long", pattern, (1, 0.3)),
        )
        for task, pattern in LONG.items()
    ),
    target(
        *("long-run", "torch eval.long_range", shlex.join(["run", *LONG_RANGE])),
        *("long long-range", "long-range/cells/*.json long/mnist/*", (2, 2), "long-range cache"),
    ),
    target("streams", "torch eval.study", STREAMS, "data", RECORDS, (0.05, 0.05)),
    target(
        *("speed-conv", "torch eval.speed", f"{CONV} --json out/conv.json"),
        weights=(1, 0.2),
        codes=(0, 1, 2),
    ),
    target(
        *("speed-decode", "torch eval.speed"),
        f"decode {TINY} --batch-size 1 --device cpu --prompts 8 --new-tokens 2 --uncached-tokens 1",
        weights=(1, 0.5),
        codes=(0, 1, 2),
    ),
    target(
        *("study", "plain eval.study"),
        "rivals --data nowhere --out out --models tfpp --estimate-only",
        usual=2,
    ),
)
# Commands that do wrong, or right: what the tests of the fuzz test itself look at.
FAKES = tuple(
    target(
        *(f"fake-{name}", "fakes tests.fuzz.fakes", f"{name} in.bin out --number 1"),
        *("in.bin neighbour.txt run", "in.bin", (1, 1), "out run", "in.bin"),
        limit_seconds=1.0,
        limit_bytes=200 * 2**20,
    )
    for name in FAKE_DEEDS
)
BY_NAME = {target.name: target for target in (*TARGETS, *FAKES)}
