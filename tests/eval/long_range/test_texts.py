"""IMDB and retrieval: letters as ids, cut and padded at the end, from the official files."""

from __future__ import annotations

import numpy as np
import pytest

from cat_lm.core.errors import UserError
from eval.long_range.tasks import Place, make_task, texts
from eval.long_range.tasks.texts import Retrieval
from tests.eval.long_range.files import PAIRS, write_pairs, write_reviews


def places(tmp_path):
    return Place(tmp_path / "data", tmp_path / "cache")


def texts_of(task, place, split):
    examples = task.load(split, place)
    batch = examples.batch(np.arange(len(examples)))
    rows = zip(batch.inputs, batch.labels, strict=True)
    return [(task.shown(row, examples.origin), int(label)) for row, label in rows]


def test_characters_are_numbered_by_frequency_and_end():
    encode, found = make_task("imdb:max_length=5").encoder(["bbaa", "abc", "zzzzb"], least=2)
    # a, b: 3 and 4 times; z four times, cut to four letters: its b is not seen
    assert found == {"characters": "zab"}
    assert list(encode("abz")) == [3, 4, 2, 1]  # ids 4, 5, 3 and the end's 2, less one
    assert list(encode("cc")) == [0, 0, 1]  # unknown
    assert list(encode("aaaaaaa")) == [3, 3, 3, 3, 1]  # the end is kept
    assert list(encode("")) == [1]


def test_reviews_are_read_with_their_classes(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "LEAST", 1)
    write_reviews(tmp_path / "data")
    task, place = make_task("imdb:max_length=100"), places(tmp_path)
    found = {split: texts_of(task, place, split) for split in ("train", "validation", "test")}
    assert [len(rows) for rows in found.values()] == [36, 4, 40]
    for rows in found.values():
        assert all(label == ("pos" in text.split()) for text, label in rows)
    held = {text for text, _ in found["validation"]}
    kept = {text for text, _ in found["train"]}
    assert not held & kept and all(text.startswith("train") for text in held | kept)
    assert all(text.startswith("test") for text, _ in found["test"])
    assert any("tenth" in note for note in task.notes)


def test_the_official_protocol_validates_on_the_test_split_and_says_so(tmp_path):
    write_reviews(tmp_path / "data")
    task, place = make_task("imdb:protocol=lra,level=bytes"), places(tmp_path)
    assert texts_of(task, place, "validation") == texts_of(task, place, "test")
    assert len(task.load("train", place)) == 40
    assert any("test split" in note for note in task.notes)


def test_a_text_twice_is_never_in_training_and_validation(tmp_path):
    again = {("train", kind, n): f"text {n % 4}" for kind in ("pos", "neg") for n in range(20)}
    write_reviews(tmp_path / "data", again)
    task, place = make_task("imdb:level=bytes"), places(tmp_path)
    train, held = ({t for t, _ in texts_of(task, place, s)} for s in ("train", "validation"))
    assert len(train) == 3 and len(held) == 1 and not train & held


def test_characters_of_validation_and_test_are_not_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "LEAST", 1)
    write_reviews(tmp_path / "data", {("test", "pos", 0): "only here: ∞"})
    task, place = make_task("imdb"), places(tmp_path)
    examples = task.load("test", place)
    assert "∞" not in examples.origin["characters"]
    shown = dict(texts_of(task, place, "test"))
    # "r", ":" and the sign stand in no training text
    assert "\N{REPLACEMENT CHARACTER}" in "".join(shown)


def test_an_empty_text_is_one_position(tmp_path):
    write_reviews(tmp_path / "data", {("test", "neg", 0): ""})
    place = places(tmp_path)
    for level, ids in (("bytes", 0), ("characters", 2)):
        examples = make_task(f"imdb:level={level}").load("test", place)
        batch = examples.batch(np.arange(1))
        assert (batch.inputs.tolist(), batch.lengths.tolist()) == ([[ids]], [1])
        assert examples.lengths[0] == 1


def test_bytes_are_padded_at_the_end_and_cut_at_the_length(tmp_path):
    write_reviews(tmp_path / "data", {("test", "neg", 0): "aé" * 20, ("test", "neg", 1): "b"})
    task = make_task("imdb:level=bytes,max_length=8")
    examples = task.load("test", places(tmp_path))
    batch = examples.batch(np.array([0, 1]))
    whole = [byte + 1 for byte in ("aé" * 20).encode()[:8]]
    assert batch.inputs.tolist() == [whole, [ord("b") + 1] + [0] * 7]
    assert batch.lengths.tolist() == [8, 1]
    assert examples.batch(np.array([1])).inputs.shape == (1, 1)
    assert batch.inputs.max() < task.vocabulary == 257


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda base: drop(base / "test" / "neg"), "aclImdb/test/neg: no such file or folder"),
        (lambda base: drop(base / "train" / "pos"), "aclImdb/train/pos: no such file or folder"),
        (lambda base: empty(base / "test" / "pos"), "test/pos: has no review (ID_STARS.txt)"),
    ],
)
def test_reviews_that_are_missing_are_one_line(tmp_path, damage, message):
    write_reviews(tmp_path / "data")
    damage(tmp_path / "data" / "aclImdb")
    with pytest.raises(UserError) as error:
        make_task("imdb").load("train", places(tmp_path))
    assert message in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).endswith("had at https://ai.stanford.edu/~amaas/data/sentiment")


def drop(folder):
    folder.rename(folder.with_name("gone"))


def empty(folder):
    for path in folder.iterdir():
        path.unlink()


def test_a_review_that_is_no_text_is_one_line(tmp_path):
    write_reviews(tmp_path / "data")
    path = tmp_path / "data" / "aclImdb" / "train" / "pos" / "3_7.txt"
    path.write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match=r"3_7.txt: is not UTF-8 text \(byte 3\)$"):
        make_task("imdb").load("train", places(tmp_path))


def test_retrieval_has_two_documents_a_row(tmp_path):
    write_pairs(tmp_path / "data" / "tsv_data")
    task, place = make_task("aan:level=bytes,max_length=9"), places(tmp_path)
    examples = task.load("test", place)
    batch = examples.batch(np.array([1, 0]))
    assert task.towers == 2 and batch.inputs.shape == (2, 2, 9)
    assert batch.lengths.tolist() == [[1, 3], [9, 9]] and batch.labels.tolist() == [0, 1]
    shown = [[task.shown(tower, examples.origin) for tower in row] for row in batch.inputs]
    assert shown == [["", "b\tc"], ['of "trees', "a longer "]]
    assert (examples.lengths[[1, 0]] == batch.lengths).all()


def test_retrieval_in_characters_ends_each_document(tmp_path):
    write_pairs(tmp_path / "data")
    task, place = make_task("aan"), places(tmp_path)
    batch = task.load("train", place).batch(np.array([0, 1]))
    ends = np.take_along_axis(batch.inputs, batch.lengths[:, :, None] - 1, axis=2)
    assert (ends == 2).all()
    assert batch.lengths.tolist() == [[11, 14], [1, 4]]
    assert task.length == 4000 and task.vocabulary == 256


@pytest.mark.parametrize(
    ("rows", "names", "message"),
    [
        (PAIRS, ("train", "test"), "new_aan_pairs.eval.tsv: no such file or folder"),
        (PAIRS, (), "new_aan_pairs.train.tsv: no such file or folder"),
        (
            [*PAIRS, ("1", "P1", "P2", "cut")],
            None,
            "tsv, row 3: has 4 columns and the label '1', must",
        ),
        (
            [("yes", "P1", "P2", "a", "b")],
            None,
            "row 1: has 5 columns and the label 'yes', must have label (0 or 1)",
        ),
        ([], None, "new_aan_pairs.train.tsv: is empty"),
    ],
)
def test_wrong_pairs_are_one_line(tmp_path, rows, names, message):
    (tmp_path / "data").mkdir()
    write_pairs(
        tmp_path / "data" / "tsv_data", rows, ("train", "eval", "test") if names is None else names
    )
    with pytest.raises(UserError) as error:
        make_task("aan").load("train", places(tmp_path))
    assert message in str(error.value) and "\n" not in str(error.value)
    assert "OpenNLPLab/lra" in str(error.value)


def test_retrieval_from_the_hub_takes_the_same_files_at_a_pinned_revision(tmp_path, monkeypatch):
    import huggingface_hub

    write_pairs(tmp_path / "hub" / "data" / "aan")
    asked = []

    def download(name, path, revision, repo_type):
        asked.append((name, path, revision, repo_type))
        return str(tmp_path / "hub" / path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    examples = make_task("aan").load("train", Place(cache=tmp_path / "cache"))
    assert len(examples) == 2 and examples.origin["hub"] == "OpenNLPLab/lra"
    assert {(n, r, t) for n, _, r, t in asked} == {
        ("OpenNLPLab/lra", "6cb133c44f406da743661488df9e977b87d98775", "dataset")
    }


def test_pairs_that_are_cut_are_one_line(tmp_path, monkeypatch):
    """A row that was cut in its last text still has five columns."""
    write_pairs(tmp_path / "data")
    path = tmp_path / "data" / "new_aan_pairs.test.tsv"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UserError) as error:
        make_task("aan").load("train", places(tmp_path))
    assert str(error.value).startswith(f"{path}: is truncated: its last row has no end")
    # One with all rows may end without a new line.
    monkeypatch.setattr(Retrieval, "official", {"train": 2, "validation": 2, "test": 2})
    assert len(make_task("aan").load("train", places(tmp_path))) == 2
