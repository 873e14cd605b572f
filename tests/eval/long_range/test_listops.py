"""ListOps: right answers, the published distribution, rows by options and seed alone."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

from cat_lm.core.errors import UserError
from eval.long_range.tasks import Place, listops, make_task
from tests.eval.long_range.files import write_files


def rows_of(options: str, count: int = 200) -> list[tuple[int, str]]:
    task = make_task(f"listops:{options}")
    with mock.patch.object(listops, "_BLOCK", count):
        rows = listops.make_block(task, 0)
        return [(row[0], task.shown(np.frombuffer(row[1:], np.uint8) + 1, {})) for row in rows]


@pytest.fixture
def place(tmp_path):
    return Place(cache=tmp_path / "cache")


SMALL = "min_length=0,max_length=7,max_depth=2,max_args=2"  # 10 digits and 400 operations


def test_no_row_is_in_two_splits_and_more_training_rows_change_no_other_split(place):
    few = make_task(f"listops:{SMALL},train=100,validation=40,test=40")
    more = make_task(f"listops:{SMALL},train=300,validation=40,test=40")
    splits = {split: contents(more.load(split, place)) for split in ("train", "validation", "test")}
    assert [len(set(rows)) for rows in splits.values()] == [300, 40, 40]
    assert len(set().union(*splits.values())) == 380
    for split in ("validation", "test"):
        assert contents(few.load(split, place)) == splits[split]
    assert contents(few.load("train", place)) == splits["train"][:100]


def contents(examples) -> list[tuple[int, ...]]:
    batch = examples.batch(np.arange(len(examples)))
    pairs = zip(batch.labels, batch.inputs, batch.lengths, strict=True)
    return [(int(label), *row[:length].tolist()) for label, row, length in pairs]


def test_more_rows_than_there_are_is_one_line(place):
    message = r"^task listops: 500 different rows were asked for, and there seem to be [34]\d\d;.*$"
    with pytest.raises(UserError, match=message):
        make_task(f"listops:{SMALL},train=300,validation=100,test=100").load("train", place)


def test_lra_files_read_as_generated_rows_do(tmp_path, place):
    text = "( ( ( [MAX 4 ) ( ( ( [SM 9 ) 3 ) ] ) ) ] )"
    folder = tmp_path / "listops-1000"
    write_files(folder, [(text, 4)])
    task = make_task("listops:source=official")
    batch = task.load("validation", Place(tmp_path, place.cache)).batch(np.arange(1))
    assert task.shown(batch.inputs[0], {}) == "[MAX 4 [SM 9 3 X X <eos>"
    assert batch.labels.tolist() == [4]
    assert task.vocabulary == 17


@pytest.mark.parametrize(
    ("rows", "left_out", "message"),
    [
        ([("[MAX 4 ]", 4)], ("val",), "basic_val.tsv: no such file"),
        ([("[MAX 4 ]", 4)], ("train", "val", "test"), "listops-1000/basic_train.tsv: no such file"),
        ([], (), "basic_train.tsv: has 0 rows below"),
        ([("[MAX 4 ]", "")], (), "line 2: is truncated or another file"),
        ([("[MAX 4 ]", 12)], (), "line 2: is truncated or another file"),
        ([("[MAX 4 ]", 4), ("[MUX 4 ]", 4)], (), "line 3: has the token '[MUX'"),
        ([("[MAX 4 [MIN 2 ]", 4)], (), "line 2: is no whole tree"),
        ([("1 " * 2_000, 4)], (), "line 2: has 2,000 tokens, must have fewer than 2,000"),
    ],
)
def test_wrong_files_are_one_line(tmp_path, place, rows, left_out, message):
    write_files(tmp_path / "listops-1000", rows, left_out)
    with pytest.raises(UserError) as error:
        make_task("listops:source=official").load("train", Place(tmp_path, place.cache))
    line = str(error.value)
    assert message in line and "\n" not in line
    assert line.endswith(
        "had at https://github.com/google-research/long-range-arena (lra_release.gz)"
    )


def test_trees_that_never_fit_are_one_line(monkeypatch):
    monkeypatch.setattr(listops, "_TRIES", 50)
    with pytest.raises(UserError, match=r"of 50 trees none had more than 90,000 and"):
        rows_of("min_length=90000,max_length=100000")


def test_files_without_a_folder_are_one_line(place):
    with pytest.raises(UserError, match=r"^task listops: give --data DIR, where DIR/listops-1000/"):
        make_task("listops:source=official").load("train", place)
