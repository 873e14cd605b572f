"""What is too small for a normal fp32 is 0 in the programs that compute, and stays elsewhere."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from cat_lm.ops.runtime.cpu import flush_denormals
from eval.common.precision import evaluation_device
from eval.lab import cell as cells
from eval.recall.cell import Cell
from tests.commands import python
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


def test_denormals_are_kept_by_the_library_and_flushed_in_all_threads_of_a_program():
    assert in_a_process(halved) > 0, "the control: without it they are numbers"
    assert in_a_process(flushed) == (0.0, 0.0)


def run_a_cell(folder):
    sizes = {"d_model": 8, "seq_len": 8, "train_examples": 8, "validation_examples": 8}
    cell = Cell("mqar:vocab_size=64", "none", test_examples=8, batch_size=8, epochs=1, **sizes)
    cells.run(folder, cell, "cpu", quiet=True)


@pytest.mark.parametrize("program", [run_a_cell, evaluation_device])
def test_cells_and_evaluations_flush_denormals(program, tmp_path):
    given = (tmp_path,) if program is run_a_cell else ("cpu",)
    assert in_a_process(halved, initializer=program, initargs=given) == 0


def test_train_py_flushes_denormals_before_it_trains(tiny_corpus, tmp_path):
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
    done = python("-c", code)
    assert "half: 0.0\n" in done.stdout, done.stderr
