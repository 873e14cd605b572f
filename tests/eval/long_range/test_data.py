"""The rows of tasks: from official files and the Hub, pixel for pixel and letter for letter."""

from __future__ import annotations

import gzip
import io
from pathlib import Path
from unittest import mock

import datasets
import huggingface_hub
import numpy as np
import pytest
from PIL import Image

from cat_lm.core.errors import UserError
from eval.long_range.__main__ import make_parser
from eval.long_range.tasks import SPLITS, Place, listops, make_task, texts
from eval.long_range.tasks.texts import Retrieval
from tests.eval.long_range import files
from tests.eval.long_range.files import MNIST, PAIRS, cifar, idx

LISTOPS = "listops:min_length=3,max_length=40,train=12,validation=3,test=3"
SMALL = "min_length=0,max_length=7,max_depth=2,max_args=2"  # 10 digits and 400 operations


@pytest.fixture
def data(tmp_path) -> Path:
    """A folder with official files of every data set."""
    root = tmp_path / "data"
    files.write_mnist(root / "mnist")
    files.write_cifar(root / "cifar-10-batches-bin")
    files.write_folder(root)
    files.write_files(root / "listops-1000", [("( [MAX 4 ( [SM 9 3 ] ) ] )", 4)])
    files.write_reviews(root)
    files.write_pairs(root / "tsv_data")
    return root


def place_of(folder: Path | None, tmp_path: Path) -> Place:
    return Place(folder, tmp_path / "cache")


def rows_of(text: str, place: Place, split: str = "test"):
    examples = make_task(text).load(split, place)
    return examples.batch(np.arange(len(examples)))


def run(*arguments: object) -> None:
    parsed = make_parser().parse_args([str(argument) for argument in arguments])
    parsed.run(parsed)


class TestImages:
    @pytest.mark.parametrize(("folder", "packed"), [("MNIST/raw", False), ("", True)])
    def test_mnist_is_read_from_every_layout(self, folder, packed, tmp_path):
        files.write_mnist(tmp_path / "official" / folder, packed)
        found = rows_of("smnist", place_of(tmp_path / "official", tmp_path))
        images, labels = MNIST["t10k"]
        assert np.allclose(found.inputs[:, :, 0] * 255, images.reshape(7, 784), atol=1e-4)
        assert (found.labels == labels).all()

    def test_a_tenth_of_the_training_images_is_held_out_by_content(self, data, tmp_path):
        splits = [rows_of("smnist", place_of(data, tmp_path), s) for s in SPLITS[:2]]
        assert [len(x.labels) for x in splits] == [36, 4]
        images, labels = MNIST["train"]
        known = {
            (image / np.float32(255)).tobytes(): label
            for image, label in zip(images.reshape(40, -1).astype(np.float32), labels, strict=True)
        }
        for batch in splits:
            for row, label in zip(batch.inputs, batch.labels, strict=True):
                assert known.pop(row.tobytes()) == label
        assert not known

    def test_14_pixels_a_side_are_means_of_four(self, data, tmp_path):
        found = rows_of("smnist:size=14", place_of(data, tmp_path)).inputs
        image = MNIST["t10k"][0][3].astype(float)
        assert found[3, 2 * 14 + 3, 0] == pytest.approx(image[4:6, 6:8].mean() / 255, abs=1e-6)

    def test_permuted_mnist_has_one_order_for_all(self, data, tmp_path):
        plain = rows_of("smnist", place_of(data, tmp_path)).inputs
        for options in ("", ":order=92916", ":order=1"):
            order = make_task(f"pmnist{options}").positions()
            assert sorted(order) == list(range(784))
            found = rows_of(f"pmnist{options}", place_of(data, tmp_path)).inputs
            assert (found == plain[:, order]).all()
        assert sorted(make_task("pmnist:size=14").positions()) == list(range(196))
        # The order of earlier papers, by numpy's old generator; S4's, of bits read backwards.
        wanted = np.random.RandomState(92916).permutation(784)
        assert (make_task("pmnist:order=92916").positions() == wanted).all()
        backwards = sorted(range(784), key=lambda number: f"{number:010b}"[::-1])
        assert make_task("pmnist").positions().tolist() == backwards

    def test_a_file_that_was_replaced_is_read_again(self, data, tmp_path):
        before = rows_of("smnist", place_of(data, tmp_path)).inputs
        path = data / "mnist" / "t10k-images-idx3-ubyte.gz"
        path.write_bytes(gzip.compress(idx(255 - MNIST["t10k"][0])))
        assert np.allclose(rows_of("smnist", place_of(data, tmp_path)).inputs, 1 - before)

    def test_cifar_is_grey_as_pillow_makes_it(self, data, tmp_path):
        place = place_of(data, tmp_path)
        real, ids = (rows_of(f"cifar10:pixels={x}", place) for x in ("real", "ids"))
        for row, record in enumerate(cifar(3, 9)):
            colours = record[1:].reshape(3, 32, 32).transpose(1, 2, 0)
            pixels = np.asarray(Image.fromarray(colours).convert("L")).ravel()
            assert (ids.inputs[row] == pixels).all() and ids.labels[row] == record[0]
            wanted = (pixels / 255 - 122.6 / 255) / (61 / 255)
            assert np.allclose(real.inputs[row, :, 0], wanted, atol=1e-5)
        assert len(list(place.cache.glob("cifar10-*"))) == 1  # one cache for both

    def test_pathfinder_is_split_by_content_and_without_empty_images(self, data, tmp_path):
        base = data / "pathfinder32" / "curv_contour_length_14"
        (base / "imgs/0/sample_3.png").write_bytes(b"")  # as in the release
        place = place_of(data, tmp_path)
        splits = {split: make_task("pathfinder").load(split, place) for split in SPLITS}
        assert [len(examples) for examples in splits.values()] == [16, 2, 1]
        first, ids = splits["train"], make_task("pathfinder:pixels=ids").load("train", place)
        assert first.origin["empty_files"] == 1
        pixels = ids.batch(np.arange(16)).inputs
        assert np.allclose(pixels / 127.5 - 1, first.batch(np.arange(16)).inputs[:, :, 0])
        Image.new("L", (32, 32)).save(base / "imgs/0/sample_4.png")
        other = make_task("pathfinder").load("train", Place(data, tmp_path / "other"))
        assert other.origin["sha256"] != first.origin["sha256"] and other.origin["images"] == 19


class TestTexts:
    def test_characters_are_numbered_by_frequency_and_end(self):
        encode, found = make_task("imdb:max_length=5").encoder(["bbaa", "abc", "zzzzb"], least=2)
        # a, b: 3 and 4 times; z four times, cut to four letters: its b is not seen
        assert found == {"characters": "zab"}
        assert list(encode("abz")) == [3, 4, 2, 1]  # ids 4, 5, 3 and the end's 2, less one
        assert list(encode("cc")) == [0, 0, 1]  # unknown
        assert list(encode("aaaaaaa")) == [3, 3, 3, 3, 1]  # the end is kept
        assert list(encode("")) == [1]
        many = "".join(chr(1000 + i) for i in range(400)) + chr(1399) * 2
        encode, found = make_task("imdb").encoder([many])
        assert len(found["characters"]) == 253 and max(encode(many)) == 254

    def test_reviews_are_read_with_their_classes(self, data, tmp_path, monkeypatch):
        monkeypatch.setattr(texts, "LEAST", 1)
        task, place = make_task("imdb:max_length=100"), place_of(data, tmp_path)
        found = {}
        for split in SPLITS:
            examples = task.load(split, place)
            batch = examples.batch(np.arange(len(examples)))
            found[split] = [task.shown(row, examples.origin) for row in batch.inputs]
            kinds = [text.split()[1] for text in found[split]]
            assert (np.array(kinds) == "pos").tolist() == batch.labels.astype(bool).tolist()
        assert [len(rows) for rows in found.values()] == [36, 4, 40]
        assert not set(found["validation"]) & set(found["train"])
        assert any("tenth" in note for note in task.notes)
        assert any("test split" in note for note in make_task("imdb:protocol=lra").notes)

    def test_a_text_twice_is_never_in_training_and_validation(self, tmp_path):
        again = {("train", kind, n): f"text {n % 4}" for kind in ("pos", "neg") for n in range(20)}
        files.write_reviews(tmp_path, again)
        place = place_of(tmp_path, tmp_path)
        found = [rows_of("imdb:level=bytes", place, split) for split in SPLITS[:2]]
        train, held = ({row.tobytes() for row in batch.inputs} for batch in found)
        assert len(train) == 3 and len(held) == 1 and not train & held

    def test_bytes_are_cut_padded_and_an_empty_text_is_one_position(self, tmp_path):
        others = {("test", "neg", n): text for n, text in enumerate(("aé" * 20, "b", ""))}
        files.write_reviews(tmp_path, others)
        task, place = make_task("imdb:level=bytes,max_length=8"), place_of(tmp_path, tmp_path)
        batch = task.load("test", place).batch(np.arange(3))
        whole = [byte + 1 for byte in ("aé" * 20).encode()[:8]]
        assert batch.inputs.tolist() == [whole, [ord("b") + 1] + [0] * 7, [0] * 8]
        assert batch.lengths.tolist() == [8, 1, 1]

    def test_retrieval_has_two_documents_a_row(self, data, tmp_path):
        place = place_of(data, tmp_path)
        task = make_task("aan:level=bytes,max_length=9")
        examples = task.load("test", place)
        batch = examples.batch(np.array([1, 0]))
        assert batch.lengths.tolist() == [[1, 3], [9, 9]] and batch.labels.tolist() == [0, 1]
        shown = [[task.shown(tower, examples.origin) for tower in row] for row in batch.inputs]
        assert shown == [["", "b\tc"], ['of "trees', "a longer "]]
        ended = rows_of("aan", place, "train")
        ends = np.take_along_axis(ended.inputs, ended.lengths[:, :, None] - 1, axis=2)
        assert (ends == 2).all() and ended.lengths.tolist() == [[11, 14], [1, 4]]


class TestListOps:
    def test_more_training_rows_change_no_other_split(self, tmp_path):
        found = []
        for count in (100, 300):
            text = f"listops:{SMALL},train={count},validation=40,test=40"
            found.append([rows_of(text, Place(cache=tmp_path), split) for split in SPLITS])
        for few, more in zip(*found, strict=True):
            for some, others in zip(few, more, strict=True):
                assert np.array_equal(some, others[: len(some)])
        rows = {row.tobytes() for batch in found[1] for row in batch.inputs}
        assert len(rows) == 380

    def test_lra_files_read_as_generated_rows_do(self, data, tmp_path):
        task = make_task("listops:source=official")
        batch = task.load("validation", place_of(data, tmp_path)).batch(np.arange(1))
        assert task.shown(batch.inputs[0], {}) == "[MAX 4 [SM 9 3 X X <eos>"

    def test_what_cannot_be_generated_is_one_line(self, tmp_path, monkeypatch):
        message = r"^task listops: 500 different rows were asked for, and there seem to be [34]\d\d"
        with pytest.raises(UserError, match=message):
            rows_of(f"listops:{SMALL},train=300,validation=100,test=100", Place(cache=tmp_path))
        monkeypatch.setattr(listops, "_TRIES", 50)
        with pytest.raises(UserError, match=r"of 50 trees none had more than 90,000 and"):
            listops.make_block(make_task("listops:min_length=90000,max_length=100000"), 0)


def test_atomic_numbers_are_normal_beside_their_positions():
    numbers = make_task("cumsum:seq_len=64").load("train").batch(np.arange(300)).inputs
    values, angles = numbers[:, :, 0], 2 * np.pi * np.arange(64) / 64
    assert np.abs(values).max(axis=1) == pytest.approx(1)
    scaled = (values / values.std(axis=1, keepdims=True)).ravel()
    assert np.mean(scaled**4) == pytest.approx(3, abs=0.3)  # a normal's; a uniform's is 1.8
    assert np.allclose(numbers[:, :, 1], np.cos(angles), atol=1e-6)
    assert np.allclose(numbers[:, :, 2], np.sin(angles), atol=1e-6)


IMAGES, LABELS = (f"mnist/train-{x}-ubyte.gz" for x in ("images-idx3", "labels-idx1"))
BATCH, REVIEW = "cifar-10-batches-bin/data_batch_3.bin", "aclImdb/train/pos/3_7.txt"
PNG = "pathfinder32/curv_contour_length_14/imgs/0/sample_7.png"
LIST = "pathfinder32/curv_contour_length_14/metadata/0.npy"
TABLE, TREES = "tsv_data/new_aan_pairs.train.tsv", "listops-1000/basic_train.tsv"
PICTURES, SHORT = idx(MNIST["train"][0]), cifar(2, 3).tobytes()


def image(size: tuple[int, int], kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    Image.new("L", size).save(stream, kind)
    return stream.getvalue()


def trees(*rows: str) -> bytes:
    return "\n".join(["Source\tTarget", *rows, ""]).encode()


# A task, a file of its data, what that holds instead (None: it is gone), and words of the error.
DAMAGE = [
    ("smnist", IMAGES, None, "no such file or folder"),
    ("smnist", IMAGES, gzip.compress(PICTURES)[:-9], "is truncated or no gzip file"),
    ("smnist", IMAGES, b"<html>", "is truncated or no gzip file"),
    ("smnist", IMAGES, gzip.compress(PICTURES[:-5]), "truncated or another file: 31,371 bytes"),
    ("smnist", IMAGES, gzip.compress(PICTURES[:9]), "is truncated or another file: 9 bytes"),
    ("smnist", IMAGES, gzip.compress(idx(MNIST["train"][1])), "48 bytes that begin with"),
    ("smnist", LABELS, gzip.compress(idx(np.full(40, 17))), "has 40 labels up to 17"),
    ("cifar10", BATCH, None, "no such file"),
    ("cifar10", BATCH, b"", "is truncated or another file: 0 bytes"),
    ("cifar10", BATCH, SHORT[:-1], "6,145 bytes, must be images of 3,073 bytes"),
    ("cifar10", BATCH, bytes([10] * 3073), "has the label 10, must be from 0 to 9"),
    ("pathfinder", PNG, None, "sample_7.png: is missing, truncated or no PNG image"),
    ("pathfinder", PNG, image((32, 32))[:45], "is missing, truncated or no PNG image"),
    # Pillow would start Ghostscript.
    ("pathfinder", PNG, image((32, 32), "EPS"), "is missing, truncated or no PNG image"),
    ("pathfinder", PNG, image((8, 9)), "sample_7.png: is 9×8, must be 32×32"),
    ("pathfinder", LIST, b"imgs/0 sample_0.png 0\n", "is no folder, file, number and class"),
    ("pathfinder", LIST, b"", "has no list (NUMBER.npy) of an image that has bytes"),
    ("pathfinder", LIST, b"\0 sample_0.png 0 1\n", "is missing, truncated or no PNG image"),
    ("imdb", REVIEW, b"caf\xe9", "3_7.txt: is not UTF-8 text (byte 3)"),
    ("aan", TABLE, None, "new_aan_pairs.train.tsv: no such file or folder"),
    ("aan", TABLE, b"", "new_aan_pairs.train.tsv: is empty"),
    ("aan", TABLE, b"1\tP1\tP2\tcut\n", "row 1: has 4 columns and the label '1', must"),
    ("aan", TABLE, b"yes\tP1\tP2\ta\tb\n", "has 5 columns and the label 'yes', must have label"),
    ("aan", TABLE, b"1\tP1\tP2\ta\tb", "is truncated: its last row has no end"),
    ("listops:source=official", TREES, None, "basic_train.tsv: no such file"),
    ("listops:source=official", TREES, trees(), "basic_train.tsv: has 0 rows below"),
    ("listops:source=official", TREES, trees("[MAX 4 ]\t12"), "line 2: is truncated or another"),
    ("listops:source=official", TREES, trees("[MUX 4 ]\t4"), "line 2: has the token '[MUX'"),
    ("listops:source=official", TREES, trees("[MAX 4 [MIN 2 ]\t4"), "line 2: is no whole tree"),
    (
        "listops:source=official",
        TREES,
        trees("1 " * 2000 + "\t4"),
        "has 2,000 tokens, must",
    ),
]


DAMAGE_IDS = [f"{task}: {words}" for task, _, _, words in DAMAGE]


@pytest.mark.parametrize(("task", "name", "content", "words"), DAMAGE, ids=DAMAGE_IDS)
def test_wrong_files_are_one_line(task, name, content, words, data, tmp_path):
    (data / name).unlink()
    if content is not None:
        (data / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        make_task(task).load("train", place_of(data, tmp_path))
    assert words in str(error.value) and "\n" not in str(error.value)
    assert "is had at https://" in str(error.value) or task == "imdb"


def test_images_too_few_for_a_split_are_refused(data, tmp_path):
    (data / LIST).write_text("imgs/0 sample_0.png 0 1\n")
    with pytest.raises(UserError, match=r"data has too few images: none is for (validation|test)"):
        make_task("pathfinder").load("train", place_of(data, tmp_path))


def test_missing_folders_and_other_endings_are_one_line_or_right(data, tmp_path, monkeypatch):
    for path in (data / "aclImdb/test/pos").iterdir():
        path.unlink()
    with pytest.raises(UserError, match=r"test/pos: has no review \(ID_STARS.txt\); .*stanford"):
        rows_of("imdb", place_of(data, tmp_path))
    with pytest.raises(UserError, match=r"^--data .*/nothing: no such folder$"):
        rows_of("cifar10", place_of(tmp_path / "nothing", tmp_path))
    for task, words in (
        ("pathfinder", "pathfinder32.*long"),
        ("listops:source=official", "listop"),
    ):
        with pytest.raises(UserError, match=rf"give --data DIR, where DIR/{words}"):
            rows_of(task, place_of(None, tmp_path))
    # A table with all of its rows may end without a new line.
    monkeypatch.setattr(Retrieval, "official", dict.fromkeys(SPLITS, len(PAIRS)))
    path = data / TABLE
    path.write_bytes(path.read_bytes().rstrip())
    assert len(rows_of("aan", place_of(data, tmp_path), "train").labels) == 2


class TestHub:
    def test_it_gives_the_same_images_at_a_pinned_revision(self, data, tmp_path, monkeypatch):
        asked = []

        def load_dataset(name, split, revision):
            asked.append((name, len(revision)))
            images, labels = MNIST["train" if split == "train" else "t10k"]
            streams = [io.BytesIO() for _ in images]
            for picture, stream in zip(images, streams, strict=True):
                Image.fromarray(picture).save(stream, "png")
            columns = [{"bytes": stream.getvalue(), "path": None} for stream in streams]
            rows = datasets.Dataset.from_dict({"image": columns, "label": labels.tolist()})
            return rows.cast_column("image", datasets.Image())

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        for split in SPLITS:
            here, there = (rows_of("smnist", place_of(x, tmp_path), split) for x in (data, None))
            assert all(np.array_equal(a, b) for a, b in zip(here, there, strict=True))
        assert asked == [("ylecun/mnist", 40)] * 2

    def test_it_gives_retrieval_the_same_files(self, data, tmp_path, monkeypatch):
        def download(name, path, revision, repo_type):
            assert (name, len(revision), repo_type) == ("OpenNLPLab/lra", 40, "dataset")
            return str(data / "tsv_data" / Path(path).name)

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        examples = make_task("aan").load("train", place_of(None, tmp_path))
        assert len(examples) == 2 and examples.origin["hub"] == "OpenNLPLab/lra"

    def test_it_cannot_be_reached_in_one_line(self, tmp_path, monkeypatch):
        broken = mock.Mock(side_effect=ConnectionError("no route to host\nand more"))
        monkeypatch.setattr(datasets, "load_dataset", broken)
        with pytest.raises(UserError) as error:
            rows_of("imdb", place_of(None, tmp_path))
        line = str(error.value)
        assert "cannot be had from the Hub (no route to host)" in line and "\n" not in line
        assert "aclImdb/train/neg" in line and "--data DIR" in line


def test_damage_in_the_cache_is_one_line(tmp_path):
    task, place = make_task(LISTOPS), Place(cache=tmp_path)
    assert isinstance(task.load("train", place).labels, np.memmap)
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    record, ids = folder / "record.json", folder / "test.ids.npy"
    kept = {path: path.read_bytes() for path in (record, ids)}
    for path, content, message in (
        (ids, kept[ids][:-1] + b"\7", "test.ids.npy: is not the one that was written"),
        (record, kept[record].replace(b'"seed": 0', b'"seed": 1'), "was changed after"),
        (record, b"{", "record.json: is not JSON"),
        (record, b'{"key": {}, "origin": {}, "sha256": {}}', "has no format, must be 1"),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError) as error:
            task.load("train", place)
        assert message in str(error.value) and "\n" not in str(error.value)
        path.write_bytes(kept[path])
    ids.unlink()
    with pytest.raises(UserError, match=f"delete {folder}, and the same command makes it again"):
        task.load("train", place)


def test_prepare_counts_and_show_writes_rows_for_people(data, tmp_path, capsys):
    run("prepare", LISTOPS, "--cache", tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("train: 12 rows (official: 96,000); length ")
    assert [line.split(":")[0] for line in lines[:3]] == list(SPLITS)
    shares = [float(share) for share in lines[0].rpartition("classes ")[2].split()]
    assert len(shares) == 10 and sum(shares) == pytest.approx(1, abs=0.01)
    assert "generator: listops" in lines
    run("show", LISTOPS, "--cache", tmp_path, "--rows", 2, "--split", "test")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and lines[0].startswith("row 0: label ") and lines[1].endswith(" <eos>")
    run("show", "select:noise=2,marked=1", "--rows", 1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "row 0: length 4, the last 1 positions are scored" and len(lines) == 6
    run("show", "pathfinder", "--cache", tmp_path, "--data", data, "--rows", 1)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 33 and {len(line) for line in lines[1:]} == {32}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"show {LISTOPS} --rows 0", "must be from 1 to 1,000"),
        (f"show {LISTOPS} --split dev", "invalid choice: 'dev'"),
        ("prepare cummin", "task='cummin': must be one of listops, imdb, aan, cifar10"),
        (f"prepare {LISTOPS} --workers 0", "must be from 1 to"),
        (f"prepare {LISTOPS} --data .", "--data: has no effect on listops, made by a"),
        ("show select:noise=0", "noise=0: must be at least 1"),
        ("show cumsum:seq_len=1", "seq_len=1: must be at least 2"),
        ("show cummax:seed=-2", "seed=-2: must be at least 0"),
        ("show imdb:level=words", "level='words': choose one of characters, bytes"),
        ("show aan:max_length=0", "max_length=0: must be at least 1"),
        ("show pathfinder:contour=7", "contour=7: choose one of 14, 9, 6"),
        ("show pmnist:order=rows", "order=rows: must be bit-reversal or the seed of an order"),
        ("show listops:lenght=3", "unknown option 'lenght'"),
        ("show listops:source=official,min_length=9", "min_length: of the generator, without"),
        ("show listops:min_length=50,max_length=51", "must leave a length between them"),
        ("show listops:max_depth=3", "no tree of max_depth=3 and max_args=10 has more than 122"),
        ("show listops:max_args=1", "must be from 1 to 30, and from 2 to 1,000"),
    ],
)
def test_wrong_words_are_one_line(words, message):
    with pytest.raises(UserError) as error:
        run(*words.split())
    assert message in str(error.value) and "\n" not in str(error.value)
