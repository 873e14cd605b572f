"""`python -m eval.landmark study`: its commands, what it keeps, and what it passes on."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cat_lm.config import load_config
from cat_lm.core.errors import UserError
from cat_lm.core.folders import Lock
from eval.common.interrupts import held
from eval.landmark import __main__ as command
from eval.landmark import study
from eval.landmark.study import SCALES, Settings, Stage, stages
from eval.speed.__main__ import _parser as speed_parser
from tests.commands import Command, python


def listed(scale: str, out: Path, *seeds: int) -> list[Stage]:
    return stages(SCALES[scale], out, None, ("none", "rope"), seeds or (0,))


@pytest.mark.parametrize("scale", SCALES)
def test_every_stage_is_a_command_that_exists(scale, tmp_path):
    found = listed(scale, tmp_path)
    assert len({stage.title for stage in found}) == len(found) == 1 + 2 * 2 * 4 + 2
    for stage in found:
        first, module, *words = stage.words
        if first == "train.py":
            config = load_config(study.ROOT / module, words)
            assert config.data.context_length == SCALES[scale].context
            assert config.train.landmark_loss in study.WAYS and config.train.resume == "auto"
        elif module == "eval.landmark":
            command._parser().parse_args(words)
        elif module == "eval.speed":
            speed_parser().parse_args(words)


def test_the_library_is_read_without_codec_tables(tmp_path):
    """Tables of codecs, near-copies of each other, would inflate what models gain by copying."""
    words = listed("cpu", tmp_path)[0].words
    assert words[words.index("--source") + 1] == "python-stdlib"
    assert words[words.index("--exclude") + 1] == "encodings/*"
    wanted = study.settings("smoke", None, verified=False)
    assert wanted.data == "python-stdlib without encodings/*"


def test_models_are_named_so_that_seeds_are_one_series(tmp_path):
    found = listed("smoke", tmp_path, 0, 1)
    sweeps = found[-1].words[found[-1].words.index("--sweeps") + 1 :][:8]
    names = [Path(file).parents[1].name for file in sweeps]
    models = ["none-dense", "none-guided", "rope-dense", "rope-guided"]
    assert names == [f"{model}-{seed}" for seed in (0, 1) for model in models]


RESULT = {"format": 1, "command": "eval.speed", "versions": {}}


@pytest.fixture
def lock(tmp_path) -> Lock:
    with held(tmp_path) as lock:
        yield lock


@pytest.fixture
def ran(monkeypatch) -> list[str]:
    """Names of the commands that were called; nothing runs, those named by a number end with it."""
    called = []

    def call(words: list[str], **_: object) -> int:
        called.append(words[1])
        return int(words[1]) if words[1].lstrip("-").isdigit() else 0

    monkeypatch.setattr(study, "run_to_end", call)
    return called


@pytest.mark.parametrize(
    ("code", "ends", "said"),
    [
        (75, 75, "[2/3] it ended with code 75; the same command goes on\n"),
        (-9, 137, "[2/3] it ended with code -9; the same command goes on\n"),
        (143, 143, "[2/3] it ended with code 143; the same command goes on\n"),
        (1, 1, "[2/3] it ended with code 1\n"),
        (2, 2, ""),
    ],
)
def test_a_stage_that_fails_ends_it(code, ends, said, ran, lock, capsys):
    found = [Stage("a", ("a",)), Stage("it", (str(code),)), Stage("never", ("never",))]
    with pytest.raises(SystemExit) as ended:
        study.run(found, lock)
    assert ended.value.code == ends and ran == ["a", str(code)]
    out, err = capsys.readouterr()
    assert err == said and out.startswith(f"$ cd {study.ROOT}\n") and out.count("cd ") == 1


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}", '{"rows": []}', json.dumps(RESULT)])
def test_only_a_result_is_done(text, ran, lock, tmp_path, capsys):
    record = tmp_path / "record"
    if text is not None:
        record.write_text(text)
    study.run([Stage("a", ("a",), record)], lock)
    done = text == json.dumps(RESULT)
    assert ran == ([] if done else ["a"]) and ("done before" in capsys.readouterr().out) is done


def test_a_result_of_another_model_is_not_done(ran, lock, tmp_path):
    """A model that was trained on, or anew, is diagnosed anew."""
    (tmp_path / "run/model").mkdir(parents=True)
    (tmp_path / "run/model/config.json").write_text("{}")
    weights, record = tmp_path / "run/model/model.safetensors", tmp_path / "diagnosis.json"
    weights.write_bytes(b"first")
    digests = "".join(hashlib.sha256(text).hexdigest() for text in (b"{}", b"first"))
    sha256 = hashlib.sha256(digests.encode()).hexdigest()
    record.write_text(json.dumps(RESULT | {"model_sha256": sha256}))
    found = [Stage("a", ("a",), record, tmp_path / "run")]
    study.run(found, lock)
    assert ran == []
    weights.write_bytes(b"trained on")
    study.run(found, lock)
    assert ran == ["a"]
    record.write_text(json.dumps({k: v for k, v in RESULT.items() if k != "format"}))
    with pytest.raises(UserError, match=r"diagnosis\.json: has no format, must be 1"):
        study.run(found, lock)


def test_what_models_are_trained_with_is_noted(tiny_corpus):
    noted = study.settings("smoke", tiny_corpus, verified=False).config_sha256
    assert noted == study.settings("smoke", None, verified=False).config_sha256
    text = (study.ROOT / "configs/quickstart.yaml").read_bytes()
    assert noted == hashlib.sha256(text).hexdigest()


def test_a_folder_is_of_one_study(ran, tmp_path, capsys):
    values = {"format": 1, "scale": "cpu", "data": "python-stdlib", "config_sha256": "1" * 64}
    first = Settings(**values)
    study.conduct([Stage("a", ("a",))], tmp_path, first)
    assert json.loads((tmp_path / "study.json").read_bytes()) == values
    study.conduct([Stage("b", ("b",))], tmp_path, first)
    for key, other, said in (
        ("scale", "smoke", 'scale is "cpu", and would now be "smoke"'),
        ("data", "0" * 64, f'"python-stdlib", and would now be "{"0" * 64}"'),
        ("config_sha256", "2" * 64, f'config_sha256 is "{"1" * 64}", and would now be "222'),
    ):
        with pytest.raises(UserError, match=said):
            study.conduct([Stage("c", ("c",))], tmp_path, Settings(**values | {key: other}))
    (tmp_path / "study.json").write_text('{"diverged": false}')
    with pytest.raises(
        UserError, match=r"study\.json: has no format, must be 1: .*; give another --out"
    ):
        study.conduct([Stage("c", ("c",))], tmp_path, first)
    assert ran == ["a", "b"]


def test_a_second_one_in_the_same_folder_is_one_line(tiny_corpus, tmp_path, lock):
    words = ("--scale", "smoke", "--data", tiny_corpus, "--out", tmp_path)
    done = python("-m", "eval.landmark", "study", *words)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "another call of the study works in it" in done.stderr
    assert not (tmp_path / "study.json").exists()


def test_text_is_looked_at_before_anything_is_trained(tiny_corpus, tmp_path):
    data, out = tmp_path / "data", tmp_path / "out"
    shutil.copytree(tiny_corpus, data)
    words = ("-m", "eval.landmark", "study", "--data", data, "--out", out, "--scale")
    manifest = json.loads((data / "manifest.json").read_text())
    whole = json.dumps(manifest)
    manifest["splits"]["validation"]["tokens"] = 127  # 4 × 32 are needed
    (data / "manifest.json").write_text(json.dumps(manifest))
    short = python(*words, "smoke", "--list")
    assert "validation split has 127 tokens, must have 128" in short.stderr
    (data / "manifest.json").write_text(whole)
    shard = next(data.glob("validation-*.bin"))
    shard.write_bytes(bytes(byte ^ 1 for byte in shard.read_bytes()))
    damaged = python(*words, "smoke")
    assert shard.name in damaged.stderr
    for done in (short, damaged):
        assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert not out.exists()


def test_listed_commands_begin_with_their_folder(tiny_corpus, tmp_path):
    words = ("--scale", "smoke", "--data", tiny_corpus, "--seeds", "0", "--out", tmp_path / "out")
    done = python("-m", "eval.landmark", "study", "--list", *words)
    lines = done.stdout.splitlines()
    assert lines[0] == f"cd {study.ROOT}" and len(lines) == 1 + 2 * 4 + 2
    assert all(line.startswith("python ") for line in lines[1:])
    assert not (tmp_path / "out").exists()


CHILD = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
def stop(*_):
    time.sleep(1)
    with open(folder / "saved", "a") as file:
        file.write("x")
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
(folder / "begun").write_text(str(os.getpid()))
os.rename(folder / "begun", folder / "pid")
time.sleep(60)
"""
STUDY = """
import sys
from pathlib import Path
from cat_lm.core.errors import command
from eval.landmark.study import Settings, Stage, conduct
folder, child = sys.argv[1:]
never = f"open({folder!r} + '/never', 'w')"
found = [Stage("it", ("-c", child, folder)), Stage("never", ("-c", never))]
settings = Settings(format=1, scale="cpu", data="x", config_sha256="y")
command(lambda: conduct(found, Path(folder), settings))()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_command_once_and_waits_for_it(number, tmp_path):
    called = Command("-c", STUDY, tmp_path, CHILD, apart=True)
    until = time.monotonic() + 60
    while not (tmp_path / "pid").exists() and time.monotonic() < until:
        time.sleep(0.02)
    child = int((tmp_path / "pid").read_text())
    try:
        assert os.getsid(child) == child, "a Ctrl-C of the terminal would reach it, too"
        called.send_signal(number)
        time.sleep(0.5)
        called.send_signal(number)  # of a person who does not want to wait
        assert called.wait(30) == 128 + number
        assert (tmp_path / "saved").read_text() == "x" and not (tmp_path / "never").exists()
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    assert called.said(1).splitlines() == [
        "stopping: the running command saves first",
        f"stopped by {number.name}; the same command goes on",
    ]


def test_commands_of_a_killed_one_keep_others_out(tmp_path):
    called = subprocess.Popen([sys.executable, "-c", STUDY, tmp_path, CHILD], cwd=study.ROOT)
    until = time.monotonic() + 60
    while not (tmp_path / "pid").exists() and time.monotonic() < until:
        time.sleep(0.02)
    called.kill()
    called.wait()
    try:
        with pytest.raises(UserError, match="left behind"), held(tmp_path):
            pass
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--positions", "rope,learned"], "'learned' is not one of none, rope"),
        (["--seeds", "x"], "--seeds"),
        (["--data", "nowhere"], "nowhere"),
        (["--scale", "huge"], "--scale"),
    ],
)
def test_wrong_words_are_said_in_one_line(words, said, tmp_path):
    done = python("-m", "eval.landmark", "study", *words, "--out", tmp_path / "out")
    assert done.returncode == 2 and said in done.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_a_small_one_from_text_to_figure(tiny_corpus, tmp_path, monkeypatch):
    def call(words: list[str], **_: object) -> int:
        done = python(*words[1:], cwd=study.ROOT)
        assert done.returncode == 0, done.stderr
        return 0

    monkeypatch.setattr(study, "run_to_end", call)
    found = stages(SCALES["smoke"], tmp_path, tiny_corpus, ("none",), (0,))
    wanted = study.settings("smoke", tiny_corpus, verified=True)
    study.conduct(found, tmp_path, wanted)
    record = json.loads((tmp_path / "landmark.json").read_text(encoding="utf-8"))
    assert {point["series"] for point in record["perplexity"]} == {"none-dense", "none-guided"}
    assert record["retrieval"] and record["decoding"] and (tmp_path / "landmark.png").exists()
    done = [tmp_path / "contexts.json", tmp_path / "none-guided-0/landmark/diagnosis.json"]
    before = [file.stat().st_mtime_ns for file in done]
    study.conduct(found, tmp_path, wanted)
    assert [file.stat().st_mtime_ns for file in done] == before
