"""Options of eval.speed that cannot be: one line, and nothing is timed."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("conv --shape 4,1024,8", "'4,1024,8' must be four numbers"),
        ("conv --shape 1,8,2,1 --conv-type qkv", "no two channels to rotate"),
        ("conv --kernels cpu,cudnn", "'cudnn' is not one of"),
        ("conv --conv-type heads", "'heads' is not one of"),
        ("conv --threads 4096", "--threads 4096: there are "),
        ("conv --shape 65536,65536,64,64", "--shape 65536,65536,64,64: takes 65,536.0 GiB"),
        ("train --models gpt2", "'gpt2' is not one of"),
        ("train --models all,cat", "'all' is not one of"),
        ("train --heads 7", "--hidden-size 32: must be a multiple of --heads 7"),
        ("train --hidden-size 131072 --layers 8", "a model of --hidden-size 131072, --layers 8:"),
        ("train --models mixer-gla --hidden-size 36 --heads 12", "heads=12 do not divide 18 keys"),
        ("decode --new-tokens 1", "--new-tokens: '1' must be from 2"),
        ("decode --models stock", "'stock' is not one of"),
        ("sing", "invalid choice: 'sing'"),
    ],
)
def test_bad_option_is_one_line(speed, words, named):
    code, record, out, err = speed(*words.split())
    assert (code, record, out) == (2, None, "")
    last = err.splitlines()[-1]
    assert "error: " in last and named in last


def test_other_and_absent_devices_are_refused(speed):
    assert "error: --device meta: " in speed("train", device="meta")[3]
    if not torch.cuda.is_available():
        assert "--device cuda: cannot be used" in speed("conv", device="cuda")[3]
