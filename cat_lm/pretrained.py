"""Opening a transformers model folder, so that what is evaluated is what was trained.

transformers only warns when a weight is missing and goes on with a random one; here that is an
error. torch and transformers are imported inside the functions, so that commands can parse their
arguments first.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from cat_lm.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DTYPES = ("float32", "bfloat16", "float16")
WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def model_folder(path: Path | str) -> Path:
    """The transformers folder at `path`: the folder itself, or `path/model` of a run folder.

    Raises UserError where there is none.
    """
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"model {path}: no such folder; give a transformers folder or a run folder")
    for folder in (path, path / "model"):
        if (folder / "config.json").is_file():
            if not any((folder / name).is_file() for name in WEIGHTS):
                raise UserError(
                    f"model {folder}: has config.json but no weights ({' or '.join(WEIGHTS[:2])})"
                )
            return folder
    if (path / "checkpoints").is_dir():
        raise UserError(
            f"model {path}: a run folder without an export; "
            f"run: python -m cat_lm.export {path} {path / 'model'}"
        )
    raise UserError(f"model {path}: not a model folder (no config.json, and no model/ in it)")


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights of a transformers folder, in name order."""
    safetensors = sorted(folder.glob("*.safetensors"))
    return safetensors or sorted(folder.glob("pytorch_model*.bin"))


def quiet_transformers() -> None:
    """Keeps transformers' own notes and progress bars out of a command's output.

    DeepSpeed's too: where it is installed, saving a model imports it (accelerate looks whether the
    model is its engine), and without a GPU it warns that it has found none.
    """
    import torch
    from transformers.utils import logging

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def choose_device(name: str = "auto") -> torch.device:
    """`auto` is the GPU where there is one, else the CPU.

    Raises UserError for a device that is absent, or that does not compute ("meta").
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        (torch.ones(1, device=device) + 1).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--device {name}: cannot be used ({reason}); use auto or cpu") from None
    return device


def model_config(path: Path | str) -> PreTrainedConfig:
    """The configuration at `path` (see `model_folder`). Raises UserError where it is none."""
    from transformers import AutoConfig

    folder = model_folder(path)
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"model {folder}: config.json cannot be read: {reason[0]}") from error


def load_model(
    path: Path | str,
    *,
    dtype: str = "float32",
    device: str = "auto",
    config: PreTrainedConfig | None = None,
) -> PreTrainedModel:
    """The causal language model at `path` (see `model_folder`), in evaluation mode on `device`.

    With `config`, the folder's weights are read into a model of that configuration.

    Raises UserError where the folder is no model, where transformers cannot read it, or where
    its weights are not exactly those that the configuration asks for.
    """
    import torch
    from transformers import AutoModelForCausalLM

    folder = model_folder(path)
    target = choose_device(device)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            **({} if config is None else {"config": config}),
            dtype=getattr(torch, dtype),
            output_loading_info=True,
            local_files_only=True,
        )
    except Exception as error:
        # Whatever a damaged folder makes transformers raise, the user needs the folder's name.
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"model {folder}: cannot be loaded: {reason[0]}") from error
    wrong = {kind: sorted(map(str, keys)) for kind, keys in report.items() if keys}
    if wrong:
        kind, keys = next(iter(wrong.items()))
        raise UserError(
            f"model {folder}: weights and config.json do not fit: "
            f"{kind.replace('_', ' ')} {', '.join(keys[:3])}{' …' if len(keys) > 3 else ''}"
        )
    return model.to(target).eval()


def load_tokenizer(path: Path | str) -> PreTrainedTokenizerBase:
    """The tokenizer saved in the transformers folder at `path`.

    Raises UserError where there is none; a tokenizer is never guessed from the model's type.
    """
    folder = Path(path)
    if (folder / "model" / "config.json").is_file() and not (folder / "config.json").is_file():
        folder = folder / "model"
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise UserError(
            f"tokenizer {folder}: missing (no tokenizer.json, no tokenizer_config.json)"
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"tokenizer {folder}: cannot be loaded: {reason[0]}") from error
