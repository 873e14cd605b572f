"""Real reviews, photographs and digits, laid out as their official files are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from eval.long_range.tasks import SPLITS, Place, make_task
from tests.eval.long_range.test_data import run

DIGITS = {  # of each class, as published
    "train": [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
    "test": [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
}


@pytest.fixture(scope="module")
def sample(shared_data, tmp_path_factory) -> tuple[Path, list[dict], np.ndarray]:
    """A folder in the official layouts; its reviews, of which every fifth is a test; its images,
    of which the last sixth is."""
    folder, there = tmp_path_factory.mktemp("real"), shared_data / "lra"
    if not there.is_dir():
        pytest.skip(f"needs real data in {there}")
    (folder / "mnist").symlink_to(there / "mnist")
    with open(there / "imdb" / "imdb_train_sample.jsonl", encoding="utf-8") as stream:
        reviews = [json.loads(line) for line in stream]
    for number, review in enumerate(reviews):
        split, kind = "train" if number % 5 else "test", ("neg", "pos")[review["label"]]
        (folder / "aclImdb" / split / kind).mkdir(parents=True, exist_ok=True)
        name = f"{review['id']}_{review['rating']}.txt"
        (folder / "aclImdb" / split / kind / name).write_bytes(review["text"].encode())
    images = np.fromfile(there / "cifar10" / "train.bin", dtype=np.uint8).reshape(-1, 3073)
    (folder / "cifar-10-batches-bin").mkdir()
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    for name, part in zip(names, np.split(images, 6), strict=True):
        part.tofile(folder / "cifar-10-batches-bin" / f"{name}.bin")
    return folder, reviews, images


@pytest.fixture(scope="module")
def place(sample, tmp_path_factory) -> Place:
    return Place(sample[0], tmp_path_factory.mktemp("cache"))


def rows_of(text: str, place: Place) -> dict:
    task = make_task(text)
    found = {split: task.load(split, place) for split in SPLITS}
    return {split: x.batch(np.arange(len(x))) for split, x in found.items()}


@pytest.mark.parametrize(
    ("task", "counts", "shares"),
    [
        ("imdb", (3_600, 400, 1_000), 2),
        ("imdb:level=bytes", (3_600, 400, 1_000), 2),
        ("cifar10", (2_250, 250, 500), 10),
        ("smnist:size=14", (54_000, 6_000, 10_000), 10),
    ],
)
def test_prepare_counts_real_samples(task, counts, shares, place, capsys):
    run("prepare", task, "--data", place.folder, "--cache", place.cache)
    said = capsys.readouterr().out.splitlines()[:3]
    for line, split, count in zip(said, SPLITS, counts, strict=True):
        assert line.startswith(f"{split}: {count:,} rows")
        classes = [float(share) for share in line.rpartition("classes ")[2].split()]
        assert len(classes) == shares and min(classes) > 0.5 / shares


def test_digits_are_those_that_were_published(place):
    found = rows_of("smnist:size=14", place)
    counts = {split: np.bincount(x.labels, minlength=10) for split, x in found.items()}
    assert (counts["train"] + counts["validation"]).tolist() == DIGITS["train"]
    assert counts["test"].tolist() == DIGITS["test"]
    # A one is the digit with the least ink.
    ink = [found["test"].inputs[found["test"].labels == digit].mean() for digit in range(10)]
    assert np.argmin(ink) == 1 and min(ink) > 0 and max(ink) < 0.3
