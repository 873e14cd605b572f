"""The pages of eval/recall have the commands, options, defaults, examples and grids of the code."""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from cat_lm import mixers
from cat_lm.core.fields import parse_specification
from cat_lm.core.numbers import IGNORE_INDEX
from cat_lm.mixers import make_mixer
from eval import study
from eval.lab import cell as cells
from eval.lab import execution
from eval.recall import __main__ as command
from eval.recall import grids as plan
from eval.recall.tasks import TASKS, generate, make_task
from eval.recall.theory import report
from eval.studies import STUDIES
from tests.conftest import REPOSITORY

FOLDER = REPOSITORY / "eval/recall"
PROTOCOL = FOLDER / "protocol.md"
TEXT, TASK_PAGE, MIXER_PAGE, SCALE_PAGE = (
    path.read_text(encoding="utf-8")
    for path in (FOLDER / "README.md", FOLDER / "tasks/README.md", FOLDER / "mixers.md", PROTOCOL)
)
SMALL = replace(
    plan.SCALES["smoke"],
    models=("cat",),
    lengths=(16,),
    bigram_lengths=(24,),
    examples=64,
    bigram_examples=64,
    epochs=1,
    rates=(1e-2,),
)
SHORT = {
    "run": ["--train-examples", "64", "--epochs", "1", "--test-examples", "20"],
    "tradeoff": [],
    "theory": [],
}


def table(heading: str, text: str) -> dict[str, list[str]]:
    """Return the first table below a heading of a page: name -> the other columns."""
    part = text.split(f"\n## {heading}\n", 1)[1]
    lines = re.findall(r"^\|(.*)\|$", re.search(r"(^\|.*\|$\n)+", part, re.M)[0], re.M)
    rows = [[cell.strip() for cell in line.split("|")] for line in lines[2:]]
    return {row[0].strip("`"): row[1:] for row in rows}


def options_in(text: str) -> dict[str, str]:
    return dict(re.findall(r"`(\w+)=([\w.-]+)`", text))


def written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool | None) else str(value)


def test_its_commands_run(tmp_path, monkeypatch, tiny_corpus, capsys):
    """Short, in this process; what theory, landmark and streams compute has tests of its own."""
    done = []
    for scale in ("smoke", "cpu"):
        monkeypatch.setitem(plan.SCALES, scale, SMALL)

    def in_this_process(groups, out, device, workers):
        for run in (run for group in groups for run in group):
            cells.run(out, run.cell, device, quiet=True)

    monkeypatch.setattr(execution, "execute", in_this_process)
    monkeypatch.setattr(report, "theory", lambda *_: done.append("theory"))
    monkeypatch.setattr(report, "landmark_tradeoff", lambda out, _: done.append("landmark"))
    real = study.run
    monkeypatch.setattr(
        study,
        "run",
        lambda asked: (
            done.append(asked.name) if asked.name in ("streams", "mamba") else real(asked)
        ),
    )
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    for name in ("slimpajama", "python"):
        Path("data", name).symlink_to(tiny_corpus)
    lines = re.findall(r"^(python .*)$", TEXT, re.M)
    assert len(lines) >= 6
    for line in lines:
        words = shlex.split(line)
        assert words[:2] == ["python", "-m"]
        program, short = {
            "eval.recall": (command, SHORT.get(words[3], [])),
            "eval.study": (study, ["--workers", "1"]),
        }[words[2]]
        monkeypatch.setattr(sys, "argv", [*words[2:], *short])
        program.main()
    assert done == ["landmark", "streams", "mamba", "theory"]
    for name in ("accuracy.md", "accuracy.json", "accuracy.png", "accuracy-filters.svg"):
        assert (tmp_path / "runs/figures" / name).stat().st_size > 500
    assert not (tmp_path / "runs/figures/length.md").exists()  # an estimate alone
    (picture,) = (tmp_path / "runs/recall/cells").glob("mqar-cat-*-filters.png")
    assert f"filters: {picture.relative_to(tmp_path)}" in capsys.readouterr().out


def test_its_examples_are_what_the_generators_give():
    examples = re.search(r"```text\n(.*?)```", TASK_PAGE, re.S)[1].strip().split("\n\n")
    assert len(examples) >= 9
    for example in examples:
        head, inputs, labels = example.splitlines()
        specification, length = head.split(", length ")
        name, options = parse_specification(specification)
        rows = generate(make_task(name, int(length), options), 1, seed=0, split="train")
        assert inputs.split() == [str(token) for token in rows.inputs[0]], head
        shown = ["." if label == IGNORE_INDEX else str(label) for label in rows.labels[0]]
        assert labels.split() == shown, head


def test_its_tasks_are_there_with_their_options():
    rows = table("Tasks", TASK_PAGE)
    assert list(rows) == list(TASKS.names())
    for name, (_, told) in rows.items():
        task, fixed = make_task(name, 64), {*TASKS.get(name).fixed, "seq_len"}
        expected = {f.name: written(getattr(task, f.name)) for f in dataclasses.fields(task)}
        assert options_in(told) == {k: v for k, v in expected.items() if k not in fixed}


def test_its_mixers_are_there_with_layers_and_options():
    rows = table("Mixers and their options", MIXER_PAGE)
    assert set(rows) == set(mixers.names())
    of_cat = options_in(rows["cat"][2])
    for name, (layers, _, told) in rows.items():
        mixer = make_mixer(name)
        assert int(layers) == mixer.layers
        expected = {k: written(v) for k, v in dataclasses.asdict(mixer.options).items()}
        shared = of_cat if told.startswith("those of `cat`") else {}
        assert shared | options_in(told) == expected, name


def test_its_studies_are_there():
    rows = table("Studies", TEXT)
    assert list(rows) == [
        *("accuracy", "length", "one-layer", "one-layer-length", "width", "selective-copy"),
        *("streams", "mamba"),
    ]
    for name, (shows,) in rows.items():
        assert shows == STUDIES.get(name).title


def test_its_table_of_scales_is_that_of_the_plan():
    told = re.search(r"<!-- scales -->\n(.*?)<!-- /scales -->", SCALE_PAGE, re.S)[1]
    assert told == scales_table(), "run python -m tests.eval.recall.test_readme"


def scales_table() -> str:
    """Return a row for each field in which scales differ, a column for each scale."""

    def shown(value: object, where_none: str = "") -> str:
        if isinstance(value, tuple):
            return ", ".join(map(shown, value)) or "none"
        if isinstance(value, float):
            return f"{value:g}"
        return where_none if value is None else str(value)

    scales = plan.SCALES
    lines = [f"| | {' | '.join(scales)} |", "| --- |" + " --- |" * len(scales)]
    for field in dataclasses.fields(plan.Scale):
        left_out = {"batch_size": "Zoology's", "bigram_keys": "as many as fit"}.get(field.name, "")
        values = [shown(getattr(scale, field.name), left_out) for scale in scales.values()]
        if len(set(values)) == 1:
            continue
        lines.append(f"| {field.name} | {' | '.join(values)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    marked = re.sub(
        r"(<!-- scales -->\n).*?(<!-- /scales -->)",
        lambda match: match[1] + scales_table() + match[2],
        SCALE_PAGE,
        flags=re.S,
    )
    PROTOCOL.write_text(marked, encoding="utf-8")
