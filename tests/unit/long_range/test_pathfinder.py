"""Pathfinder: a flood over the dashes joins the marked points exactly where the label says."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from PIL import Image

from cat_lm.errors import UserError
from eval.long_range.tasks import Place, make_task
from eval.long_range.tasks.curves import CLEARANCE, draw, render
from eval.long_range.tasks.pathfinder import image_rng


def drawings(options: str, count: int) -> list:
    task = make_task(f"pathfinder:{options}")
    return [draw(task.style, image_rng(task, number)) for number in range(count)]


def joined(drawing, size: int, finer: int) -> bool:
    """Flood from one marked point over dashes that are wider by half the gap on all sides."""
    radius = drawing.margin + CLEARANCE / 4
    ticks = (np.arange(size * finer) + 0.5) / finer
    wet = np.zeros((size * finer, size * finer), dtype=bool)
    for y0, x0, y1, x1 in drawing.dashes:
        points = np.linspace((y0, x0), (y1, x1), 20)
        for y, x in points:
            rows = np.flatnonzero(abs(ticks - y) <= radius)
            columns = np.flatnonzero(abs(ticks - x) <= radius)
            inside = np.hypot(ticks[rows, None] - y, ticks[None, columns] - x) <= radius
            wet[np.ix_(rows, columns)] |= inside
    first, last = ([int(value * finer) for value in mark] for mark in drawing.marks)
    assert wet[*first] and wet[*last]
    reached, before = np.zeros_like(wet), 0
    reached[*first] = True
    while (now := int(reached.sum())) > before:
        before = now
        for _ in range(4 * finer):
            reached[1:] |= reached[:-1]
            reached[:-1] |= reached[1:]
            reached[:, 1:] |= reached[:, :-1]
            reached[:, :-1] |= reached[:, 1:]
            reached &= wet
    return bool(reached[*last])


def test_a_flood_from_mark_to_mark_agrees_with_the_label():
    found = drawings("contour=14", 12)
    assert {drawing.label for drawing in found} == {0, 1}
    for drawing in found:
        assert joined(drawing, 32, 8) == bool(drawing.label)


@pytest.mark.parametrize("contour", [6, 9])
def test_a_flood_agrees_in_large_images_too(contour):
    for drawing in drawings(f"size=128,contour={contour}", 1):
        assert joined(drawing, 128, 6) == bool(drawing.label)


def test_a_flood_would_see_a_dash_that_is_missing():
    drawing = next(d for d in drawings("contour=14", 16) if d.label == 1)
    for first in (0, 1):  # the targets' dashes alternate
        lost = [i for i in range(first, drawing.targets, 2)][7]
        dashes = [dash for i, dash in enumerate(drawing.dashes) if i != lost]
        if not joined(drawing._replace(dashes=dashes), 32, 8):
            break
    else:
        pytest.fail("both targets were cut, and the marks still joined")


def test_labels_are_balanced_and_targets_as_long_as_asked():
    found = drawings("contour=6", 150)
    share = np.mean([drawing.label for drawing in found])
    assert abs(share - 0.5) < 4 * 0.5 / np.sqrt(150)
    assert {drawing.targets for drawing in found} == {12}
    assert np.mean([len(drawing.dashes) for drawing in found]) > 12 + 2 * 9  # 10 distractors of 2


def test_marks_are_bright_and_all_is_inside():
    task = make_task("pathfinder")
    for drawing in drawings("contour=14", 4):
        image = render(drawing, task.style)
        assert image.shape == (32, 32) and image.dtype == np.uint8 and image.max() == 255
        for y, x in drawing.marks:
            assert image[int(y), int(x)] >= 100
        ends = np.array(drawing.dashes)
        assert ends.min() >= 1 and ends.max() <= 31
        assert 5 < image.mean() < 40


def test_a_dash_is_painted_where_it_is():
    task = make_task("pathfinder")
    drawing = drawings("contour=14", 1)[0]
    far = drawing._replace(dashes=[type(drawing.dashes[0])(5.5, 20.0, 5.5, 22.0)], targets=1)
    far = far._replace(marks=((25.0, 5.0), (25.0, 9.0)))
    image = render(far, task.style)
    assert image[5, 20] == image[5, 21] > 0
    assert image[:20].sum() == image[5, 19:23].sum()
    assert image[25, 5] > 0 and image[20:, 15:].sum() == 0


def test_an_image_depends_on_its_number_and_the_options_alone(tmp_path):
    task = make_task("pathfinder:contour=6,train=5,validation=2,test=3")
    place = Place(cache=tmp_path)
    rows = [task.load(split, place).batch(np.arange(n)) for split, n in (("test", 3), ("train", 5))]
    numbers = [0, 1, 2, 5, 6, 7, 8, 9]  # test, validation (3 and 4), train
    inputs = np.concatenate([batch.inputs for batch in rows])
    labels = np.concatenate([batch.labels for batch in rows])
    assert inputs.shape == (8, 1024, 1)
    for place_in, number in enumerate(numbers):
        drawing = draw(task.style, image_rng(task, number))
        pixels = render(drawing, task.style).ravel()
        assert np.allclose(inputs[place_in, :, 0], pixels / 127.5 - 1, atol=1e-6)
        assert labels[place_in] == drawing.label


def test_drawings_are_those_of_their_version():
    """A generator that draws others needs another `version`, and another hash here."""
    found = drawings("contour=6", 5)
    told = [(d.label, [round(n, 6) for mark in d.marks for n in mark]) for d in found]
    assert make_task("pathfinder").version == 1
    assert hashlib.sha256(repr(told).encode()).hexdigest()[:16] == "da54cbe2db4badd7"


def test_ids_are_the_pixels(tmp_path):
    options = "contour=6,train=2,validation=1,test=1"
    place = Place(cache=tmp_path)
    real = make_task(f"pathfinder:{options}").load("train", place).batch(np.arange(2))
    task = make_task(f"pathfinder:{options},pixels=ids")
    ids = task.load("train", place).batch(np.arange(2))
    assert ids.inputs.dtype == np.int64 and (task.vocabulary, task.channels) == (256, 0)
    assert np.allclose(ids.inputs / 127.5 - 1, real.inputs[:, :, 0], atol=1e-6)
    assert len([p for p in tmp_path.iterdir() if p.is_dir()]) == 1  # one cache for both


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
    task = make_task("pathfinder:source=official")
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


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda base: (base / "imgs/0/sample_7.png").unlink(), "sample_7.png: no such file"),
        (
            lambda base: cut(base / "imgs/0/sample_7.png"),
            "sample_7.png: is truncated or no PNG image",
        ),
        (
            # Pillow would start Ghostscript.
            lambda base: Image.new("L", (32, 32)).save(base / "imgs/0/sample_7.png", "EPS"),
            "sample_7.png: is truncated or no PNG image",
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
            "curv_contour_length_14: its lists name no image that has bytes",
        ),
        (
            lambda base: [path.write_bytes(b"") for path in (base / "imgs/0").iterdir()],
            "curv_contour_length_14: its lists name no image that has bytes",
        ),
        (lambda base: (base / "metadata/0.npy").unlink(), "metadata: has no list (NUMBER.npy)"),
    ],
)
def test_wrong_files_are_one_line(tmp_path, damage, message):
    damage(write_folder(tmp_path / "data"))
    with pytest.raises(UserError) as error:
        make_task("pathfinder:source=official").load(
            "train", Place(tmp_path / "data", tmp_path / "cache")
        )
    assert message in str(error.value) and "\n" not in str(error.value)
    assert "long-range-arena" in str(error.value)


def cut(path):
    path.write_bytes(path.read_bytes()[:200])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("size=64", "size=64: must be 32 or 128"),
        ("contour=7", "contour=7: must be 14, 9 or 6"),
        ("pixels=byte", "pixels=byte: choose real or ids"),
        ("source=official,seed=3", "seed: of the generator, without effect on files"),
    ],
)
def test_wrong_options_are_one_line(options, message):
    with pytest.raises(UserError) as error:
        make_task(f"pathfinder:{options}")
    assert message in str(error.value)
