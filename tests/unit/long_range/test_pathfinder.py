"""Pathfinder: the official images, their splits, and what is said of wrong files."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from cat_lm.core.errors import UserError
from eval.long_range.tasks import Place, make_task

LIST = "imgs/0 sample_{}.png {} {} 1.0 14 4 2 0.5 1 1\n"


def write_folder(root, images: int = 20, size: int = 32):
    base = root / "pathfinder32" / "curv_contour_length_14"
    (base / "metadata").mkdir(parents=True)
    (base / "imgs" / "0").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number in range(images):
        pixels = rng.integers(0, 256, (size, size), dtype=np.uint8)
        Image.fromarray(pixels).save(base / f"imgs/0/sample_{number}.png")
    lines = [LIST.format(number, number, number % 2) for number in range(images)]
    (base / "metadata" / "0.npy").write_text("".join(lines))
    return base


def test_lra_images_are_read_and_split_by_their_content(tmp_path):
    base = write_folder(tmp_path / "data")
    (base / "imgs/0/sample_3.png").write_bytes(b"")  # as in the release
    task = make_task("pathfinder")
    place = Place(tmp_path / "data", tmp_path / "cache")
    splits = {split: task.load(split, place) for split in ("train", "validation", "test")}
    assert [len(examples) for examples in splits.values()] == [16, 2, 1]
    assert splits["train"].origin["empty_files"] == 1
    rows = [examples.batch(np.arange(len(examples))).inputs for examples in splits.values()]
    assert len({row.tobytes() for row in np.concatenate(rows)}) == 19
    known = splits["train"].origin["sha256"]
    Image.new("L", (32, 32)).save(base / "imgs/0/sample_4.png")
    other = task.load("train", Place(tmp_path / "data", tmp_path / "other"))
    assert other.origin["sha256"] != known and other.origin["images"] == 19


def test_ids_are_the_pixels(tmp_path):
    write_folder(tmp_path / "data")
    place = Place(tmp_path / "data", tmp_path / "cache")
    real = make_task("pathfinder").load("train", place).batch(np.arange(2))
    task = make_task("pathfinder:pixels=ids")
    ids = task.load("train", place).batch(np.arange(2))
    assert ids.inputs.dtype == np.int64 and (task.vocabulary, task.channels) == (256, 0)
    assert np.allclose(ids.inputs / 127.5 - 1, real.inputs[:, :, 0], atol=1e-6)
    assert len([p for p in place.cache.iterdir() if p.is_dir()]) == 1  # one cache for both


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
def test_wrong_files_are_one_line(tmp_path, damage, message):
    damage(write_folder(tmp_path / "data"))
    with pytest.raises(UserError) as error:
        make_task("pathfinder").load("train", Place(tmp_path / "data", tmp_path / "cache"))
    assert message in str(error.value) and "\n" not in str(error.value)
    assert "long-range-arena" in str(error.value)


def cut(path):
    path.write_bytes(path.read_bytes()[:200])


def test_without_files_it_says_where_they_are_had(tmp_path):
    with pytest.raises(UserError, match=r"give --data DIR, where DIR/pathfinder32.*long-range"):
        make_task("pathfinder").load("train", Place(cache=tmp_path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("size=64", "size=64: choose one of 32, 128"),
        ("contour=7", "contour=7: choose one of 14, 9, 6"),
        ("pixels=byte", "pixels='byte': choose one of real, ids"),
    ],
)
def test_wrong_options_are_one_line(options, message):
    with pytest.raises(UserError) as error:
        make_task(f"pathfinder:{options}")
    assert message in str(error.value)
