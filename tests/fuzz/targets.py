"""The commands that are fuzzed: how each is called where all is well, and what it reads.

A new option of a command needs nothing here: options come from its parser, keys from the schema.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

from tests.fuzz.server import REPOSITORY


@dataclass(frozen=True)
class Target:
    """A command with a line that it accepts; lists are texts with spaces.

    Attributes:
        name: of the target, for `--only`.
        command: for `python -m`, or a program at the top; names are relative to the case's folder.
        files: patterns of the files that may be damaged; none: only the command line is.
        guarded: patterns of files whose bytes a checksum vouches for: damage must be noticed.
        outputs: what it may write.
        codes: exit codes that it documents.
        stdin: what stands there.
        slow: a call takes seconds.
        usual: the exit code where nothing is odd.
    """

    name: str
    command: str
    files: str = ""
    guarded: str = ""
    outputs: str = "out"
    codes: tuple[int, ...] = (0, 2)
    stdin: str = ""
    slow: bool = False
    usual: int = 0

    @property
    def module(self) -> str:
        return self.command.split()[0]

    @property
    def line(self) -> tuple[str, ...]:
        return tuple(shlex.split(self.command)[1:])

    def words(self, line: tuple[str, ...]) -> list[str]:
        """Return the words after `python`."""
        if self.module == "-c":
            return ["-c", *line]
        program = REPOSITORY / f"{self.module}.py"
        return [*([str(program)] if program.exists() else ["-m", self.module]), *line]

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print the name alone in Hypothesis's reports."""
        printer.text(self.name)


SHARDS, RECORDS = "data/*.bin data/*.idx", "data/manifest.json data/tokenizer/*"
CONFIG, SITE, CARDS = "config.yaml base.yaml", "site.yaml", "model/*.json"
WEIGHTS, PIQA = "model/*.safetensors", "tasks/piqa.jsonl"
RUN, RUN_WEIGHTS = "run/model/*", "run/model/*.safetensors"
EXPORTED = "exported/export.json exported/*"
PICKLED = "pickled/*.bin pickled/*.bin pickled/*.json"
SHARDED = "sharded/*.safetensors sharded/*.index.json sharded/config.json"
READ = f"{WEIGHTS} data/validation-*"
STEP = "run/checkpoints/step-00000002"
CHECKPOINT = f"{STEP}/* {STEP}/*/* {STEP}/* {STEP}/*/* run/metrics.jsonl run/config.yaml"
_STATE = ("model/*", "state/*", "tokenizer/*", "random-*", "state.json", "run_config.yaml")
STATE = " ".join(f"{STEP}/{name}" for name in _STATE)
SLURM = f"run/slurm/* run/metrics.jsonl {STEP}/complete.json"
RESULTS = "run/config.yaml run/metrics.jsonl run/eval/*.json run/zero_shot/*.json"
REPORTED = f"{RESULTS} {RESULTS} run/model/*.json run/model/*.safetensors data/manifest.json"
PARTS = "unfinished/unfinished/* unfinished/unfinished/parts/*"
ENDS = ("*.json", "*.safetensors", "*.bin", "*.jinja")
MODEL, PYTHIA = (" ".join(f"{name}/{end}" for end in ENDS) for name in ("model", "pythia"))

PREPARE = "data_prep.prepare --source files --workers 1"
TEXT = rf"{PREPARE} --path text/a.txt --document-separator '\n\n' --out out"
BYTES = f"{PREPARE} --tokenizer bytes --path text --validation-fraction 0.2"
SPLIT = rf"{BYTES} --document-separator '\n\n'"
ADOPT = "data_prep.adopt web=data/train-00000 --validation data/validation-00000 --tokenizer bytes"
INSPECT = "data_prep.inspect data --workers 1 --samples 1 --context-length 32"
DOCTOR = "launch.doctor config.yaml --ranks 2"
PLAN = f"{DOCTOR},4 --device h100 train.peak_tflops=100"
SUBMIT = "launch.slurm submit config.yaml --nodes 2 --tasks-per-node 1 --site site.yaml --print"
ARRAY = "launch.slurm prepare --tasks 2 --print -- --source files --tokenizer bytes --path text"
TRAIN, GENERATE, INIT = "train config.yaml", "--max-new-tokens 2 --greedy", "train.init_from=model"
SWEEP = "eval.length_sweep model --lengths 16,32 --max-tokens 200 --methods none,yarn --out out"
LANDMARK = "eval.landmark sweep model --data data --blocks 4 --top-k 1 --local 1 --out out"
DIAGNOSE = LANDMARK.replace("sweep", "diagnose")
ZERO_SHOT = "eval.zero_shot model --data-dir tasks --out out --limit 2"
CELL = "eval.recall run --task mqar:keys=2 --mixer cat --d-model 16 --seq-len 16 --epochs 1"
CELL += " --train-examples 32 --test-examples 16 --batch-size 16 --out recall"
LONG_CELL = "eval.long_range run --task smnist:size=14 --mixer nope --d-model 16 --layers 1"
LONG_CELL += " --epochs 1 --device cpu --data long --cache cache --out long-range"
LONG_OUT = "long-range cache"
DECODE = "eval.speed decode --models cat --layers 1 --hidden-size 16 --heads 2 --vocab-size 64"
DECODE += " --repeats 1 --batch-size 1 --device cpu --prompts 8 --new-tokens 2 --uncached-tokens 1"
CONV = "eval.speed conv --shape 1,8,2,4 --windows 2,3 --repeats 1 --device cpu --kernels cpu"
STREAMS = "eval.study streams --data data --scale smoke --estimate-only --out out --device cpu"
RIVALS = "eval.study rivals --data nowhere --out out --models tfpp --estimate-only"
# Tasks of eval.long_range and the files that they read.
LONG = {
    "smnist": "long/mnist/*",
    "cifar10": "long/cifar-10-batches-bin/*",
    "imdb": "long/aclImdb/*/*/*",
    "aan:max_length=20": "long/tsv_data/*",
    "listops:source=official": "long/listops-1000/*",
    "pathfinder": "long/pathfinder32/*/*/*",
}


def _looks(name: str, command: str, files: str = "", guarded: str = "", **more: Any) -> Target:
    """Make a target of a command that has a code for what is wrong with what it looked at."""
    return Target(name, command, files, guarded, codes=(0, 1, 2), **more)


def _slow(name: str, command: str, files: str, guarded: str = "") -> Target:
    return Target(name, command, files, guarded, slow=True)


def _long_range(task: str) -> Target:
    command = f"eval.long_range prepare {task} --data long --cache out"
    return Target(f"long-{task.partition(':')[0]}", command, LONG[task])


TARGETS = (
    Target("config", PLAN, f"{CONFIG} data/manifest.json"),
    _looks("doctor", f"{DOCTOR} --json out/x.json", f"{CONFIG} {RECORDS} {SHARDS}", slow=True),
    Target("submit", f"{SUBMIT} train.global_batch_size=4", f"{CONFIG} {SITE} {SITE}"),
    Target("status", "launch.slurm status run --json out/status.json", SLURM),
    Target("resume", "launch.slurm resume run --site site.yaml --print", f"run/slurm/* {SITE}"),
    Target("array", f"{ARRAY} --out out"),
    Target("prepare", f"{SPLIT} --out out", "text/*"),
    Target("prepare-tokenizer", f"{TEXT} --tokenizer trained/tokenizer", "trained/tokenizer/*"),
    Target("prepare-again", f"{SPLIT} --out data", f"{RECORDS} {SHARDS}", outputs=""),
    Target("prepare-on", f"{BYTES} --out unfinished", PARTS, outputs="unfinished"),
    Target("prepare-over", f"{BYTES} --out unfinished --overwrite", PARTS, outputs="unfinished"),
    _looks("inspect", f"{INSPECT} --json out/found.json", f"{RECORDS} {SHARDS}", SHARDS),
    Target("adopt", f"{ADOPT} --link copy --out out", SHARDS),
    Target("train", f"{TRAIN} train.output_dir=out", f"{CONFIG} {RECORDS} {SHARDS}", SHARDS),
    Target("continue", f"{TRAIN} train.resume=auto train.max_steps=3", CHECKPOINT, STATE, "run"),
    Target("init", f"{TRAIN} train.output_dir=out {INIT}", f"{CARDS} {WEIGHTS}", WEIGHTS),
    Target("export", "cat_lm.export run out", CHECKPOINT, STATE),
    Target("export-over", "cat_lm.export run exported", EXPORTED, outputs="exported"),
    Target("generate", f"cat_lm.generate model 'the cat' {GENERATE}", MODEL, WEIGHTS),
    Target("generate-stdin", f"cat_lm.generate run - {GENERATE}", RUN, RUN_WEIGHTS, stdin="a dog"),
    Target("generate-sharded", f"cat_lm.generate sharded 'the cat' {GENERATE}", SHARDED),
    Target("generate-bin", f"cat_lm.generate pickled 'the cat' {GENERATE}", PICKLED),
    Target("upcycle", "cat_lm.upcycle pythia out --window 4", PYTHIA),
    Target("sparsify", "cat_lm.sparsify model out --block 4 --top-k 2", MODEL),
    _slow("sweep", f"{SWEEP} --data data", f"{RECORDS} {SHARDS} {CARDS} {WEIGHTS}", READ),
    _slow("sweep-text", f"{SWEEP} --text text/a.txt", "text/a.txt"),
    Target("landmark-sweep", f"{LANDMARK} --lengths 16 --max-tokens 64", CARDS, READ),
    Target("landmark-diagnose", f"{DIAGNOSE} --length 16 --windows 2", CARDS, READ),
    _slow("report", "eval.report run --out out", REPORTED),
    _slow("zero-shot", f"{ZERO_SHOT} --tasks piqa", f"{PIQA} {PIQA} {CARDS} {WEIGHTS}", WEIGHTS),
    _slow("zero-shot-table", f"{ZERO_SHOT} --bootstrap-iterations 0", "tasks/*.jsonl"),
    Target("recall", CELL, "recall/cells/*.json", outputs="recall"),
    *map(_long_range, LONG),
    Target("long-run", LONG_CELL, "long-range/cells/*.json long/mnist/*", outputs=LONG_OUT),
    _slow("streams", f"{STREAMS} --workers 1", RECORDS),
    _looks("speed-conv", f"{CONV} --json out/conv.json", slow=True),
    _looks("speed-decode", DECODE),
    Target("study", RIVALS, usual=2),
)
BY_NAME = {target.name: target for target in TARGETS}
