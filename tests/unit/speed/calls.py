"""What tests of eval.speed share: a tiny model's options, a case of convolution."""

from __future__ import annotations

TINY = ("--layers", 1, "--hidden-size", 32, "--heads", 2, "--vocab-size", 61, "--window", 3)


def conv_arguments(**changes: str) -> list[str]:
    options = {"shape": "2,40,3,8", "windows": "3", "dtype": "float32", "repeats": "2"} | changes
    return ["conv", *(f"--{name.replace('_', '-')}={value}" for name, value in options.items())]
