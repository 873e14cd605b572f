"""`python -m cat_lm.export CHECKPOINT OUT`: a training checkpoint as a transformers folder.

CHECKPOINT is a run folder, its checkpoints folder, or one step folder; the newest complete step
is taken. OUT gets config.json, model.safetensors, generation_config.json, the tokenizer, a model
card, and export.json (where the weights came from). The folder is written beside its name, read
back, compared with the model tensor by tensor, and only then renamed: OUT is never half an
export. Needs neither DeepSpeed nor the data.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from cat_lm.core.cli import Parser, number, output_path, path_name
from cat_lm.core.errors import UserError, command
from cat_lm.core.files import write_json, write_text
from cat_lm.core.folders import atomic_folder, check_output
from cat_lm.core.numbers import SCALING_FACTOR
from cat_lm.core.readers import (
    Record,
    check_shape,
    read_json_lines,
    resolve,
    short,
)
from cat_lm.pretrained.card import model_card
from cat_lm.pretrained.files import refuse_non_finite
from cat_lm.pretrained.library_model import library_model
from cat_lm.pretrained.loading import (
    DTYPES,
    check_vocabulary,
    load_model,
    load_tokenizer,
    model_config,
    model_label,
    quiet_transformers,
)
from cat_lm.pretrained.record import (
    CARD,
    PROGRAM,
    RECORD,
    WEIGHTS,
    changed_files,
    describe_files,
    listing,
    read_record,
)
from cat_lm.training.checkpoint import find_checkpoint
from cat_lm.training.checkpoint.files import STEP_FOLDER, read_run_config, read_run_state

if TYPE_CHECKING:
    import torch
    from transformers import (
        GenerationConfig,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )


def export_checkpoint(
    checkpoint: Path | str,
    out: Path | str,
    dtype: str = "float32",
    *,
    method: str = "none",
    factor: float = 1.0,
    temperature_scope: str = "logits",
    library: bool = False,
) -> Path:
    """Writes the newest complete checkpoint at `checkpoint` as the transformers folder `out`.

    With a `method` of `cat_lm.pretrained.scaled`, the exported model reads contexts of `factor`
    times its training length, which then is its `max_position_embeddings`. With `library` it is
    transformers' own class, if that computes the same.

    Returns the path of `out`. Raises UserError where there is no complete checkpoint, where it
    lacks its tokenizer, where `out` holds something else, where the export read back differs, or
    where the method does not exist for the model; or the library has no class of it.
    """

    out = _checked_place(out)
    step_folder = find_checkpoint(checkpoint)
    refuse_checkpoints(out, step_folder)
    facts = training_facts(step_folder)
    config = None
    if method != "none":
        config = model_config(step_folder / "model")
        facts.setdefault("context_length", config.max_position_embeddings)
        trained = facts["context_length"]
        config = _scaled_config(config, method, factor, trained, temperature_scope)
        facts |= {"context_method": method, "context_factor": factor}
    model = load_model(step_folder / "model", device="cpu", config=config)
    if library:
        model = library_model(model)
    tokenizer = load_tokenizer(step_folder / "tokenizer")
    return export_model(model, tokenizer, out, dtype=dtype, facts=facts)


def _scaled_config(
    config: PreTrainedConfig, method: str, factor: float, training_length: int, scope: str
) -> PreTrainedConfig:
    from cat_lm.pretrained.scaled import scaled_config, scaled_fields

    try:
        fields = scaled_fields(config, method, factor, training_length, scope)
        return scaled_config(config, fields)
    except ValueError as error:
        raise UserError(f"--method {method} --factor {factor:g}: {error}") from None


def export_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    out: Path | str,
    *,
    dtype: str = "float32",
    facts: Mapping[str, Any] | None = None,
) -> Path:
    """Writes `model` and `tokenizer` as the transformers folder `out`, verified and all at once.

    Args:
        model: its parameters are cast to `dtype` in place.
        dtype: of the tensors in the file; a narrower one than the model's rounds to nearest.
        facts: what is known about the training (see `training_facts`), for the card and record.

    Raises:
        UserError: `out` holds something that is no earlier export, or the folder read back does
            not have exactly the model's tensors.
    """
    import torch

    out = _checked_place(out)
    refuse_checkpoints(out)
    check_vocabulary(tokenizer, model.config)
    # Parameters only: buffers such as RoPE's frequencies stay in the precision they are made in.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
    # A narrow dtype may have no room for a large weight.
    refuse_non_finite(f"weights in {dtype}", dict(model.state_dict()))
    # What stood before every document in training is what evaluations should put before a text; a
    # start token of the tokenizer's own (Mistral's <s>) was never seen.
    tokenizer.bos_token = tokenizer.eos_token
    model.generation_config = _generation_config(model, tokenizer)
    facts = dict(facts or {})
    with atomic_folder(out, listing) as folder:
        model.save_pretrained(folder, max_shard_size="1000GB")
        tokenizer.save_pretrained(folder)
        _verify(folder, model, dtype)
        files = describe_files(folder)
        # The weights are finite, or were refused above; `_verify` found the same bits in the files.
        record = {
            "format": 1,
            "program": PROGRAM,
            **facts,
            "dtype": dtype,
            "parameters": model.num_parameters(),
            "sha256": files[WEIGHTS]["sha256"],
        }
        write_text(folder / CARD, model_card(model.config, record, model_label(out)))
        files |= describe_files(folder, [CARD])
        write_json(folder / RECORD, record | {"files": files})
    return out


def training_facts(step_folder: Path) -> dict[str, Any]:
    """Gather what checkpoint and run know of the training: step, tokens, context, loss.

    Raises UserError where a file of them is damaged.
    """
    state, config = read_run_state(step_folder), read_run_config(step_folder)
    facts = {
        "step": state.step,
        "tokens": state.tokens,
        "data_fingerprint": state.data.fingerprint,
        "code": state.code.model_dump(),
        "context_length": config.data.context_length,
        "precision": config.train.precision,  # a run's own file holds what auto came to
    }
    facts |= _last_validation(step_folder.parent.parent / "metrics.jsonl", state.step)
    return {key: value for key, value in facts.items() if value is not None}


class _Metrics(Record):
    """Hold what is used of a line of `metrics.jsonl`."""

    step: int = Field(ge=0)
    val_loss: float | None = None


def _last_validation(metrics: Path, step: int) -> dict[str, float]:
    """The newest validation at or before `step`; empty where there was none."""
    found: dict[str, float] = {}
    if not metrics.is_file():
        return found

    def check(line: dict[str, Any], place: str) -> None:
        check_shape(line, _Metrics, place)
        for key, value in line.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if key.startswith("val_") and value is not None and not is_number:
                raise UserError(f"{place}: {key} is {short(value)}: must be a number")

    for line in read_json_lines(metrics, check, cut_tail=True):
        if "val_loss" in line and line["step"] <= step:
            found = {k: v for k, v in line.items() if k.startswith("val_")}
    return found


def _generation_config(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> GenerationConfig:
    """Generation ends at the tokenizer's end-of-document token, whatever the config's default."""
    from transformers import GenerationConfig

    end = tokenizer.eos_token_id
    pad = tokenizer.pad_token_id
    config = GenerationConfig(
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end if pad is None else pad,
    )
    model.config.bos_token_id = config.bos_token_id
    model.config.eos_token_id = config.eos_token_id
    return config


def _verify(folder: Path, model: PreTrainedModel, dtype: str) -> None:
    """Reads the folder as a user would and compares every tensor bit by bit.

    As a rule from the page cache: what the disk loses later, the checksums find.
    """
    import torch

    # load_model raises for missing and unexpected keys.
    read = _tensors(load_model(folder, dtype=dtype, device="cpu"))
    written = _tensors(model)
    if read.keys() != written.keys():
        names = sorted(read.keys() ^ written.keys())
        raise UserError(f"export {folder}: tensors differ from the checkpoint's: {names[:3]}")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in written.items():
        if name not in parameters:  # a buffer is stored as it is, and cast by whoever loads it
            tensor = tensor.to(read[name].dtype)
        if tensor.dtype != read[name].dtype or not torch.equal(
            _bits(tensor.cpu()), _bits(read[name])
        ):
            raise UserError(f"export {folder}: tensor {name} read back is not the one written")


def _tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Parameters and buffers, those outside the state dict (RoPE's frequencies) included."""
    return dict(model.state_dict()) | dict(model.named_buffers())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, because NaN is not equal to itself and -0.0 is equal to 0.0."""
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _checked_place(out: Path | str) -> Path:
    """Refuse, before any work, to replace what is not an earlier export as it was written.

    Raises:
        UserError: `out` cannot be a folder, is not empty and lists no files of an export, or has
            listed files that were changed since.
    """
    # Of a link, the folder that it points to is made.
    check_output(resolve(out) if os.path.islink(out) else out, "OUT")
    out = Path(out)
    if not out.is_dir() or not any(out.iterdir()):
        return out
    if not os.path.lexists(out / RECORD):
        raise UserError(f"OUT {out}: is not empty and no earlier export (it has no {RECORD})")
    if read_record(out) is None:
        raise UserError(
            f"OUT {out}: its {RECORD} does not list what an export wrote; move the folder away or "
            "give another one"
        )
    changed = changed_files(out)
    if changed:
        raise UserError(
            f"OUT {out}: {changed[0]} was changed since it was exported and would be lost; move it "
            "away or give another folder"
        )
    return out


def refuse_checkpoints(out: Path, source: Path | None = None) -> None:
    """Refuse an OUT where train.py keeps checkpoints, whose folders it tidies, or above them.

    Args:
        source: the step folder whose weights go to `out`, wherever it stands.

    Raises:
        UserError: `out`, links followed, is or lies in a folder of checkpoints, or holds `source`.
    """
    place = resolve(out)

    def is_taken(folder: Path) -> bool:
        return _holds_checkpoints(folder) or bool(source and folder == resolve(source).parent)

    for folder in (place, *place.parents):
        if is_taken(folder):
            above = next(parent for parent in folder.parents if not is_taken(parent))
            where = "is" if folder == place else f"lies in {folder},"
            raise UserError(
                f"OUT {out}: {where} where train.py keeps checkpoints; give another folder, such "
                f"as {above / 'model'}"
            )
    if (source and resolve(source).is_relative_to(place)) or _holds_checkpoints(
        place / "checkpoints"
    ):
        raise UserError(
            f"OUT {out}: holds the checkpoints themselves; give a folder beside them, such as "
            f"{out / 'model'}"
        )


def _holds_checkpoints(folder: Path) -> bool:
    if STEP_FOLDER.fullmatch(folder.name):
        return True
    if folder.name != "checkpoints" or not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir()}
    return bool(names & {".lock", "latest"}) or any(map(STEP_FOLDER.fullmatch, names))


@command
def main() -> None:
    parser = Parser(
        prog="python -m cat_lm.export",
        description="Writes a training checkpoint as a transformers model folder.",
    )
    parser.add_argument(
        "checkpoint", type=path_name, help="run folder, checkpoints folder or step folder"
    )
    parser.add_argument(
        "out", type=output_path, help="folder to write; an earlier export there is replaced"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the file's tensors")
    parser.add_argument(
        "--method",
        default="none",
        help="reads longer contexts than trained on: pi, pi+temperature, yarn; without positions "
        "temperature (default: none)",
    )
    parser.add_argument(
        "--factor",
        type=number(SCALING_FACTOR),
        default=1.0,
        metavar="S",
        help="of the method, such as 4",
    )
    parser.add_argument("--temperature-scope", choices=("logits", "rotary"), default="logits")
    parser.add_argument(
        "--library",
        action="store_true",
        help="as transformers' own class of the family, which needs no "
        "cat_lm; for models without convolutions",
    )
    arguments = parser.parse_args()
    if (arguments.method == "none") != (arguments.factor == 1):
        raise UserError("--method and --factor: give both, such as --method yarn --factor 4")
    if arguments.temperature_scope != "logits" and arguments.method in ("none", "pi"):
        raise UserError(
            f"--temperature-scope {arguments.temperature_scope}: does nothing with --method "
            f"{arguments.method}, which has no temperature"
        )
    quiet_transformers()
    out = export_checkpoint(
        arguments.checkpoint,
        arguments.out,
        arguments.dtype,
        method=arguments.method,
        factor=arguments.factor,
        temperature_scope=arguments.temperature_scope,
        library=arguments.library,
    )
    record = read_record(out)
    print(f"{out}: {record.parameters:,} parameters in {record.dtype}, read back and equal")


if __name__ == "__main__":
    main()
