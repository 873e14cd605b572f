"""The commands that are fuzzed: how each is called where all is well, and what it reads.

A new option of a command needs nothing here: options come from its parser, keys from the schema.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.fuzz.child import LIMIT_BYTES, LIMIT_SECONDS
from tests.fuzz.fakes import DEEDS as FAKE_DEEDS
from tests.fuzz.world import LONG_RANGE

DATA = ("data",)
MODEL_FILES = ("*.json", "*.safetensors", "*.bin", "*.jinja", "README.md")
STEP = "run/checkpoints/step-00000002"


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
    needs: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ("out",)
    guarded: tuple[str, ...] = ()
    codes: tuple[int, ...] = (0, 2)
    keys: bool = False
    file_weight: float = 1.0
    line_weight: float = 1.0
    usual: int = 0
    stdin: str = ""
    limit_seconds: float = LIMIT_SECONDS
    limit_bytes: int = LIMIT_BYTES


_SHARDS = ("data/*.bin", "data/*.idx")
_RECORDS = ("data/manifest.json", "data/tokenizer/*")
_WEIGHTS = ("model/*.safetensors",)
_RUN = ("run/config.yaml", "run/metrics.jsonl", "run/eval/*.json", "run/zero_shot/*.json")
_CHECKPOINT = (f"{STEP}/*", f"{STEP}/*/*")
_GUARDED_CHECKPOINT = tuple(
    f"{STEP}/{name}"
    for name in ("model/*", "state/*", "tokenizer/*", "random-*", "state.json", "run_config.yaml")
)
_CONFIG = ("config.yaml", "base.yaml")
_PREPARE = ("--source", "files", "--path", "text", "--tokenizer", "bytes", "--workers", "1")
_SPLIT = ("--document-separator", r"\n\n", "--validation-fraction", "0.2")
_UNFINISHED = (*_PREPARE, "--validation-fraction", "0.2", "--out", "unfinished")
_EXPORT = ("run", "out")
_COSTS = ("config.yaml", "--ranks", "1,2", "--device", "h100", "train.peak_tflops=100")
_SWEEP = ("--lengths", "16,32", "--max-tokens", "200", "--methods", "none,yarn", "--out", "out")
_LANDMARK = ("--blocks", "4", "--top-k", "1", "--local", "1", "--out", "out")
_ZERO_SHOT = ("--tasks", "piqa", "--data-dir", "tasks", "--out", "out", "--limit", "3")
_CELL = ("--task", "mqar:keys=2", "--mixer", "cat", "--d-model", "16", "--seq-len", "16")
_CELL += ("--epochs", "1", "--train-examples", "32", "--test-examples", "16", "--batch-size", "16")
_SUBMIT = ("config.yaml", "--nodes", "2", "--tasks-per-node", "1", "--site", "site.yaml", "--print")
_SUBMIT += ("train.global_batch_size=4",)
_TINY = ("--models", "cat", "--layers", "1", "--hidden-size", "16", "--heads", "2", "--vocab-size")
_TINY += ("64", "--repeats", "1", "--batch-size", "1", "--device", "cpu")

# Tasks of eval.long_range and the files that they read.
_LONG = {
    "smnist": "long/mnist/*",
    "cifar10": "long/cifar-10-batches-bin/*",
    "imdb": "long/aclImdb/*/*/*",
    "aan:max_length=20": "long/tsv_data/*",
    "listops:source=official": "long/listops-1000/*",
    "pathfinder": "long/pathfinder32/*/*/*",
}

TARGETS = (
    Target(
        *("config", "launch.doctor", "plain", _COSTS),
        needs=(*_CONFIG, *DATA),
        files=(*_CONFIG, "data/manifest.json"),
        keys=True,
        file_weight=6,
        line_weight=6,
    ),
    Target(
        *("doctor", "launch.doctor", "torch"),
        ("config.yaml", "--ranks", "2", "--json", "out/found.json"),
        needs=(*_CONFIG, *DATA),
        files=(*_CONFIG, *_RECORDS, *_SHARDS),
        codes=(0, 1, 2),
        keys=True,
        file_weight=0.1,
        line_weight=0.1,
    ),
    Target(
        *("submit", "launch.slurm", "plain", ("submit", *_SUBMIT)),
        needs=(*_CONFIG, *DATA, "site.yaml"),
        files=(*_CONFIG, "site.yaml", "site.yaml"),
        keys=True,
        file_weight=3,
        line_weight=3,
    ),
    Target(
        *("status", "launch.slurm", "plain", ("status", "run", "--json", "out/status.json")),
        needs=("run",),
        files=("run/slurm/*", "run/metrics.jsonl", f"{STEP}/complete.json"),
        file_weight=4,
    ),
    Target(
        *("resume", "launch.slurm", "plain", ("resume", "run", "--site", "site.yaml", "--print")),
        needs=("run", "site.yaml", *DATA),
        files=("run/slurm/*", "site.yaml"),
        file_weight=3,
    ),
    Target(
        *("array", "launch.slurm", "plain"),
        ("prepare", "--tasks", "2", "--print", "--", *_PREPARE[:-2], "--out", "out"),
        needs=("text",),
        line_weight=3,
    ),
    Target(
        *("prepare", "data_prep.prepare", "plain"),
        (
            *_PREPARE,
            "--validation-fraction",
            "0.2",
            "--document-separator",
            r"\n\n",
            "--out",
            "out",
        ),
        needs=("text",),
        files=("text/*",),
        file_weight=4,
        line_weight=6,
    ),
    Target(
        *("prepare-tokenizer", "data_prep.prepare", "plain"),
        (
            *("--source", "files", "--path", "text/a.txt", "--document-separator", r"\n\n"),
            *("--tokenizer", "trained/tokenizer", "--workers", "1", "--out", "out"),
        ),
        needs=("text", "trained"),
        files=("trained/tokenizer/*",),
        file_weight=3,
    ),
    Target(
        *("prepare-again", "data_prep.prepare", "plain"),
        (*(*_PREPARE, *_SPLIT, "--out", "data"),),
        needs=("text", "data"),
        files=("data/manifest.json", "data/tokenizer/*", *_SHARDS),
        outputs=(),
        file_weight=3,
        line_weight=0,
    ),
    Target(
        *("prepare-on", "data_prep.prepare", "plain", _UNFINISHED),
        needs=("text", "unfinished"),
        files=("unfinished/unfinished/*", "unfinished/unfinished/parts/*"),
        outputs=("unfinished",),
        file_weight=4,
        line_weight=0,
    ),
    Target(
        *("prepare-over", "data_prep.prepare", "plain", (*_UNFINISHED, "--overwrite")),
        needs=("text", "unfinished"),
        files=("unfinished/unfinished/*", "unfinished/unfinished/parts/*"),
        outputs=("unfinished",),
        file_weight=3,
        line_weight=0,
    ),
    Target(
        *("inspect", "data_prep.inspect", "plain"),
        (
            *("data", "--workers", "1", "--samples", "1", "--context-length", "32"),
            *("--json", "out/found.json"),
        ),
        needs=DATA,
        files=(*_RECORDS, *_SHARDS),
        guarded=_SHARDS,
        codes=(0, 1, 2),
        file_weight=6,
        line_weight=3,
    ),
    Target(
        *("adopt", "data_prep.adopt", "plain"),
        (
            *(
                "web=data/train-00000",
                "--validation",
                "data/validation-00000",
                "--tokenizer",
                "bytes",
            ),
            *("--link", "copy", "--out", "out"),
        ),
        needs=DATA,
        files=_SHARDS,
        file_weight=4,
        line_weight=3,
    ),
    Target(
        *("train", "train", "torch", ("config.yaml", "train.output_dir=out")),
        needs=(*_CONFIG, *DATA),
        files=(*_CONFIG, *_RECORDS, *_SHARDS),
        guarded=_SHARDS,
        keys=True,
        file_weight=1,
        line_weight=3,
    ),
    Target(
        *("continue", "train", "torch", ("config.yaml", "train.resume=auto", "train.max_steps=3")),
        needs=(*_CONFIG, *DATA, "run"),
        files=(*_CHECKPOINT, *_CHECKPOINT, "run/metrics.jsonl", "run/config.yaml"),
        outputs=("run",),
        guarded=_GUARDED_CHECKPOINT,
        keys=True,
        file_weight=4,
        line_weight=2,
    ),
    Target(
        *("init", "train", "torch"),
        ("config.yaml", "train.output_dir=out", "train.init_from=model", "train.max_steps=1"),
        needs=(*_CONFIG, *DATA, "model"),
        files=tuple(f"model/{name}" for name in MODEL_FILES[:2]),
        guarded=_WEIGHTS,
        line_weight=0,
    ),
    Target(
        *("export", "cat_lm.export", "torch", _EXPORT),
        needs=("run",),
        files=(*_CHECKPOINT, *_CHECKPOINT, "run/metrics.jsonl", "run/config.yaml"),
        guarded=_GUARDED_CHECKPOINT,
        file_weight=6,
        line_weight=3,
    ),
    Target(
        *("export-over", "cat_lm.export", "torch", ("run", "exported")),
        needs=("run", "exported"),
        files=("exported/export.json", "exported/*"),
        outputs=("exported",),
        file_weight=2,
        line_weight=0,
    ),
    Target(
        *("generate", "cat_lm.generate", "torch", ("model", "the cat", "--max-new-tokens", "3")),
        needs=("model",),
        files=tuple(f"model/{name}" for name in MODEL_FILES),
        guarded=_WEIGHTS,
        file_weight=6,
        line_weight=4,
    ),
    Target(
        *("generate-stdin", "cat_lm.generate", "torch"),
        ("run", "-", "--max-new-tokens", "2", "--greedy"),
        needs=("run",),
        files=("run/model/*",),
        guarded=("run/model/*.safetensors",),
        stdin="a dog",
    ),
    Target(
        *("generate-sharded", "cat_lm.generate", "torch"),
        ("sharded", "the cat", "--max-new-tokens", "2"),
        needs=("sharded",),
        files=("sharded/*.safetensors", "sharded/model.safetensors.index.json") * 2
        + ("sharded/config.json",),
        line_weight=0,
        file_weight=2,
    ),
    Target(
        *("generate-bin", "cat_lm.generate", "torch"),
        ("pickled", "the cat", "--max-new-tokens", "2"),
        needs=("pickled",),
        files=("pickled/*.bin", "pickled/*.bin", "pickled/*.json"),
        line_weight=0,
    ),
    Target(
        *("upcycle", "cat_lm.upcycle", "torch", ("pythia", "out", "--window", "4")),
        needs=("pythia",),
        files=tuple(f"pythia/{name}" for name in MODEL_FILES),
        file_weight=2,
        line_weight=2,
    ),
    Target(
        *("sparsify", "cat_lm.sparsify", "torch"),
        ("model", "out", "--block", "4", "--top-k", "2"),
        needs=("model",),
        files=tuple(f"model/{name}" for name in MODEL_FILES),
        line_weight=2,
    ),
    Target(
        *("sweep", "eval.length_sweep", "torch", ("model", "--data", "data", *_SWEEP)),
        needs=("model", *DATA),
        files=(*_RECORDS, *_SHARDS, "model/*.json", "model/*.safetensors"),
        guarded=(*_WEIGHTS, "data/validation-*"),
        file_weight=3,
        line_weight=3,
    ),
    Target(
        *("sweep-text", "eval.length_sweep", "torch", ("model", "--text", "text/a.txt", *_SWEEP)),
        needs=("model", "text"),
        files=("text/a.txt",),
        file_weight=0.5,
    ),
    Target(
        *("landmark-sweep", "eval.landmark", "torch"),
        ("sweep", "model", "--data", "data", "--lengths", "16", "--max-tokens", "64", *_LANDMARK),
        needs=("model", *DATA),
        files=("model/*.json",),
        guarded=(*_WEIGHTS, "data/validation-*"),
        file_weight=0.3,
    ),
    Target(
        *("landmark-diagnose", "eval.landmark", "torch"),
        ("diagnose", "model", "--data", "data", "--length", "16", "--windows", "2", *_LANDMARK),
        needs=("model", *DATA),
        files=("model/*.json",),
        guarded=(*_WEIGHTS, "data/validation-*"),
        file_weight=0.3,
    ),
    Target(
        *("report", "eval.report", "torch", ("run", "--out", "out")),
        needs=("run", *DATA),
        files=(*_RUN, *_RUN, "run/model/*.json", "run/model/*.safetensors", "data/manifest.json"),
        file_weight=1,
        line_weight=0.1,
    ),
    Target(
        *("zero-shot", "eval.zero_shot", "harness", ("model", *_ZERO_SHOT)),
        needs=("model", "tasks"),
        files=("tasks/piqa.jsonl", "tasks/piqa.jsonl", "model/*.json", "model/*.safetensors"),
        guarded=_WEIGHTS,
        file_weight=1,
        line_weight=1,
    ),
    Target(
        *("zero-shot-table", "eval.zero_shot", "harness"),
        (
            *("model", "--data-dir", "tasks", "--out", "out", "--limit", "2"),
            *("--bootstrap-iterations", "0"),
        ),
        needs=("model", "tasks"),
        files=("tasks/*.jsonl",),
        line_weight=0,
    ),
    Target(
        *("recall", "eval.recall", "torch", ("run", *_CELL, "--out", "recall")),
        needs=("recall",),
        files=("recall/cells/*.json",),
        outputs=("recall",),
        file_weight=2,
        line_weight=2,
    ),
    *(
        Target(
            *(f"long-{task.partition(':')[0]}", "eval.long_range", "torch"),
            ("prepare", task, "--data", "long", "--cache", "out"),
            needs=("long",),
            files=(pattern,),
            line_weight=0.3,
        )
        for task, pattern in _LONG.items()
    ),
    Target(
        *("long-run", "eval.long_range", "torch", ("run", *LONG_RANGE)),
        needs=("long", "long-range"),
        files=("long-range/cells/*.json", "long/mnist/*"),
        outputs=("long-range", "cache"),
        file_weight=2,
        line_weight=2,
    ),
    Target(
        *("streams", "eval.study", "torch"),
        (
            *("streams", "--data", "data", "--scale", "smoke", "--estimate-only", "--out", "out"),
            *("--workers", "1", "--device", "cpu"),
        ),
        needs=DATA,
        files=_RECORDS,
        file_weight=0.05,
        line_weight=0.05,
    ),
    Target(
        *("speed-conv", "eval.speed", "torch"),
        (
            *(
                "conv",
                "--shape",
                "1,8,2,4",
                "--windows",
                "2,3",
                "--repeats",
                "1",
                "--device",
                "cpu",
            ),
            *("--kernels", "cpu", "--json", "out/conv.json"),
        ),
        codes=(0, 1, 2),
        line_weight=0.2,
    ),
    Target(
        *("speed-decode", "eval.speed", "torch"),
        ("decode", *_TINY, "--prompts", "8", "--new-tokens", "2", "--uncached-tokens", "1"),
        codes=(0, 1, 2),
        line_weight=0.5,
    ),
    Target(
        *("study", "eval.study", "plain"),
        ("rivals", "--data", "nowhere", "--out", "out", "--models", "tfpp", "--estimate-only"),
        usual=2,
    ),
)
_FAKE = (*("in.bin", "out"), *("--number", "1"))
# Commands that do wrong, or right: what the tests of the fuzz test itself look at.
FAKES = tuple(
    Target(
        *(f"fake-{name}", "tests.fuzz.fakes", "fakes", (name, *_FAKE)),
        needs=("in.bin", "neighbour.txt", "run"),
        files=("in.bin",),
        outputs=("out", "run"),
        guarded=("in.bin",),
        limit_seconds=1.0,
        limit_bytes=200 * 2**20,
    )
    for name in FAKE_DEEDS
)
BY_NAME = {target.name: target for target in (*TARGETS, *FAKES)}
