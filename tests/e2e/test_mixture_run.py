"""A training run on a mixture, resumed in the middle of its epochs (R32, R33)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cat_lm.data.web_server import served
from tests.commands import python
from tests.prepared_data import EOD, random_documents, write_prepared
from tests.runs import losses, run_values, write_config

VOCAB = 97


def small_ids(documents: list[list[int]], shift: int) -> list[list[int]]:
    return [[1 + (t * shift) % (VOCAB - 1) for t in text[:-1]] + [EOD] for text in documents]


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, float]:
    """Three small corpora, so that 96 windows take the first of them through several epochs."""
    for i, (count, dtype) in enumerate([(20, "uint16"), (60, "int32"), (90, "uint16")]):
        texts = small_ids(random_documents(count, 50, seed=i), 3 + i)
        held_out = small_ids(random_documents(9, 50, seed=10 + i), 3 + i)
        write_prepared(tmp_path / f"c{i}", texts, held_out, dtype, 400, vocab_size=VOCAB)
    return {str(tmp_path / f"c{i}"): weight for i, weight in enumerate((0.6, 0.3, 0.1))}


def test_a_run_resumes_exactly_in_the_middle_of_a_mixture_epoch(tmp_path, folders):
    def values(name: str, data: dict[str, float], **train) -> dict:
        values = run_values(tmp_path / "unused", tmp_path / name, **train)
        values["data"] = {"mixture": data, "context_length": 32, "packing": "best_fit"}
        values["data"]["mask_documents"] = True
        values["optimizer"]["schedule"] = "constant"  # or it would end sooner in shorter runs
        return values

    def train(values: dict) -> str:
        done = python("train.py", write_config(tmp_path, values))
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    output = train(values("straight", folders))
    for i, share in enumerate(("60.00%", "30.00%", "10.00%")):
        assert re.search(rf"c{i}: {share} of the windows, \d+ in the run", output), output
    with served(tmp_path) as (_, url):
        # The resumed run reads one of them at an address: the same data in another place.
        name = next(iter(folders))
        moved = {url.replace("/data", "/x/c0") if f == name else f: w for f, w in folders.items()}
        for max_steps, data in ((5, folders), (8, moved), (12, folders)):
            run = values("resumed", data, max_steps=max_steps, resume="auto")
            run["data"]["cache_dir"] = str(tmp_path / "cache")
            run["checkpoint"] = {"every_steps": 100}
            output = train(run)
    straight, resumed = (
        [record for record in losses(tmp_path / name) if len(record) == 3]  # without validations
        for name in ("straight", "resumed")
    )
    assert resumed == straight and len(straight) == 12
    assert re.search(r"c0: 60.00% of the windows, \d+ in the run", output), output
