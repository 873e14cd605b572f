"""One command from text to the figure: models trained dense and guided, with seeds, and measured.

Each stage is a command of this project, printed so that a person can type it, and what one has
finished stays: a study that was stopped goes on when it is called again.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from cat_lm.core.errors import REQUEUE_EXIT_CODE, UserError
from cat_lm.core.files import write_json
from cat_lm.core.folders import Lock
from cat_lm.core.outputs import is_result
from cat_lm.core.readers import Versioned, read_json, short
from eval.common.interrupts import Stopped, held, run_to_end, say, terminated_as_interrupt
from eval.common.library_text import EXCLUDED, LIBRARY
from eval.landmark.choices import LEARNED, SELECTORS

ROOT = Path(__file__).resolve().parents[2]  # of the checkout; all commands run there
CONFIG = "configs/quickstart.yaml"
WAYS = ("dense", "guided")  # of train.landmark_loss
POSITIONS = ("none", "rope")
LONGER = 4  # times the training length at which models are read
OWN_TEXT = f"python-stdlib without {EXCLUDED}"  # where none is given
OWN_DATA = "data"  # its folder in a study's
RECORD = "study.json"


@dataclass(frozen=True)
class Scale:
    """Sizes of a study.

    Attributes:
        train: changes of the configuration.
        context: tokens that models are trained with.
        blocks: their landmarks' size, and the sizes that are diagnosed.
        tokens: that selectors learn from, None to leave those out that do.
        sweep, decode: further words of those commands.
    """

    train: tuple[str, ...]
    context: int
    blocks: tuple[int, str]
    tokens: int | None
    sweep: tuple[str, ...]
    decode: tuple[str, ...]


SCALES = {
    "cpu": Scale(
        train=(),
        context=256,
        blocks=(16, "8,16,32,64"),
        tokens=262_144,
        sweep=(),
        decode=("--contexts", "16384,131072", "--new-tokens", "8", "--repeats", "5"),
    ),
    "smoke": Scale(
        train=(
            *("model.hidden_size=32", "model.num_hidden_layers=1", "model.num_attention_heads=2"),
            *("data.context_length=32", "train.max_steps=2", "optimizer.warmup_steps=1"),
            *("train.global_batch_size=2", "train.micro_batch_size=2"),
            "validation.max_tokens=64",
        ),
        context=32,
        blocks=(4, "4,8"),
        tokens=None,
        sweep=("--max-tokens", "512"),
        decode=(
            *("--contexts", "256,512", "--new-tokens", "2", "--repeats", "1", "--layers", "1"),
            *("--hidden-size", "32", "--heads", "2", "--vocab-size", "61", "--window", "3"),
        ),
    ),
}


@dataclass(frozen=True)
class Stage:
    """A command: what it does, its words after `python`, and the result that says it is done.

    Without such a file the command itself finds out what is left to do.

    Attributes:
        model: the run whose model the result must be of, where it is a model's.
    """

    title: str
    words: tuple[str, ...]
    done: Path | None = None
    model: Path | None = None


def stages(
    scale: Scale, out: Path, data: Path | None, positions: tuple[str, ...], seeds: tuple[int, ...]
) -> list[Stage]:
    """List a study's commands in their order; all models have one seed before any has two.

    Args:
        data: prepared text; None for the standard library's source without codec tables, which
            is prepared first.
    """
    folder = str(data or out / OWN_DATA)
    found = []
    if data is None:
        source = (*LIBRARY, "--validation-fraction", "0.02")
        words = (*source, "--tokenizer", "train:sentencepiece:4096", "--out", folder)
        found.append(Stage("text", ("-m", "data_prep.prepare", *words)))
    names = [(p, way, seed) for seed in seeds for p in positions for way in WAYS]
    for name in names:
        found += _of_model(scale, out / "-".join(map(str, name)), folder, *name)
    record = out / "contexts.json"
    decode = ("-m", "eval.speed", "decode", "--models", "cat", *scale.decode, "--threads", "1")
    found.append(Stage("decoding", (*decode, "--json", str(record)), record))
    measured = [out / "-".join(map(str, name)) / "landmark" for name in names]
    files = {
        "--sweeps": [str(folder / "landmark_sweep.json") for folder in measured],
        "--diagnoses": [str(folder / "diagnosis.json") for folder in measured],
        "--contexts": [str(record)],
    }
    words = tuple(word for option, given in files.items() for word in (option, *given))
    figure = ("-m", "eval.landmark", "figure", *words, "--out", str(out))
    return [*found, Stage("figure", figure)]


def _of_model(
    scale: Scale, folder: Path, data: str, position: str, way: str, seed: int
) -> list[Stage]:
    """Train a model, export it, and measure it at `LONGER` times its training length."""
    block, diagnosed = scale.blocks
    changes = (
        "model.attention=landmark",
        f"model.attention_options={{block: {block}, top_k: 4}}",
        f"model.position_embedding={position}",
        f"train.landmark_loss={way}",
        f"train.seed={seed}",
        f"data.path={data}",
        f"train.output_dir={folder}",
        "train.resume=auto",
    )
    select = [name for name in SELECTORS if name not in LEARNED or scale.tokens is not None]
    sweep = ("--lengths", str(LONGER * scale.context), "--blocks", str(block), "--top-k", "2,4,6")
    sweep += ("--select", ",".join(select), *scale.sweep)
    if scale.tokens is not None:
        sweep += ("--calibrate", data, "--tokens", str(scale.tokens))
    measured, name = folder / "landmark", folder.name
    read = ("--data", data, "--out", str(measured))
    landmark, diagnosis = ("-m", "eval.landmark"), measured / "diagnosis.json"
    words = ("diagnose", str(folder), "--length", str(LONGER * scale.context), *read)
    return [
        Stage(f"{name}: training", ("train.py", CONFIG, *scale.train, *changes)),
        Stage(f"{name}: export", ("-m", "cat_lm.export", str(folder), str(folder / "model"))),
        Stage(f"{name}: sweep", (*landmark, "sweep", str(folder), *read, *sweep)),
        Stage(f"{name}: diagnosis", (*landmark, *words, "--blocks", diagnosed), diagnosis, folder),
    ]


class Settings(Versioned):
    """Hold what all results of a study have in common.

    Attributes:
        scale: one of `SCALES`.
        data: the fingerprint of prepared text, or `OWN_TEXT`.
        config_sha256: of `CONFIG`, which all models are trained with.
    """

    scale: str
    data: str
    config_sha256: str


class _OfModel(Versioned):
    """Hold which model a stage's result is of."""

    model_sha256: str


def settings(scale: str, data: Path | None, verified: bool) -> Settings:
    """Look at the text that a study shall use, before anything is trained.

    Args:
        verified: compare its shards with their checksums, too.

    Raises:
        UserError: there is no such text, it is damaged, or too short for a measurement.
    """
    config = hashlib.sha256((ROOT / CONFIG).read_bytes()).hexdigest()
    if data is None:
        return Settings(format=1, scale=scale, data=OWN_TEXT, config_sha256=config)
    from cat_lm.data.manifest import read_manifest
    from cat_lm.data.opening import open_verified

    manifest = read_manifest(data)
    tokens = manifest["splits"]["validation"]["tokens"]
    least = LONGER * SCALES[scale].context
    if tokens < least:
        raise UserError(
            f"--data {data}: its validation split has {tokens:,} tokens, must have {least:,}: "
            f"--scale {scale} measures at {LONGER} times {SCALES[scale].context}"
        )
    if verified:
        for split in ("train", "validation"):
            open_verified(data, split)
    return Settings(format=1, scale=scale, data=manifest["fingerprint"], config_sha256=config)


def conduct(found: list[Stage], out: Path, wanted: Settings) -> None:
    """Run a study in its folder, which is held meanwhile.

    Raises:
        UserError: the folder is another study's, or another call works in it.
        SystemExit: as `run`; with 128 + N after signal N, when the running command has ended.
    """
    try:
        with terminated_as_interrupt(), held(out) as lock:
            claim(out, wanted)
            run(found, lock)
    except Stopped as stop:
        say(f"stopped by {signal.Signals(stop.number).name}; the same command goes on")
        raise SystemExit(128 + stop.number) from None


def claim(out: Path, wanted: Settings) -> None:
    """Note in a folder what study it has.

    Raises:
        UserError: it has another.
    """
    path = out / RECORD
    if not os.path.lexists(path):
        write_json(path, wanted.model_dump())
        return
    advice = "give another --out"
    earlier = read_json(path, Settings, advice).model_dump()
    for key, value in wanted.model_dump().items():
        if earlier[key] != value:
            was, now = (short(x, most=80) for x in (earlier[key], value))
            raise UserError(f"{path}: {key} is {was}, and would now be {now}; {advice}")


def entered() -> str:
    """Return the line that enters the folder in which the commands run."""
    return shlex.join(["cd", str(ROOT)])


def shown(stage: Stage) -> str:
    """Return a stage's command as a person types it."""
    return shlex.join(["python", *stage.words])


def run(found: list[Stage], lock: Lock) -> None:
    """Run the stages that are not done.

    Args:
        lock: of the study's folder, which the commands hold as long as they live.

    Raises:
        SystemExit: a stage ended with a code other than 0, which is this one's, too.
        Stopped: as `run_to_end`.
    """
    print(f"$ {entered()}", flush=True)
    for number, stage in enumerate(found, start=1):
        heading = f"[{number}/{len(found)}] {stage.title}"
        if _is_done(stage):
            print(f"{heading}: done before", flush=True)
            continue
        print(f"\n{heading}\n$ {shown(stage)}", flush=True)
        started = time.monotonic()
        words = [sys.executable, *stage.words]
        code = run_to_end(words, cwd=ROOT, pass_fds=[lock.fileno()])
        if code:
            _say_end(heading, code)
            raise SystemExit(code if code > 0 else 128 - code)
        print(f"{heading}: {time.monotonic() - started:.0f} s", flush=True)


def _is_done(stage: Stage) -> bool:
    """Return True if a stage's result is there, and of the model that is there now."""
    if stage.done is None or not is_result(stage.done):
        return False
    if stage.model is None:
        return True
    from cat_lm.pretrained.loading import model_folder
    from eval.common.models import folder_sha256

    measured = read_json(stage.done, _OfModel).model_sha256
    return measured == folder_sha256(model_folder(stage.model))


def _say_end(heading: str, code: int) -> None:
    """Print how a stage failed; for bad input it has printed itself what must change."""
    if code == 2:
        return
    by_signal = code < 0 or code > 128
    goes_on = "; the same command goes on" if by_signal or code == REQUEUE_EXIT_CODE else ""
    say(f"{heading} ended with code {code}{goes_on}")
