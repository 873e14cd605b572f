"""Choose the arithmetic that a model is evaluated in.

`auto` is fp32 on a CPU. On a GPU it is what the models were trained in, where their exports say so:
a bf16 run computes its losses with bf16 weights, so that fp32 is no nearer to what was trained, and
takes several times as long. Whatever the dtype, softmax and sums over tokens are in fp32 or fp64.
Mean losses of one model in bf16 and in fp32 differ by less than `BF16_BOUND`, which the tests hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cat_lm.pretrained import loading
from cat_lm.pretrained.record import read_record

if TYPE_CHECKING:
    import torch

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
BF16_BOUND = 0.01  # nats per token
HELP = "auto: float32; on a GPU bfloat16 for exports of bf16 runs"


def evaluation_device(name: str) -> torch.device:
    """Choose the device of a command that evaluates, and make this process ready for it.

    Products of matrices sum in fp32 from here on; a CPU's tensors keep their memory, and what is
    too small for a normal fp32 is 0. Raises UserError if the device `name` is absent.
    """
    from cat_lm.ops.runtime.cpu import make_process_ready
    from cat_lm.ops.runtime.precision import sum_products_in_fp32

    device = loading.choose_device(name)
    sum_products_in_fp32()
    make_process_ready(device)
    return device


def evaluation_dtype(asked: str, folders: Sequence[Path], device: str) -> str:
    """Choose one dtype for models that are compared, and set this process up for the device.

    Args:
        asked: a value of `Dtype`; auto is fp32 for all where one model is not known to be trained
            in bf16.
        folders: the models'.
        device: see `evaluation_device`.

    Raises:
        UserError: the device is absent, or a record damaged.
    """
    import torch

    chosen = evaluation_device(device)
    if asked != "auto":
        return asked
    if chosen.type != "cuda" or torch.cuda.get_device_capability(chosen) < (8, 0):
        return "float32"
    records = (read_record(loading.model_folder(folder)) for folder in folders)
    trained = {getattr(record, "precision", None) for record in records}
    return "bfloat16" if trained == {"bf16"} else "float32"
