"""`python -m cat_lm.export CHECKPOINT [OUT]`: a training checkpoint as a transformers folder.

CHECKPOINT is a run folder, its checkpoints folder, or one step folder; the newest complete step
is taken. OUT, by default the folder `model` of the run, gets config.json, model.safetensors,
generation_config.json, the tokenizer, the model's own file for machines without cat_lm, a model
card, and export.json (where the weights came from). The folder is written beside its name, read
back, compared with the model tensor by tensor, and only then renamed: OUT is never half an
export. `--push REPO` uploads it to the Hub. Needs neither DeepSpeed nor the data.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cat_lm import architectures
from cat_lm.core.cli import Parser, announce, number, output_path, path_name
from cat_lm.core.errors import UserError, command
from cat_lm.core.files import write_json, write_text
from cat_lm.core.folders import atomic_folder, check_output
from cat_lm.core.hub import explain_gated_access
from cat_lm.core.numbers import SCALING_FACTOR
from cat_lm.pretrained import loading, record, standalone
from cat_lm.pretrained.card import model_card
from cat_lm.pretrained.conversion import library_model, scaled_config, scaled_fields
from cat_lm.training.checkpoint import find_checkpoint, read_run_config, read_run_state
from cat_lm.training.checkpoint.files import candidates
from cat_lm.training.metrics import read_records

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from cat_lm.config import RunConfig


def export_checkpoint(
    checkpoint: Path | str,
    out: Path | str | None = None,
    dtype: str = "float32",
    *,
    method: str = "none",
    factor: float = 1.0,
    temperature_scope: str = "logits",
    library: bool = False,
    ema: bool = False,
    license_id: str | None = None,
    language: str | None = None,
) -> Path:
    """Write the newest complete checkpoint at `checkpoint` as the transformers folder `out`.

    By default `out` is the folder `model` of the run; with `ema`, which takes the averaged weights
    of `train.ema_decay`, it is `model_ema`.

    With a `method` of `cat_lm.pretrained.conversion`, the exported model reads contexts of `factor`
    times its training length, which then is its `max_position_embeddings`. With `library` it is
    transformers' own class, if that computes the same.

    Returns the path of `out`. Raises UserError where there is no complete checkpoint with its
    tokenizer or its averaged weights, where the method or the library's class does not exist for
    the model, or as `export_model`.
    """
    step_folder = find_checkpoint(checkpoint) if out is None else None
    name = "model_ema" if ema else "model"
    out = _check_replaceable(step_folder.parent.parent / name if out is None else out)
    step_folder = step_folder or find_checkpoint(checkpoint)
    facts = training_facts(step_folder)
    config = None
    if method != "none":
        config = loading.model_config(step_folder / "model")
        try:
            trained = facts["context_length"]
            fields = scaled_fields(config, method, factor, trained, temperature_scope)
            config = scaled_config(config, fields)
        except ValueError as error:
            raise UserError(f"--method {method} --factor {factor:g}: {error}") from None
        facts |= {"context_method": method, "context_factor": factor}
    model = loading.load_model(step_folder / "model", device="cpu", config=config)
    if ema or method != "none":
        # The metrics of the validation set are of the weights and positions of the last step.
        facts = {k: v for k, v in facts.items() if not k.startswith("val_")}
    if ema:
        facts["average"] = _load_average(model, step_folder)
    if library:
        model = library_model(model)
    tokenizer = loading.load_tokenizer(step_folder / "tokenizer")
    card = {"license_id": license_id, "language": language}
    return export_model(model, tokenizer, out, dtype=dtype, facts=facts, **card)


def _load_average(model: PreTrainedModel, step_folder: Path) -> str:
    """Copy a checkpoint's averaged weights into the model; return a description."""
    from cat_lm.training.checkpoint.callback_state import open_state, stored_states

    path = stored_states(step_folder).get("ema")
    if path is None:
        raise UserError(f"--ema: {step_folder} has no averaged weights; see train.ema_decay")
    with open_state(path) as averages:
        for name, parameter in model.named_parameters():
            if name not in averages or averages[name].shape != parameter.shape:
                raise UserError(f"{path}: does not hold {name} of {list(parameter.shape)}")
            parameter.data.copy_(averages[name])
    return f"over steps, decay {read_run_config(step_folder).train.ema_decay}"


def push(folder: Path, repository: str, private: bool = False) -> str:
    """Upload an export to a model repository of the Hub, and create the repository if needed.

    Returns the address of the repository. Raises UserError where the Hub refuses or cannot be
    reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    try:
        with explain_gated_access(repository, "model"):
            address = HfApi().create_repo(repository, private=private, exist_ok=True)
            HfApi().upload_folder(
                repo_id=address.repo_id, folder_path=folder, commit_message="Upload the model"
            )
    except (HFValidationError, HfHubHTTPError, LocalTokenNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"--push {repository}: {reason} (the export {folder} is whole)") from None
    return str(address)


def export_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    out: Path | str,
    *,
    dtype: str = "float32",
    facts: Mapping[str, Any] | None = None,
    license_id: str | None = None,
    language: str | None = None,
) -> Path:
    """Write `model` and `tokenizer` atomically as the transformers folder `out`, and verify it.

    Args:
        model: its parameters are cast to `dtype` in place.
        dtype: of the tensors in the file; a narrower one than the model's rounds to nearest.
        facts: what is known about the training (see `training_facts`), for the card and record.
        license_id, language: license of the weights and language of the text, as the Hub writes
            them.

    Raises:
        UserError: `out` holds something that is no earlier export, or the folder read back does
            not have exactly the model's tensors.
    """
    import torch
    from transformers import GenerationConfig

    out = _check_replaceable(out)
    loading.check_vocabulary(tokenizer, model.config)
    # Cast parameters only: buffers such as RoPE's frequencies stay in the precision they are built
    # in.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
    # A large weight may overflow in a narrow dtype.
    loading.refuse_non_finite(f"weights in {dtype}", dict(model.state_dict()))
    loading.begin_as_trained(tokenizer)
    # Generation ends at the end of a document, whatever the configuration's default.
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.generation_config = GenerationConfig(bos_token_id=end, eos_token_id=end, pad_token_id=pad)
    model.config.bos_token_id = model.config.eos_token_id = end
    own_file, needs = _own_file(model.config)
    with atomic_folder(out, record.listing) as folder:
        model.save_pretrained(folder, max_shard_size="1000GB")
        tokenizer.save_pretrained(folder)
        if own_file:
            write_text(folder / standalone.file_name(model.config), own_file)
        _verify(folder, model, dtype)
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        files = {str(path.relative_to(folder)): record.describe_file(path) for path in paths}
        written = {
            "format": 1,
            "program": record.PROGRAM,
            **(facts or {}),
            "dtype": dtype,
            "parameters": model.num_parameters(),
            "sha256": files[record.WEIGHTS]["sha256"],
        }
        card = model_card(
            model.config,
            written,
            loading.model_label(out),
            needs=needs,
            is_carried=own_file is not None,
            license_id=license_id,
            language=language,
        )
        write_text(folder / record.CARD, card)
        files[record.CARD] = record.describe_file(folder / record.CARD)
        write_json(folder / record.RECORD, written | {"files": files})
    return out


def _own_file(config: PreTrainedConfig) -> tuple[str | None, str | None]:
    """Assemble the single file with which a model runs without cat_lm, and name it in the
    configuration.

    Returns the file's text, or None and why there is none; neither for a class of transformers.
    """
    if config.model_type != architectures.of_config(config).model_type:
        return None, None
    try:
        text = standalone.source(config)
    except standalone.CannotAssemble as error:
        return None, str(error)
    config.auto_map = standalone.auto_map(config)
    return text, None


def training_facts(step_folder: Path) -> dict[str, Any]:
    """Collect the facts about the training from a checkpoint and its run. Raises UserError for
    damaged files.
    """
    state, config = read_run_state(step_folder), read_run_config(step_folder)
    facts = {
        "step": state.step,
        "tokens": state.tokens,
        "data_fingerprint": state.data.fingerprint,
        "code": state.code.model_dump(),
        "context_length": config.data.context_length,
        # The run's own configuration file holds the resolved value of `auto`.
        "precision": config.train.precision,
        "optimizer": _recipe(config),
        "data": ", ".join(sorted(Path(folder).name for folder in config.data.folders)),
    }
    metrics, validation = step_folder.parent.parent / "metrics.jsonl", {}
    for line in read_records(metrics) if metrics.is_file() else ():
        if "val_loss" in line and line["step"] <= state.step:
            validation = {k: line[k] for k in line if k.startswith("val_") and "/" not in k}
    return {key: value for key, value in (facts | validation).items() if value is not None}


_OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon with AdamW"}


def _recipe(config: RunConfig) -> str:
    """Describe in one line how a run's weights were trained."""
    how, batch = config.optimizer, config.train.global_batch_size * config.data.context_length
    return (
        f"{_OPTIMIZERS.get(how.name, how.name)}, learning rate {how.lr:g} ({how.schedule}), "
        f"betas {how.betas[0]:g} and {how.betas[1]:g}, "
        f"weight decay {how.weight_decay:g}, {batch:,} tokens a step"
    )


def _verify(folder: Path, model: PreTrainedModel, dtype: str) -> None:
    """Load the folder as a user would and compare every tensor with the model's."""
    import torch

    # load_model raises for missing and unexpected keys.
    read = loading.load_model(folder, dtype=dtype, device="cpu").state_dict()
    for name, tensor in model.state_dict().items():
        # A buffer is stored as it is, and cast by whoever loads it.
        if not torch.equal(tensor.cpu().to(read[name].dtype), read[name]):
            raise UserError(f"export {folder}: tensor {name} read back is not the one written")


def check_new(out: Path | str) -> Path:
    """Check early that `out` is, or can become, an empty folder. Raises UserError."""
    check_output(out, "OUT")
    out = Path(out)
    if out.exists() and any(out.iterdir()):
        raise UserError(f"OUT {out}: exists already and is not empty; give a new folder")
    return out


def _check_replaceable(out: Path | str) -> Path:
    """Check early that `out` is free, or is an earlier export whose files are unchanged."""
    out = Path(out)
    # If `out` is a link, the folder that it points to is written.
    check_output(os.path.realpath(out) if out.is_symlink() else out, "OUT")
    if out.is_dir() and any(out.iterdir()) and record.read_record(out) is None:
        raise UserError(f"OUT {out}: is not empty and no earlier export (by its {record.RECORD})")
    for path, problem in record.changed_files(out, lambda name: (out / name).is_file()):
        raise UserError(
            f"OUT {out}: {path.name} was changed since it was exported ({problem}) and would be "
            "lost; move the folder away or give another one"
        )
    return out


@command
def main() -> None:
    parser = Parser(
        prog="python -m cat_lm.export",
        description="Writes a training checkpoint as a transformers model folder.",
    )
    add = parser.add_argument
    add("checkpoint", type=path_name, help="run folder, checkpoints folder or step folder")
    out_help = "folder to write, where an earlier export is replaced (default: the run's `model`)"
    add("out", type=output_path, nargs="?", help=out_help)
    add(
        "--dtype",
        choices=loading.DTYPES,
        default="float32",
        help="dtype of the tensors in the file",
    )
    methods = "pi, pi+temperature, yarn, or without positions temperature (default: none)"
    add("--method", default="none", help=f"reads longer contexts than trained on: {methods}")
    number_of = number(SCALING_FACTOR)
    add("--factor", type=number_of, default=1.0, metavar="S", help="factor of --method, such as 4")
    scopes = "scale all logits, or the rotated channels alone (default: logits)"
    add("--temperature-scope", choices=("logits", "rotary"), default="logits", help=scopes)
    library = "transformers' own class of the family, for models without convolutions"
    add("--library", action="store_true", help=f"as {library}, which needs no cat_lm")
    add(
        "--ema",
        action="store_true",
        help="export the averaged weights of a run with train.ema_decay",
    )
    add(
        "--license",
        dest="license_id",
        metavar="ID",
        help="license of the weights, such as apache-2.0",
    )
    add("--language", metavar="CODE", help="language of the text, such as en")
    add(
        "--push",
        metavar="REPO",
        help="upload the folder to this repository of the Hub, as owner/name",
    )
    add("--private", action="store_true", help="make the repository private, if it is new")
    options = vars(parser.parse_args())
    repository, private = options.pop("push"), options.pop("private")
    if private and not repository:
        raise UserError("--private: says of which repository with --push REPO")
    method, scope = options["method"], options["temperature_scope"]
    if (method == "none") != (options["factor"] == 1):
        raise UserError("--method and --factor: give both, such as --method yarn --factor 4")
    if scope != "logits" and method in ("none", "pi"):
        raise UserError(f"--temperature-scope {scope}: does nothing with --method {method}")
    candidates(options["checkpoint"])
    announce(f"exporting the newest checkpoint of {options['checkpoint']}")
    loading.quiet_transformers()
    out = export_checkpoint(**options)
    written = record.read_record(out)
    print(f"{out}: {written.parameters:,} parameters in {written.dtype}, read back and equal")
    if repository:
        print(f"uploaded to {push(out, repository, private)}")


if __name__ == "__main__":
    main()
