"""Parts and shards: damage, parts of other work, malformed lines, when parts go."""

import json
import shutil

import pytest

from cat_lm.core.errors import UserError
from cat_lm.core.files import unseal, write_sealed
from data_prep.assemble import shards
from data_prep.encode import parts
from tests.conftest import write_jsonl
from tests.data_prep.helpers import WISHES, made, set_flags
from tests.prepared_data import digests


@pytest.mark.parametrize("kind", ["bin", "docs", "json"])
def test_a_damaged_part_is_noticed_and_made_again(tmp_path, sets, expected, prepare, capsys, kind):
    out = tmp_path / "out"
    prepare(out, *set_flags(sets, *WISHES, "--stage", "encode"))
    damaged, cut, gone = (out / "unfinished/parts" / f"part-0000{n}.{kind}" for n in (1, 2, 3))
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    cut.write_bytes(cut.read_bytes()[:-1])
    gone.unlink()
    prepare(out, *set_flags(sets, *WISHES))
    assert ("1 damaged parts are made again" in capsys.readouterr().out) == (kind != "json")
    assert made(out) == expected


@pytest.mark.parametrize("name", ["plan", "part-00001"])
def test_records_of_another_version_are_refused(tmp_path, sets, expected, prepare, name):
    out = prepare(tmp_path / "out", *set_flags(sets, *WISHES, "--stage", "encode"))
    path = out / "unfinished/parts" / f"{name}.json"
    record, _ = unseal(json.loads(path.read_text()))
    del record["format"]
    write_sealed(path, record)
    said = rf"{name}\.json: has no format, must be 1: .*; delete {path.parent}$"
    with pytest.raises(UserError, match=said):
        prepare(out, *set_flags(sets, *WISHES))
    shutil.rmtree(path.parent)
    prepare(out, *set_flags(sets, *WISHES))
    assert made(out) == expected


def test_a_part_that_is_damaged_while_shards_are_written_is_made_again(
    tmp_path, sets, expected, prepare, monkeypatch
):
    out = tmp_path / "out"

    def stopped(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("data_prep.assemble.pipeline.write_shard", stopped)
        with pytest.raises(KeyboardInterrupt):
            prepare(out, *set_flags(sets, *WISHES))
    damaged, gone = (out / "unfinished/parts" / f"part-0000{n}.bin" for n in (0, 4))
    damaged.write_bytes(bytes(damaged.stat().st_size))
    gone.unlink()
    prepare(out, *set_flags(sets, *WISHES))
    assert made(out) == expected


def test_shard_that_was_cut_short_is_written_again(tmp_path, sets, expected, prepare, monkeypatch):
    out, written = tmp_path / "out", []

    def stopping(task, report):
        if written:
            raise KeyboardInterrupt
        written.append(shards.write_shard(task, report))
        return written[0]

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("data_prep.assemble.pipeline.write_shard", stopping)
        prepare(out, *set_flags(sets, *WISHES))
    path = out / f"unfinished/{written[0]}.bin"
    path.write_bytes(path.read_bytes()[:-2])
    prepare(out, *set_flags(sets, *WISHES))
    assert made(out) == expected


def test_parts_of_other_work_are_never_taken(tmp_path, sets, prepare):
    """Even where someone has put them there."""
    out = tmp_path / "out"
    prepare(out, *set_flags(sets, "--stage", "encode"))
    prepare(tmp_path / "other", *set_flags(sets, "--sets", "Large", "--stage", "encode"))
    for file in (tmp_path / "other/unfinished/parts").glob("part-*"):
        shutil.copy(file, out / "unfinished/parts")
    prepare(out, *set_flags(sets))
    assert digests(out) == digests(prepare(tmp_path / "whole", *set_flags(sets)))


@pytest.mark.parametrize("own_validation", [True, False])
def test_parts_go_when_the_shards_that_read_them_are_done(
    tmp_path, sets, prepare, monkeypatch, own_validation
):
    left = []
    real = parts.remove_part

    def remove(*given):
        real(*given)
        folder = tmp_path / "out"
        left.append(
            (
                len(list(folder.glob("unfinished/parts/*.bin"))),
                len(list(folder.glob("unfinished/train-*.idx"))),
            )
        )

    monkeypatch.setattr("data_prep.encode.job.remove_part", remove)
    arguments = set_flags(sets, "--shard-tokens", "5K")
    if not own_validation:  # held-out documents come from all parts
        arguments = ("--source", "files", "--path", sets / "train", *arguments[4:])
    prepare(tmp_path / "out", *arguments)
    numbers, shards = zip(*left, strict=True)
    assert list(numbers) == [*range(6, 0, -1), 0][not own_validation :]
    assert list(shards) == sorted(shards) and shards[-4] < shards[-1]


def test_malformed_lines_are_counted_listed_and_limited(tmp_path, prepare, capsys):
    for number in range(3):
        write_jsonl(tmp_path / f"{number}.jsonl", [f"{number} {n}" for n in range(40)])
    with open(tmp_path / "1.jsonl", "a") as stream:
        stream.write('{"\\ud800": 1}\n{"text": 5}\n')
    arguments = ("--source", "files", "--path", tmp_path, "--tokenizer", "bytes", "--workers", 1)
    complaint = r"2 of 122 records are malformed, more than .* 0.01% .* keys are \\ud800 "
    with pytest.raises(UserError, match=complaint):
        prepare(tmp_path / "out", *arguments)
    out = prepare(tmp_path / "out", *arguments, "--max-malformed", "2%")
    assert "left out: 2 malformed records, see malformed.log" in capsys.readouterr().out
    lines = (out / "malformed.log").read_text().splitlines()
    assert [line.split(": ")[0] for line in lines] == ["1.jsonl:41", "1.jsonl:42"]
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["malformed_documents"] == 2
    assert sum(manifest["splits"][s]["documents"] for s in manifest["splits"]) == 120
    other = prepare(tmp_path / "2", *arguments, "--max-malformed", 2)
    assert digests(other) == digests(out), "the limit decides nothing else"
