"""Opening a transformers model folder, so that what is evaluated is what was trained.

transformers only warns when a weight is missing and goes on with a random one; here that is an
error. torch and transformers are imported inside the functions, so that commands can parse their
arguments first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cat_lm import architectures
from cat_lm.core.errors import UserError
from cat_lm.core.readers import read_json, read_object, short
from cat_lm.pretrained.files import (
    WEIGHTS,
    Naming,
    TokenizerSettings,
    asks_for_code,
    check_fit,
    read_headers,
    read_settings,
    read_tensors,
    reason,
    refuse_non_finite,
    weight_files,
)
from cat_lm.pretrained.record import CARD, finite_as_listed, verify, verifying

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DTYPES = ("float32", "bfloat16", "float16")
SETTINGS = ("config.json", "generation_config.json")
# No folder runs its code here, and none is looked for on the Hub.
_AS_IT_IS = {"local_files_only": True, "trust_remote_code": False}
# Buffers of positions, in GPT-J and CTRL; and positions before the first token's, 2 in OPT.
_POSITION_TABLES, _SPARE_POSITIONS = ("embed_positions", "pos_encoding"), 8


def model_folder(path: Path | str) -> Path:
    """The transformers folder at `path`: the folder itself, or `path/model` of a run folder.

    Raises UserError where there is none.
    """
    if not str(path):
        raise UserError("model: is an empty path; give a transformers folder or a run folder")
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


def model_label(folder: Path) -> str:
    """Name a model by its folder, or by its run where that is RUN/model."""
    folder = folder.resolve()
    return folder.parent.name if folder.name == "model" else folder.name


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
        torch.zeros(1, device=device).item()  # which the device meta has not
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(
            f"--device {name}: cannot be used ({reason(error)}); use auto or cpu"
        ) from None
    return device


def model_config(path: Path | str) -> PreTrainedConfig:
    """The configuration at `path` (see `model_folder`). Raises UserError where it is none."""
    from transformers import AutoConfig

    folder = model_folder(path)
    verify(folder, SETTINGS.__contains__)
    settings = read_settings(folder)
    architecture = architectures.find(settings)
    try:
        if architecture is not None:
            architecture.check_settings(settings)
        kind = AutoConfig if architecture is None else _config_class(architecture, settings)
        if kind is None:  # transformers may not know it, and who does may need a GPU
            config = architecture.own_config(settings)
        else:
            config = kind.from_pretrained(folder, **_AS_IT_IS)
        if architecture is not None and hasattr(config, "hidden_act"):
            _check_activation(config.hidden_act)
    except Exception as error:
        said = asks_for_code(settings) or _unknown_type(settings) or reason(error)
        raise UserError(f"model {folder}: config.json cannot be used: {said}") from error
    return config


def _config_class(
    architecture: architectures.Architecture, settings: dict[str, Any]
) -> type[PreTrainedConfig] | None:
    """Return the class that reads a known family's config.json; None where none here does.

    Not by transformers' registry of types: importing flash-linear-attention, whose operators may
    compute a run's recurrences, gives the types of Mamba to other classes there. Models are found
    by the class of their configuration, which stays transformers' own.
    """
    if settings["model_type"] == architecture.model_type:
        return architecture.config_class()
    return architecture.library_classes().config if architecture.has_stock else None


def _unknown_type(settings: dict[str, Any]) -> str:
    """Return, for an error, that a model's type is unknown here; "" where it is known."""
    from transformers import CONFIG_MAPPING

    kind = settings.get("model_type")
    if not isinstance(kind, str) or kind in CONFIG_MAPPING or architectures.find(settings):
        return ""
    families = map(architectures.get, architectures.names())
    own = ", ".join(family.model_type for family in families)
    return (
        f"model_type={short(kind)} is none of transformers' and none of {own}; install the package "
        "that brings it"
    )


def _check_activation(name: str) -> None:
    from transformers.activations import ACT2CLS

    if name not in ACT2CLS:
        known = ", ".join(sorted(ACT2CLS))
        raise ValueError(f"hidden_act={name!r}: is not supported; choose one of {known}")


def load_model(
    path: Path | str,
    *,
    dtype: str = "float32",
    device: str = "auto",
    config: PreTrainedConfig | None = None,
) -> PreTrainedModel:
    """The causal language model at `path` (see `model_folder`), in evaluation mode on `device`.

    With `config`, the folder's weights are read into a model of that configuration. The files of an
    export of ours are compared with its record, unless `comparing_files` says otherwise.

    Raises UserError where the folder is no model, where transformers cannot read it, where its
    weights are not exactly those that the configuration asks for or are not finite, or where files
    are no longer what was exported.
    """
    folder = model_folder(path)
    target = choose_device(device)
    own, files = model_config(folder), weight_files(folder)
    with verifying(folder, _are_read(files)):
        _check_headers(folder, config or own)
        model = _load(folder, config or own, dtype).to(target).eval()
        if not _stays_finite(finite_as_listed(folder, files), dtype):
            refuse_non_finite(f"model {folder}", dict(model.state_dict()))
    return model


def _stays_finite(stored: str | None, dtype: str) -> bool:
    """Return True if weights that are finite in the dtype `stored` are so in `dtype`."""
    import torch

    if stored not in DTYPES:
        return False
    largest, needed = (torch.finfo(getattr(torch, name)).max for name in (dtype, stored))
    return largest >= needed


def _are_read(files: Iterable[Path]) -> Callable[[str], bool]:
    """Return which listed files are compared: those read, and those that would be instead."""
    names = {*(file.name for file in files), *WEIGHTS}
    return names.__contains__


def _load(folder: Path, config: PreTrainedConfig, dtype: str) -> PreTrainedModel:
    import torch
    from transformers import AutoModelForCausalLM

    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=getattr(torch, dtype),
            output_loading_info=True,
            # Reported below, with both shapes.
            ignore_mismatched_sizes=True,
            weights_only=True,
            **_AS_IT_IS,
        )
    except Exception as error:
        # Whatever a damaged folder makes transformers raise, the user needs the folder's name.
        said = asks_for_code(read_settings(folder)) or reason(error)
        raise UserError(f"model {folder}: cannot be loaded: {said}") from error
    wrong = {kind: sorted(map(str, keys)) for kind, keys in report.items() if keys}
    if wrong:
        kind, keys = next(iter(wrong.items()))
        raise UserError(
            f"model {folder}: weights and config.json do not fit: "
            f"{kind.replace('_', ' ')} {', '.join(keys[:3])}{' …' if len(keys) > 3 else ''}"
        )
    return model


def load_weights(
    folder: Path, config: PreTrainedConfig, names: Collection[str] | None = None
) -> dict[str, torch.Tensor]:
    """The weights of a folder of a known architecture as they are stored, all or those of `names`.

    Raises UserError as `load_model` does.
    """
    files = weight_files(folder)
    with verifying(folder, _are_read(files)):
        _check_headers(folder, config)
        tensors = read_tensors(files, names, _naming(config))
        if finite_as_listed(folder, files) is None:
            refuse_non_finite(f"model {folder}", tensors)
    return tensors


def _check_headers(folder: Path, config: PreTrainedConfig) -> None:
    """Compare names and shapes before anything of their size is made."""
    stored = read_headers(weight_files(folder), _naming(config))
    architecture = architectures.find(config)
    if architecture is None:
        return
    last = architecture.layer_weight.format(layer=config.num_hidden_layers - 1)
    # A model of a thousand layers that are not there would take long to build.
    expected = skeleton(folder, config).state_dict() if last in stored else {last: None}
    tied = {"lm_head.weight": architecture.embedding} if config.tie_word_embeddings else {}
    check_fit(folder, stored, expected, tied)


def _naming(config: PreTrainedConfig) -> Naming:
    architecture = architectures.find(config)
    return str if architecture is None else partial(architecture.own_name, config)


def skeleton(folder: Path, config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a configuration of a known architecture without memory for its weights.

    Raises UserError, which names `folder`, where it cannot be built.
    """
    import torch
    from transformers.initialization import no_init_weights

    try:
        # Without weights there is nothing to draw, and drawing would take half of the time.
        with torch.device("meta"), no_init_weights():
            return architectures.of_config(config).classes_of(config).causal_lm(config)
    except Exception as error:
        raise UserError(f"model {folder}: cannot be built: {reason(error)}") from error


def refuse_beyond_positions(config: PreTrainedConfig, length: int, what: str) -> None:
    """Refuse a length for which a model has no positions, as it looks them up in a table.

    What is beyond a table is a traceback on a CPU, and on a GPU the end of the process. Families of
    ours compute positions at every length.

    Args:
        config: of a model of any type.
        length: tokens that it is to read at once.
        what: begins the message.

    Raises:
        UserError: there is such a table, and it is too short.
    """
    longest = getattr(config, "max_position_embeddings", None)
    if not isinstance(longest, int) or length <= longest or architectures.find(config) is not None:
        return
    if _has_position_table(config, longest):
        raise UserError(
            f"{what}: model type {config.model_type} has positions for {longest:,} tokens and none "
            "beyond; give less"
        )


def _has_position_table(config: PreTrainedConfig, longest: int) -> bool:
    """Return True if a model has an embedding of positions (GPT-2, OPT), or a table (GPT-J)."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    try:
        with torch.device("meta"), no_init_weights():
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception:  # whoever loads it says why
        return False
    words = model.get_input_embeddings()
    embeddings = (module for module in model.modules() if isinstance(module, torch.nn.Embedding))
    rows = [module.num_embeddings for module in embeddings if module is not words]
    for name, buffer in model.named_buffers():
        if name.rpartition(".")[2] in _POSITION_TABLES:
            rows.append(len(buffer))
    return any(longest <= number <= longest + _SPARE_POSITIONS for number in rows)


def load_tokenizer(path: Path | str) -> PreTrainedTokenizerBase:
    """The tokenizer saved in the transformers folder at `path`.

    Raises UserError where there is none; a tokenizer is never guessed from the model's type.
    """
    folder = Path(path)
    if (folder / "model" / "config.json").is_file() and not (folder / "config.json").is_file():
        folder = folder / "model"
    names = ("tokenizer.json", "tokenizer_config.json")
    found = [name for name in names if (folder / name).is_file()]
    if not found:
        raise UserError(f"tokenizer {folder}: missing (no {', no '.join(names)})")
    settings = {}
    if names[1] in found:
        settings = read_object(folder / names[1])
        read_json(folder / names[1], TokenizerSettings)
    verify(folder, is_of_tokenizer)
    return _tokenizer(folder, settings)


def _tokenizer(folder: Path, settings: dict[str, Any]) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, **_AS_IT_IS)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of the library's Rust is no Exception
        said = asks_for_code(settings) or reason(error)
        raise UserError(f"tokenizer {folder}: cannot be loaded: {said}") from error


def is_of_tokenizer(name: str) -> bool:
    """Return True if a listed file of an export is one of its tokenizer's."""
    weights = name.endswith((".safetensors", ".bin", ".index.json"))
    return not weights and name not in (*SETTINGS, CARD)


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
    """Raise UserError where the tokenizer has ids for which the model has no embedding."""
    entries = 1 + max(tokenizer.get_vocab().values(), default=-1)
    if entries > config.vocab_size:
        raise UserError(
            f"tokenizer has {entries} entries, the model {config.vocab_size}: "
            "it is not the one the model was trained with"
        )
