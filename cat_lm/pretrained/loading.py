"""Open a transformers model folder, so that what is evaluated is what was trained.

A folder comes from others. Its code is never run, and what its files ask for is bounded.
transformers only warns when a weight is missing and goes on with a random one; here that is an
error. torch and transformers are imported inside the functions, so that commands can parse their
arguments first.
"""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from cat_lm import architectures
from cat_lm.core.cli import announce
from cat_lm.core.errors import UserError, describe_os_error, file_error
from cat_lm.core.files import os_error
from cat_lm.core.numbers import BEAMS, LABELS, LAYERS, NEW_TOKENS
from cat_lm.core.readers import MAX_YAML_BYTES, Record, read_json, read_object, short
from cat_lm.model.rope_scaling import check_rope_numbers
from cat_lm.pretrained.record import CARD, WEIGHTS, verify

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DTYPES = ("float32", "bfloat16", "float16")
SETTINGS = ("config.json", "generation_config.json")
# No folder runs its code here, and none is looked for on the Hub.
_AS_IT_IS = {"local_files_only": True, "trust_remote_code": False}


def model_folder(path: Path | str) -> Path:
    """Return the transformers folder at `path`: itself, or `path/model` of a run folder.

    Raises UserError where there is none.
    """
    if not str(path):  # Path("") would be the working directory.
        raise UserError("model '': is an empty path; give a transformers folder or a run folder")
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"model {path}: no such folder; give a transformers folder or a run folder")
    for folder in (path, path / "model"):
        if (folder / "config.json").is_file():
            if not weight_files(folder):
                raise UserError(f"model {folder}: has config.json but no weights")
            return folder
    if (path / "checkpoints").is_dir():
        raise UserError(
            f"model {path}: a run folder without an export; "
            f"run: python -m cat_lm.export {path} {path / 'model'}"
        )
    raise UserError(f"model {path}: not a model folder (no config.json, and no model/ in it)")


def model_label(folder: Path) -> str:
    """Return a model's label: the name of its folder, or of its run for RUN/model."""
    folder = folder.resolve()
    return folder.parent.name if folder.name == "model" else folder.name


def begin(*models: Path | str) -> None:
    """Begin a command that loads models: look for their folders, announce it, import transformers.

    Raises UserError for a folder without a model, before anything heavy is imported.
    """
    for model in models:
        model_folder(model)
    announce(f"loading {', '.join(map(str, models))}")
    quiet_transformers()


def quiet_transformers() -> None:
    """Suppress notes and progress bars of transformers and DeepSpeed.

    Saving a model imports DeepSpeed (accelerate looks whether the model is its engine), which warns
    without a GPU.
    """
    import torch
    from transformers.utils import logging

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def choose_device(name: str = "auto") -> torch.device:
    """Choose a device by its name; `auto` is the GPU where there is one, else the CPU.

    Raises UserError for a device that is absent, or that does not compute ("meta").
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # The device `meta` has no values, and raises.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(
            f"--device {name}: cannot be used ({reason(error)}); use auto or cpu"
        ) from None
    return device


# What its files say


class GenerationSettings(Record):
    """The keys of `generation_config.json` that are read before transformers checks the others."""

    num_beams: int | None = Field(None, le=BEAMS.high)
    num_return_sequences: int | None = Field(None, le=BEAMS.high)
    encoder_no_repeat_ngram_size: int | None = Field(None, le=NEW_TOKENS.high)
    prefill_chunk_size: int | None = Field(None, ge=1)
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None


class WeightIndex(Record):
    """The schema of the index of weights in several files: tensor -> file."""

    weight_map: dict[str, str]


def weight_files(folder: Path) -> list[Path]:
    """Find the files that transformers reads the weights from, in name order; none without any.

    Raises UserError where an index is damaged, or names a file that is not in the folder.
    """
    files, whole = sorted(folder.glob("model*.safetensors")), WEIGHTS
    if not files:
        files, whole = sorted(folder.glob("pytorch_model*.bin")), "pytorch_model.bin"
    index, names = folder / f"{whole}.index.json", {path.name for path in folder.iterdir()}
    is_split = files and whole not in names and index.name in names
    needed = read_json(index, WeightIndex).weight_map.values() if is_split else ()
    if absent := {*needed} - names:
        raise UserError(f"{index}: weight_map names {min(absent)}, which is not in the folder")
    return files


def read_settings(folder: Path) -> dict[str, Any]:
    """Read `config.json`, and refuse what a model folder may not ask for.

    Raises UserError where the file is damaged; or the model is an adapter to another one, asks for
    code from the Hub, for other files, or for more than can be meant.
    """
    path = folder / "config.json"
    settings = read_object(path, limit=MAX_YAML_BYTES)
    _check_counts(settings, path)
    if (folder / "adapter_config.json").exists():
        raise UserError(
            f"model {folder}: holds an adapter (adapter_config.json), which is not read; merge it "
            "into the weights or move it away"
        )
    for key in ("transformers_weights", "configuration_files"):
        if key in settings:  # transformers would open other files than those that were checked.
            raise UserError(f"{path}: {key}: other files are not read; remove the key")
    for key in ("attn_implementation", "_attn_implementation"):
        value = settings.get(key)
        if value is not None and not (isinstance(value, str) and value.isidentifier()):
            raise UserError(
                f"{path}: {key} is {short(value)}: must be a name such as sdpa or eager; code from "
                "elsewhere is not run"
            )
    generation = folder / "generation_config.json"
    if generation.is_file():
        read_json(generation, GenerationSettings)
    return settings


def _check_counts(settings: dict[str, Any], path: Path) -> None:
    """Refuse more layers or labels, of any part, than can be meant: each gets an entry."""
    for key, value in settings.items():
        if isinstance(value, dict):
            _check_counts(value, path)
        kind = key.rpartition("_")[2].removesuffix("s")
        allowed = {"layer": LAYERS, "label": LABELS}.get(kind)
        if allowed and isinstance(value, int | float) and value > allowed.high:
            raise UserError(f"{path}: {key}={value}: {allowed.problem(value)}")


def asks_for_code(settings: dict[str, Any]) -> str:
    """Return an error text if settings ask for the model's own code; "" otherwise."""
    if "auto_map" not in settings:
        return ""
    # An export has a file of its own beside weights that are read without it.
    families = architectures.built_in()
    known = [kind for family in families for kind in (family.model_type, family.library_type)]
    exported = tuple(f"modeling_{family.model_type}." for family in families)
    wanted = settings["auto_map"]
    names = wanted.values() if isinstance(wanted, dict) else [wanted]
    if settings.get("model_type") in known and all(str(n).startswith(exported) for n in names):
        return ""
    return (
        f"it asks for code of its own (auto_map {short(settings['auto_map'])}); its code is not run"
    )


def reason(error: BaseException) -> str:
    """Return another library's error as one line of at most 300 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    count = 2 if len(lines) > 1 and lines[0].endswith(":") else 1
    text = " ".join(lines[:count]) or type(error).__name__
    text = f"missing {text}" if isinstance(error, KeyError) else text
    return text if len(text) <= 300 else f"{text[:297]}..."


def model_config(path: Path | str) -> PreTrainedConfig:
    """Read the configuration at `path` (see `model_folder`). Raises UserError where it is none."""
    from transformers import AutoConfig
    from transformers.activations import ACT2CLS

    folder = model_folder(path)
    verify(folder, SETTINGS.__contains__)
    settings = read_settings(folder)
    try:
        family = architectures.find(settings)
        if family is None:
            return AutoConfig.from_pretrained(folder, **_AS_IT_IS)
        family.Section.check_values(settings)
        # Not by transformers' registry of types: importing flash-linear-attention, whose operators
        # may compute a run's recurrences, gives the types of Mamba to other classes there.
        if settings["model_type"] == family.model_type:
            config = family.config_class().from_pretrained(folder, **_AS_IT_IS)
        elif architectures.has_stock(family):
            config = family.library_classes().config.from_pretrained(folder, **_AS_IT_IS)
        else:  # transformers may not support it, or need a GPU.
            config = family.own_config(settings)
        if rope := getattr(config, "rope_parameters", None):
            check_rope_numbers(rope)
        activation = getattr(config, "hidden_act", "gelu")
        if activation not in ACT2CLS:
            known = ", ".join(sorted(ACT2CLS))
            raise ValueError(f"hidden_act={activation!r}: is not supported; choose one of {known}")
        return config
    except Exception as error:
        problem = asks_for_code(settings) or reason(error)
        raise UserError(f"model {folder}: config.json cannot be used: {problem}") from error


def load_model(
    path: Path | str,
    *,
    dtype: str = "float32",
    device: str = "auto",
    config: PreTrainedConfig | None = None,
) -> PreTrainedModel:
    """Load the causal language model at `path` (see `model_folder`), in evaluation mode.

    Args:
        dtype: the dtype of the weights; a name of `DTYPES`, or auto for that of the files.
        device: as in `choose_device`.
        config: the configuration of the model to build; by default the folder's own.

    Raises:
        UserError: the folder is no model, or transformers cannot read it; its weights are not
            exactly those that the configuration asks for, or not finite; or, unless
            `comparing_files` says otherwise, files are no longer what was exported.
    """
    folder = model_folder(path)
    target = choose_device(device)
    config, files = config or model_config(folder), weight_files(folder)
    # Listed weights that are gone, too, in whose place others would be read.
    verify(folder, {WEIGHTS, *(file.name for file in files)}.__contains__)
    if dtype == "auto":
        config.dtype = None  # transformers would prefer it to the dtype of the files.
    model = _load(folder, files, config, dtype).to(target).eval()
    refuse_non_finite(f"model {folder}", dict(model.state_dict()))
    return model


def _load(folder: Path, files: list[Path], config: PreTrainedConfig, dtype: str) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM
    from transformers.modeling_utils import load_state_dict

    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            output_loading_info=True,
            # Reported below, with both shapes.
            ignore_mismatched_sizes=True,
            weights_only=True,
            **_AS_IT_IS,
        )
    except Exception as error:  # Several libraries raise for files that they cannot open or parse.
        causes = [cause for file in files if (cause := os_error(error, file)) is not None]
        # Files that can be opened are not the cause while one cannot.
        causes.sort(key=lambda cause: cause.errno == errno.EAGAIN)
        if causes:
            problem = describe_os_error(causes[0])
            raise file_error(f"model {folder}: cannot be loaded: {problem}", causes[0]) from error
        problem = asks_for_code(read_settings(folder)) or reason(error)
        if isinstance(error, pickle.UnpicklingError):
            problem = (
                "its files are damaged or hold more than tensors, such as code, which is not run"
            )
        raise UserError(f"model {folder}: cannot be loaded: {problem}") from error
    wrong = {kind: sorted(map(str, keys)) for kind, keys in report.items() if keys}
    if wrong:
        kind, keys = next(iter(wrong.items()))
        raise UserError(
            f"model {folder}: weights and config.json do not fit: "
            f"{kind.replace('_', ' ')} {', '.join(keys[:3])}{' …' if len(keys) > 3 else ''}"
        )
    expected = model.state_dict()
    for file in files:
        for name, stored in load_state_dict(file, map_location="meta").items():
            # transformers would cast integers, as of quantised weights, without their scales.
            if name in expected and expected[name].is_floating_point() > stored.is_floating_point():
                raise UserError(f"model {folder}: {name} is of {stored.dtype}, must be of floats")
    return model


def refuse_non_finite(what: str, tensors: dict[str, Tensor]) -> None:
    """Raise UserError, which `what` begins, where a weight is NaN or infinite."""
    import torch

    floats = {n: t for n, t in tensors.items() if t.is_floating_point() and t.numel() > 0}
    # NaN goes through minimum and maximum, which take no memory beside the tensor.
    bounds = {name: torch.stack(tensor.detach().aminmax()) for name, tensor in floats.items()}
    wrong = [name for name, pair in bounds.items() if not pair.isfinite().all()]
    if wrong:
        are, more = ("are", ", …") if len(wrong) > 1 else ("is", "")
        raise UserError(
            f"{what}: {len(wrong)} of {len(tensors)} tensors {are} not finite ({wrong[0]}{more}): "
            "NaN or infinite numbers make no model to use; take an earlier checkpoint"
        )


def refuse_beyond_positions(config: PreTrainedConfig, length: int, what: str) -> None:
    """Raise UserError, begun by `what`, where a model's table of positions has less than `length`.

    What is beyond a table is a traceback on a CPU, and on a GPU the end of the process. Families of
    ours, and those of transformers that rotate queries and keys, compute positions at every length.
    """
    longest = getattr(config, "max_position_embeddings", None)
    is_computed = architectures.find(config) is not None or hasattr(config, "rope_parameters")
    if isinstance(longest, int) and length > longest and not is_computed:
        raise UserError(
            f"{what}: model type {config.model_type} has positions for {longest:,} tokens and none "
            "beyond; give less"
        )


def load_tokenizer(path: Path | str) -> PreTrainedTokenizerBase:
    """Load the tokenizer saved in the transformers folder at `path`, or in `path/model`.

    Raises UserError where there is none, or it cannot be loaded: none is guessed from the model.
    """
    from transformers import AutoTokenizer

    folder = Path(path)
    if (folder / "model" / "config.json").is_file() and not (folder / "config.json").is_file():
        folder = folder / "model"
    files = [folder / name for name in ("tokenizer.json", "tokenizer_config.json")]
    if not any(file.is_file() for file in files):
        raise UserError(f"tokenizer {folder}: missing (no tokenizer.json, no {files[1].name})")
    settings = read_object(files[1]) if files[1].is_file() else {}
    verify(folder, is_of_tokenizer)
    try:
        return AutoTokenizer.from_pretrained(folder, **_AS_IT_IS)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # A panic in the library's Rust code is no Exception.
        problem = asks_for_code(settings) or reason(error)
        raise UserError(f"tokenizer {folder}: cannot be loaded: {problem}") from error


def begin_as_trained(tokenizer: PreTrainedTokenizerBase) -> None:
    """Make texts begin as documents did in training: with the end-of-document token.

    What stood before every document in training is what evaluations should put before a text; a
    start token of the tokenizer's own (Mistral's <s>) was never seen.
    """
    tokenizer.bos_token = tokenizer.eos_token
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # The attention mask hides padding.


def is_of_tokenizer(name: str) -> bool:
    """Return True if a listed file of an export is one of its tokenizer's."""
    weights = name.endswith((".safetensors", ".bin", ".index.json"))
    return not weights and name not in (*SETTINGS, CARD)


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
    """Raise UserError where the tokenizer has ids for which the model has no embedding."""
    entries = 1 + max(tokenizer.get_vocab().values(), default=-1)
    if entries > config.vocab_size:
        counts = f"tokenizer has {entries} entries, the model {config.vocab_size}"
        raise UserError(f"{counts}: the model was trained with another one")
