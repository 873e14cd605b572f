"""What is too small for a normal fp32 is 0 in the programs that compute, and stays elsewhere."""

import dataclasses
import multiprocessing
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from cat_lm.ops.runtime.cpu import flush_denormals
from eval.common.precision import evaluation_device
from eval.lab import cell as cells
from eval.recall.cell import Cell
from tests.conftest import REPOSITORY
from tests.runs import run_values, write_config

SMALL = 1e-39  # below 2^-126


def halved() -> float:
    return (torch.full((1,), SMALL) * 0.5).item()


def flushed() -> tuple[float, float]:
    """Half of SMALL, in this thread and in those of a parallel loop that it starts."""
    torch.set_num_threads(2)
    flush_denormals()
    return halved(), (torch.full((1 << 20,), SMALL) * 0.5).abs().max().item()


def in_a_process(call, **options):
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, **options) as pool:
        return pool.submit(call).result()


def test_they_are_kept_by_the_library_and_flushed_in_all_threads_of_a_program():
    assert in_a_process(halved) > 0, "the control: without it they are numbers"
    assert in_a_process(flushed) == (0.0, 0.0)


def run_a_cell(folder, together):
    sizes = {"d_model": 8, "seq_len": 8, "train_examples": 8, "validation_examples": 8}
    cell = Cell("mqar:vocab_size=64", "none", test_examples=8, batch_size=8, epochs=1, **sizes)
    if together:
        cells.run_together(folder, [cell, dataclasses.replace(cell, seed=cell.seed + 1)], "cpu")
    else:
        cells.run(folder, cell, "cpu", quiet=True)


@pytest.mark.parametrize("together", [False, True])
def test_cells_flush_them(tmp_path, together):
    assert in_a_process(halved, initializer=run_a_cell, initargs=(tmp_path, together)) == 0


def test_evaluations_flush_them():
    assert in_a_process(halved, initializer=evaluation_device, initargs=("cpu",)) == 0


def test_train_py_flushes_them_before_it_trains(tiny_corpus, tmp_path):
    """Seen where its ranks start, whose place this takes."""
    config = write_config(tmp_path, run_values(tiny_corpus, tmp_path / "run", max_steps=20))
    code = f"""
import sys, torch
import train
from cat_lm.training import distributed

def start(timeout):
    print("half:", (torch.full((1,), {SMALL}) * 0.5).item())
    sys.exit(0)

distributed.start = start
sys.argv = ["train.py", {str(config)!r}]
train.main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=300
    )
    assert "half: 0.0\n" in done.stdout, done.stderr
