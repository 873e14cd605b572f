"""The files of a transformers folder, looked at before transformers opens them.

A model folder comes from others. Its code is never run, what its files name lies in the folder,
pickles hold tensors and nothing else, and what cannot be read is said with the file's name.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import AfterValidator, Field

from cat_lm.core.errors import UserError, describe_os_error, file_error
from cat_lm.core.files import os_error
from cat_lm.core.numbers import BEAMS, LABELS, LAYERS, NEW_TOKENS
from cat_lm.core.readers import (
    MAX_YAML_BYTES,
    InsideName,
    Record,
    read_json,
    read_object,
    short,
)

if TYPE_CHECKING:
    from torch import Tensor

# In the order in which transformers looks for them.
WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# With these keys transformers opens other files than the usual ones.
_REDIRECTIONS = ("transformers_weights", "configuration_files")


def _check_plain(name: str) -> str:
    if "/" in name or "\\" in name:
        raise ValueError("must be the name of a file in the same folder")
    return name


class WeightIndex(Record):
    """The file of each tensor, for weights in several files."""

    metadata: dict[str, Any]
    weight_map: dict[str, Annotated[InsideName, AfterValidator(_check_plain)]]


class GenerationSettings(Record):
    """Hold what is used of `generation_config.json` before transformers checks the rest."""

    num_beams: int | None = Field(None, le=BEAMS.high)
    num_return_sequences: int | None = Field(None, le=BEAMS.high)
    encoder_no_repeat_ngram_size: int | None = Field(None, le=NEW_TOKENS.high)
    prefill_chunk_size: int | None = Field(None, ge=1)
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None


class TokenizerSettings(Record):
    """Hold what transformers uses of `tokenizer_config.json` without looking at it."""

    model_max_length: int | float | None = None


def weight_files(folder: Path) -> list[Path]:
    """Find the files that transformers reads the weights from, in name order; none without any.

    Raises:
        UserError: the index is damaged, names a file outside of the folder or one that is absent.
    """
    first = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if first is None or first.suffix != ".json":
        return [] if first is None else [first]
    index = read_json(first, WeightIndex)
    files = [folder / name for name in sorted(set(index.weight_map.values()))]
    if not files:
        raise UserError(f"{first}: weight_map is empty, must name the file of each tensor")
    for file in files:
        if file.suffix != first.with_suffix("").with_suffix("").suffix:
            raise UserError(f"{first}: weight_map names {short(file.name)}, another kind of file")
        if not file.is_file():
            raise UserError(f"{first}: weight_map names {file.name}, which is not in the folder")
    return files


def read_settings(folder: Path) -> dict[str, Any]:
    """Read `config.json`, and refuse what a model folder may not ask for.

    Raises:
        UserError: the file is damaged; or the model is an adapter to another one, or has its
            weights or its settings elsewhere, or asks for code from the Hub.
    """
    path = folder / "config.json"
    settings = read_object(path, limit=MAX_YAML_BYTES)
    _check_counts(settings, path)
    if (folder / "adapter_config.json").exists():
        raise UserError(
            f"model {folder}: holds an adapter (adapter_config.json), which is not read; merge it "
            "into the weights or move it away"
        )
    for key in _REDIRECTIONS:
        if key in settings:
            raise UserError(
                f"{path}: {key} is {short(settings[key])}: other files than the usual ones are "
                "not read; remove the key"
            )
    for key in ("attn_implementation", "_attn_implementation"):
        value = settings.get(key)
        if value is not None and not (isinstance(value, str) and re.fullmatch(r"\w+", value)):
            raise UserError(
                f"{path}: {key} is {short(value)}: must be a name such as sdpa or eager; code from "
                "elsewhere is not run"
            )
    if not isinstance(settings.get("model_type"), str):
        raise UserError(
            f"{path}: model_type is {short(settings.get('model_type'))}, must be a name"
        )
    generation = folder / "generation_config.json"
    if generation.is_file():
        read_json(generation, GenerationSettings)
    return settings


def _check_counts(settings: dict[str, Any], path: Path) -> None:
    """Refuse more layers or labels than can be meant: transformers makes an entry for each.

    The limits are those of our own models; the names are those of any model's parts.
    """
    for key, value in settings.items():
        if isinstance(value, dict):
            _check_counts(value, path)
        kind = key.rpartition("_")[2].removesuffix("s")
        allowed = {"layer": LAYERS, "label": LABELS}.get(kind)
        if allowed and isinstance(value, int | float) and value > allowed.high:
            raise UserError(f"{path}: {key}={value}: {allowed.problem(value)}")


def asks_for_code(settings: dict[str, Any]) -> str:
    """Return, for an error, that settings ask for the model's own code; "" where they do not."""
    if "auto_map" not in settings:
        return ""
    return (
        f"it asks for code of its own (auto_map {short(settings['auto_map'])}); its code is not run"
    )


def reason(error: BaseException) -> str:
    """Return what another library says as one line of at most 300 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    count = 2 if len(lines) > 1 and lines[0].endswith(":") else 1
    text = " ".join(lines[:count]) or type(error).__name__
    text = f"missing {text}" if isinstance(error, KeyError) else text
    return text if len(text) <= 300 else f"{text[:297]}..."


# Weights


class Header(NamedTuple):
    """Hold what a file says of a tensor before its numbers."""

    shape: tuple[int, ...]
    dtype: str
    is_floating_point: bool


# Of a tensor's name in a file its name in the model, or None where the model has no use for it.
Naming = Callable[[str], str | None]


def read_headers(files: Iterable[Path], naming: Naming) -> dict[str, Header]:
    """Read names, shapes and types of all weights, by the model's names.

    Raises:
        UserError: a file cannot be opened, is damaged, or holds anything but tensors by name.
    """
    found: dict[str, Header] = {}
    for path in files:
        stored = _read(path, _safetensors_headers, _pickle_headers)
        found |= _named(stored, naming)
    return found


def read_tensors(
    files: Iterable[Path], names: Collection[str] | None, naming: Naming
) -> dict[str, Tensor]:
    """Read weights (all, or those of `names`) by the model's names; errors as in `read_headers`."""

    def chosen(tensors: dict[str, Any]) -> dict[str, Any]:
        tensors = _named(tensors, naming)
        return tensors if names is None else {n: t for n, t in tensors.items() if n in names}

    def safetensors(path: Path) -> dict[str, Tensor]:
        from safetensors import safe_open

        with safe_open(path, framework="pt") as stored:
            places = chosen({name: name for name in stored.keys()})  # noqa: SIM118
            return {name: stored.get_tensor(place) for name, place in places.items()}

    found: dict[str, Tensor] = {}
    for path in files:
        found |= _read(path, safetensors, lambda path: chosen(_pickle_tensors(path)))
    return found


def _named(tensors: dict[str, Any], naming: Naming) -> dict[str, Any]:
    named = {naming(name): tensor for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in named.items() if name is not None}


def _read(path: Path, safetensors: Callable[[Path], Any], pickled: Callable[[Path], Any]) -> Any:
    try:
        return safetensors(path) if path.suffix == ".safetensors" else pickled(path)
    except UserError:
        raise
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path}: is damaged, or holds more than tensors, such as code, which is not run; "
            "save the model as model.safetensors"
        ) from error
    except Exception as error:  # of either library, for whatever it cannot open or parse
        if (cause := os_error(error, path)) is not None:
            raise file_error(f"{path}: {describe_os_error(cause)}", cause) from error
        raise UserError(f"{path}: is damaged ({reason(error)})") from error


def _safetensors_headers(path: Path) -> dict[str, Header]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as stored:
        parts = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118
        # safetensors' names of types: F32, BF16, I64, …
        return {
            name: Header(tuple(part.get_shape()), kind, kind.startswith(("F", "BF")))
            for name, part in parts.items()
            if (kind := part.get_dtype())
        }


def _pickle_headers(path: Path) -> dict[str, Header]:
    return {
        name: Header(tuple(tensor.shape), str(tensor.dtype), tensor.is_floating_point())
        for name, tensor in _pickle_tensors(path, "meta").items()
    }


def _pickle_tensors(path: Path, device: str = "cpu") -> dict[str, Tensor]:
    import torch

    values = torch.load(path, map_location=device, weights_only=True)
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds a {type(values).__name__}, must hold tensors by name")
    for name, value in values.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise UserError(f"{path}: holds {short(name)}: a {type(value).__name__}, not a tensor")
    return values


def check_fit(
    folder: Path, stored: dict[str, Header], expected: dict[str, Tensor], tied: dict[str, str]
) -> None:
    """Compare stored weights with those that the configuration asks for, by name and shape.

    Args:
        tied: names that may be absent where the other name, whose tensor they share, is there.

    Raises:
        UserError: naming a tensor, and both shapes where these differ.
    """
    what = f"model {folder}: weights and config.json do not fit:"
    absent = [n for n in expected if n not in stored and tied.get(n) not in stored]
    for kind, names in (
        ("missing", absent),
        ("unexpected", [n for n in stored if n not in expected]),
    ):
        if names:
            shown = ", ".join(sorted(names)[:3])
            raise UserError(f"{what} {kind} keys {shown}{' …' if len(names) > 3 else ''}")
    for name, header in stored.items():
        shape = tuple(expected[name].shape)
        if header.shape != shape:
            raise UserError(
                f"{what} {name} is {list(header.shape)} in the file, config.json asks for "
                f"{list(shape)}"
            )
        if header.is_floating_point != expected[name].is_floating_point():  # of a buffer also not
            kind = "integers or booleans" if header.is_floating_point else "floating-point numbers"
            raise UserError(f"{what} {name} is of {header.dtype}, must be of {kind}")


def refuse_non_finite(what: str, tensors: dict[str, Tensor]) -> None:
    """Raise UserError, which `what` begins, where a weight is NaN or infinite."""
    wrong = [name for name, tensor in tensors.items() if not is_finite(tensor)]
    if wrong:
        are, more = ("are", ", …") if len(wrong) > 1 else ("is", "")
        raise UserError(
            f"{what}: {len(wrong)} of {len(tensors)} tensors {are} not finite ({wrong[0]}{more}): "
            "NaN or infinite numbers make no model to use; take an earlier checkpoint"
        )


def is_finite(tensor: Tensor) -> bool:
    """Return True if all numbers of a tensor are finite; takes no memory beside it."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    # NaN goes through minimum and maximum.
    return all(bound.isfinite().item() for bound in tensor.detach().aminmax())
