"""MNIST, CIFAR-10 and Pathfinder from official files and from the Hub, pixel for pixel."""

from __future__ import annotations

import gzip
import io

import numpy as np
import pytest
from PIL import Image

from cat_lm.core.errors import UserError
from eval.long_range.tasks import Place, make_task
from tests.eval.long_range.files import MNIST, cifar, idx, write_cifar, write_folder, write_mnist


def places(tmp_path):
    return Place(tmp_path / "data", tmp_path / "cache")


def all_rows(task, place, split):
    examples = task.load(split, place)
    return examples.batch(np.arange(len(examples)))


@pytest.mark.parametrize(("folder", "packed"), [("mnist", True), ("MNIST/raw", False), ("", True)])
def test_mnist_is_read_from_every_official_layout(tmp_path, folder, packed):
    write_mnist(tmp_path / "data" / folder, packed)
    task, place = make_task("smnist"), places(tmp_path)
    test = all_rows(task, place, "test")
    images, labels = MNIST["t10k"]
    assert test.inputs.dtype == np.float32 and test.inputs.shape == (7, 784, 1)
    assert np.allclose(test.inputs[:, :, 0] * 255, images.reshape(7, 784), atol=1e-4)
    assert (test.labels == labels).all() and (test.lengths == 784).all()


def test_14_pixels_a_side_are_means_of_four(tmp_path):
    write_mnist(tmp_path / "data")
    task = make_task("smnist:size=14")
    batch = all_rows(task, places(tmp_path), "test")
    assert batch.inputs.shape == (7, 196, 1) and task.length == 196
    image = MNIST["t10k"][0][3].astype(float)
    mean = (image[4, 6] + image[4, 7] + image[5, 6] + image[5, 7]) / 4 / 255
    assert batch.inputs[3, 2 * 14 + 3, 0] == pytest.approx(mean, abs=1e-6)


def test_permuted_mnist_has_one_order_for_all(tmp_path):
    write_mnist(tmp_path / "data")
    place = places(tmp_path)
    plain = all_rows(make_task("smnist"), place, "test").inputs
    orders = []
    for options in ("", ":order=92916", ":order=1"):
        task = make_task(f"pmnist{options}")
        order = task.positions()
        assert sorted(order) == list(range(784))
        assert (all_rows(task, place, "test").inputs == plain[:, order]).all()
        orders.append(tuple(order))
    assert len(set(orders)) == 3
    assert sorted(make_task("pmnist:size=14").positions()) == list(range(196))
    # The order of earlier papers, by numpy's old generator.
    assert orders[1] == tuple(np.random.RandomState(92916).permutation(784))


def test_bit_reversal_reads_bits_backwards():
    order = make_task("pmnist").positions().tolist()
    assert order[:4] == [0, 512, 256, 768]
    assert order == sorted(range(784), key=lambda number: f"{number:010b}"[::-1])


IMAGES, LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (IMAGES, None, "no such file or folder"),
        (LABELS, None, "no such file or folder"),
        (IMAGES, gzip.compress(idx(MNIST["train"][0]))[:-9], "is truncated or no gzip file"),
        (IMAGES, b"<html>", "is truncated or no gzip file"),
        (IMAGES, idx(MNIST["train"][0])[:-5], "is truncated or another file: 31,371 bytes"),
        (IMAGES, idx(MNIST["train"][0]) + b"x", "is truncated or another file: 31,377 bytes"),
        (IMAGES, idx(MNIST["train"][1]), "is truncated or another file: 48 bytes that begin with"),
        (IMAGES, b"", "is truncated or another file: 0 bytes"),
        (IMAGES, idx(MNIST["train"][0])[:9], "is truncated or another file: 9 bytes"),
        (IMAGES, idx(MNIST["train"][0][:, :, :14]), "with images of 40 x 28 x 14; must have"),
        (LABELS, idx(MNIST["train"][1][:-1]), "has 39 labels up to 9, with images of 40 x 28 x 28"),
        (LABELS, idx(np.full(40, 17)), "has 40 labels up to 17"),
    ],
)
def test_wrong_mnist_files_are_one_line(tmp_path, name, data, message):
    write_mnist(tmp_path / "data" / "mnist")
    path = tmp_path / "data" / "mnist" / name
    path.unlink()
    if data is not None:
        is_packed = "gzip" in message
        path.write_bytes(data if is_packed else gzip.compress(data))
    with pytest.raises(UserError) as error:
        make_task("smnist").load("train", places(tmp_path))
    line = str(error.value)
    assert message in line and "\n" not in line
    assert line.endswith("is had at https://ossci-datasets.s3.amazonaws.com/mnist")


def test_a_file_that_was_mended_is_read_again(tmp_path):
    write_mnist(tmp_path / "data")
    task, place = make_task("smnist"), places(tmp_path)
    before = all_rows(task, place, "test").inputs
    other = 255 - MNIST["t10k"][0]
    (tmp_path / "data" / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(other)))
    assert np.allclose(all_rows(task, place, "test").inputs, 1 - before, atol=1e-6)


def test_cifar_is_grey_as_pillow_makes_it(tmp_path):
    write_cifar(tmp_path / "data" / "cifar-10-batches-bin")
    place = places(tmp_path)
    real = all_rows(make_task("cifar10"), place, "test")
    ids = all_rows(make_task("cifar10:pixels=ids"), place, "test")
    records = cifar(3, 9)
    for row, record in enumerate(records):
        colours = record[1:].reshape(3, 32, 32).transpose(1, 2, 0)
        pixels = np.asarray(Image.fromarray(colours).convert("L")).ravel()
        assert (ids.inputs[row] == pixels).all()
        assert np.allclose(
            real.inputs[row, :, 0], (pixels / 255 - 122.6 / 255) / (61 / 255), atol=1e-5
        )
    assert (ids.labels == records[:, 0]).all()
    sizes = [len(make_task("cifar10").load(s, place)) for s in ("train", "validation", "test")]
    assert sizes == [18, 2, 3]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("data_batch_3.bin", None, "no such file"),
        ("data_batch_3.bin", b"", "is truncated or another file: 0 bytes"),
        (
            "data_batch_3.bin",
            cifar(2, 3).tobytes()[:-1],
            "is truncated or another file: 6,145 bytes, must be images of 3,073 bytes",
        ),
        ("test_batch.bin", bytes([10] * 3073), "has the label 10, must be from 0 to 9"),
    ],
)
def test_wrong_cifar_files_are_one_line(tmp_path, name, data, message):
    folder = tmp_path / "data" / "cifar-10-batches-bin"
    write_cifar(folder)
    (folder / name).unlink()
    if data is not None:
        (folder / name).write_bytes(data)
    with pytest.raises(UserError) as error:
        make_task("cifar10").load("train", places(tmp_path))
    assert str(error.value).startswith(f"{folder / name}: {message}")
    assert "\n" not in str(error.value) and "cs.toronto.edu" in str(error.value)


def test_a_folder_that_is_none_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"^--data .*/nothing: no such folder$"):
        make_task("cifar10").load("train", Place(tmp_path / "nothing", tmp_path / "cache"))


def test_the_hub_gives_the_same_rows_at_a_pinned_revision(tmp_path, monkeypatch):
    import datasets

    asked = []

    def load_dataset(name, split, revision):
        asked.append((name, split, revision))
        images, labels = MNIST["train" if split == "train" else "t10k"]
        columns = {"image": [png(image) for image in images], "label": labels.tolist()}
        return datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    write_mnist(tmp_path / "data")
    task = make_task("smnist")
    hub = Place(cache=tmp_path / "cache")
    for split in ("train", "validation", "test"):
        here, there = all_rows(task, places(tmp_path), split), all_rows(task, hub, split)
        order = [np.lexsort(batch.inputs[:, :3, 0].T) for batch in (here, there)]
        assert (here.inputs[order[0]] == there.inputs[order[1]]).all()
        assert (here.labels[order[0]] == there.labels[order[1]]).all()
    assert {name for name, _, _ in asked} == {"ylecun/mnist"} and len(asked) == 2
    assert all(len(revision) == 40 for _, _, revision in asked)


def png(image: np.ndarray) -> dict:
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, "png")
    return {"bytes": stream.getvalue(), "path": None}


def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path, monkeypatch):
    import datasets

    def load_dataset(*_, **__):
        raise ConnectionError("no route to host\nand more")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for name, local in (("cifar10", "data_batch_1.bin"), ("imdb", "aclImdb/train/neg")):
        with pytest.raises(UserError) as error:
            make_task(name).load("train", Place(cache=tmp_path))
        line = str(error.value)
        assert "cannot be had from the Hub (no route to host)" in line and "\n" not in line
        assert local in line and "--data DIR" in line


def test_lra_images_are_read_and_split_by_their_content(tmp_path):
    base = write_folder(tmp_path / "data")
    (base / "imgs/0/sample_3.png").write_bytes(b"")  # as in the release
    task = make_task("pathfinder")
    place = places(tmp_path)
    splits = {split: task.load(split, place) for split in ("train", "validation", "test")}
    assert [len(examples) for examples in splits.values()] == [16, 2, 1]
    assert splits["train"].origin["empty_files"] == 1
    rows = [examples.batch(np.arange(len(examples))).inputs for examples in splits.values()]
    assert len({row.tobytes() for row in np.concatenate(rows)}) == 19
    known = splits["train"].origin["sha256"]
    Image.new("L", (32, 32)).save(base / "imgs/0/sample_4.png")
    other = task.load("train", Place(tmp_path / "data", tmp_path / "other"))
    assert other.origin["sha256"] != known and other.origin["images"] == 19


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda base: (base / "imgs/0/sample_7.png").unlink(),
            "sample_7.png: is missing, truncated or no PNG image",
        ),
        (
            lambda base: cut(base / "imgs/0/sample_7.png"),
            "sample_7.png: is missing, truncated or no PNG image",
        ),
        (
            # Pillow would start Ghostscript.
            lambda base: Image.new("L", (32, 32)).save(base / "imgs/0/sample_7.png", "EPS"),
            "sample_7.png: is missing, truncated or no PNG image",
        ),
        (
            lambda base: Image.new("L", (8, 9)).save(base / "imgs/0/sample_7.png"),
            "sample_7.png: is 9×8, must be 32×32",
        ),
        (
            lambda base: (base / "metadata/0.npy").write_text("imgs/0 sample_0.png 0\n"),
            "0.npy, line 1: 'imgs/0 sample_0.png 0' is no folder, file, number and class",
        ),
        (
            lambda base: (base / "metadata/0.npy").write_text(""),
            "metadata: has no list (NUMBER.npy) of an image that has bytes",
        ),
        (
            lambda base: [path.write_bytes(b"") for path in (base / "imgs/0").iterdir()],
            "metadata: has no list (NUMBER.npy) of an image that has bytes",
        ),
        (
            lambda base: (base / "metadata/0.npy").unlink(),
            "metadata: has no list (NUMBER.npy) of an",
        ),
    ],
)
def test_wrong_pathfinder_files_are_one_line(tmp_path, damage, message):
    damage(write_folder(tmp_path / "data"))
    with pytest.raises(UserError) as error:
        make_task("pathfinder").load("train", places(tmp_path))
    assert message in str(error.value) and "\n" not in str(error.value)
    assert "long-range-arena" in str(error.value)


def cut(path):
    path.write_bytes(path.read_bytes()[:200])


def test_without_files_it_says_where_they_are_had(tmp_path):
    with pytest.raises(UserError, match=r"give --data DIR, where DIR/pathfinder32.*long-range"):
        make_task("pathfinder").load("train", Place(cache=tmp_path))
