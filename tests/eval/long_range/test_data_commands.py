"""`prepare` and `show`, the cache that they fill, and what every task says of itself."""

from __future__ import annotations

import pytest

from cat_lm.core.errors import UserError
from eval.long_range.__main__ import make_parser
from eval.long_range.tasks import SPLITS, Place, make_task
from tests.eval.long_range.files import write_folder

LISTOPS = "listops:min_length=3,max_length=40,train=12,validation=3,test=3"


def run(*arguments) -> None:
    parsed = make_parser().parse_args([str(argument) for argument in arguments])
    parsed.run(parsed)


def test_prepare_counts_what_it_made(tmp_path, capsys):
    run("prepare", LISTOPS, "--cache", tmp_path)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("train: 12 rows (official: 96,000); length ")
    assert [line.split(":")[0] for line in said[:3]] == list(SPLITS)
    shares = [float(share) for share in said[0].rpartition("classes ")[2].split()]
    assert len(shares) == 10 and sum(shares) == pytest.approx(1, abs=0.01)
    assert "generator: listops" in said


def test_show_writes_rows_for_people(tmp_path, capsys):
    run("show", LISTOPS, "--cache", tmp_path, "--rows", 2, "--split", "test")
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 4 and said[0].startswith("row 0: label ") and said[1].endswith(" <eos>")
    run("show", "select:noise=2,marked=1", "--rows", 1)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "row 0: length 4, the last 1 positions are scored" and len(said) == 6
    write_folder(tmp_path / "data")
    run("show", "pathfinder", "--cache", tmp_path, "--data", tmp_path / "data", "--rows", 1)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 33 and {len(line) for line in said[1:]} == {32}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", LISTOPS, "--rows", "0"), "must be from 1 to 1,000"),
        (("show", LISTOPS, "--split", "dev"), "invalid choice: 'dev'"),
        (("prepare", "list"), "task='list': must be one of listops, "),
        (("prepare", LISTOPS, "--workers", "0"), "must be from 1 to"),
        (("prepare", LISTOPS, "--data", "."), "--data: has no effect on listops, made by a"),
        (("show", "select", "--data", "."), "--data: has no effect on select, made by a"),
        (("prepare", "imdb", "--data", __file__), "test_data_commands.py: no such folder"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, message):
    with pytest.raises(UserError) as error:
        run(*arguments)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_damage_in_the_cache_is_one_line(tmp_path):
    task, place = make_task(LISTOPS), Place(cache=tmp_path)
    task.load("train", place)
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    record, ids = folder / "record.json", folder / "test.ids.npy"
    kept = {path: path.read_bytes() for path in (record, ids)}
    cases = [
        (ids, kept[ids][:-1], "test.ids.npy: is not the one that was written"),
        (ids, (folder / "train.ids.npy").read_bytes(), "is not the one that was written"),
        (ids, kept[ids][:-1] + b"\7", "test.ids.npy: is not the one that was written"),
        (record, kept[record].replace(b'"seed": 0', b'"seed": 1'), "was changed after"),
        (record, b"{", "record.json: is not JSON"),
        (record, b'{"key": {}, "origin": {}, "sha256": {}}', "has no format, must be 1"),
    ]
    for path, content, message in cases:
        path.write_bytes(content)
        with pytest.raises(UserError) as error:
            task.load("train", place)
        line = str(error.value)
        assert message in line and "\n" not in line
        path.write_bytes(kept[path])
    ids.unlink()
    with pytest.raises(UserError, match=f"delete {folder}, and the same command makes it again"):
        task.load("train", place)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cummin", "must be one of listops, imdb, aan, cifar10, pathfinder, smnist, pmnist"),
        ("select:noise=0", "noise=0: must be at least 1"),
        ("cumsum:seq_len=1", "seq_len=1: must be at least 2"),
        ("cummax:test=0", "test=0: must be at least 1"),
        ("cummax:seed=-2", "seed=-2: must be at least 0"),
        ("imdb:level=words", "level='words': choose one of characters, bytes"),
        ("imdb:protocol=mine", "protocol='mine': choose one of clean, lra"),
        ("aan:max_length=0", "max_length=0: must be at least 1"),
        ("pathfinder:size=64", "size=64: choose one of 32, 128"),
        ("pathfinder:contour=7", "contour=7: choose one of 14, 9, 6"),
        ("cifar10:pixels=byte", "pixels='byte': choose one of real, ids"),
        ("smnist:size=20", "size=20: choose one of 28, 14"),
        ("pmnist:order=rows", "order=rows: must be bit-reversal or the seed of an order"),
        ("pmnist:order=-1", "order=-1: must be bit-reversal or the seed of an order"),
        ("listops:lenght=3", "unknown option 'lenght'"),
        ("listops:source=files", "source='files': choose one of generated, official"),
        ("listops:source=official,min_length=9", "min_length: of the generator, without effect"),
        ("listops:min_length=50,max_length=51", "must leave a length between them"),
        ("listops:max_depth=3", "no tree of max_depth=3 and max_args=10 has more than 122"),
        ("listops:max_args=1", "must be from 1 to 30, and from 2 to 1,000"),
    ],
)
def test_wrong_options_are_one_line(text, message):
    with pytest.raises(UserError) as error:
        make_task(text)
    assert message in str(error.value) and "\n" not in str(error.value)
