"""Options of eval.speed that cannot be: one line, and nothing is timed."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("conv", "--windows", "3,0"), "--windows: '0' must be from 1 to 65,536"),
        (("conv", "--shape", "4,1024,8"), "'4,1024,8' must be four numbers"),
        (("conv", "--shape", "1,8,2,1", "--conv-type", "qkv"), "no two channels to rotate"),
        (("conv", "--dtype", "float16"), "'float16' is not one of float32, bfloat16"),
        (("conv", "--kernels", "cpu,cudnn"), "'cudnn' is not one of"),
        (("conv", "--conv-type", "heads"), "'heads' is not one of"),
        (("train", "--models", "gpt2"), "'gpt2' is not one of"),
        (("train", "--heads", "7"), "--hidden-size 512: must be a multiple of --heads 7"),
        (("conv", "--threads", "4096"), "--threads 4096: there are "),
        (("train", "--peak-tflops", "-1"), "--peak-tflops: '-1' must be from 1e-06"),
        (("decode", "--new-tokens", "1"), "--new-tokens: '1' must be from 2"),
        (("conv", "--shape", "65536,65536,64,64"), "--shape 65536,65536,64,64: takes 65,536.0 GiB"),
        (
            ("train", "--hidden-size", "131072"),
            "a model of --hidden-size 131072, --layers 8: takes",
        ),
        (("decode", "--models", "stock"), "'stock' is not one of"),
        (("decode", "--block", "8"), "--block: says nothing without --contexts"),
        (("decode", "--contexts", "8", "--uncached-tokens", "2"), "--uncached-tokens: says"),
        (("decode", "--contexts", "8", "--models", "mamba"), "has no landmark attention"),
        (("decode", "--contexts", str(2**24), "--models", "cat"), "a cache of --contexts"),
        (("train", "--models", "all,cat"), "'all' is not one of"),
        (
            ("train", "--models", "mixer-gla", "--hidden-size", "36", "--heads", "12"),
            "model mixer-gla: mixer_options: mixer gla:heads=12: heads=12 do not divide 18 keys",
        ),
        (("sing",), "invalid choice: 'sing'"),
    ],
)
def test_bad_options(speed, arguments, named):
    code, record, out, err = speed(*arguments)
    assert (code, record, out) == (2, None, "")
    last = err.splitlines()[-1]
    assert "error: " in last and named in last


def test_other_devices(command):
    code, _, _, err = command("train", "--device", "meta")
    assert code == 2 and "error: --device meta: " in err


def test_absent_device(command):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    code, _, _, err = command("conv", "--device", "cuda")
    assert code == 2 and "--device cuda: cannot be used" in err
