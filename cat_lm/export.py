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

from cat_lm import architectures
from cat_lm.core.cli import Parser, number, output_path, path_name
from cat_lm.core.errors import UserError, command
from cat_lm.core.files import write_json, write_text
from cat_lm.core.folders import atomic_folder, check_output
from cat_lm.core.numbers import SCALING_FACTOR
from cat_lm.pretrained import loading, record
from cat_lm.pretrained.conversion import library_model, scaled_config, scaled_fields
from cat_lm.training.checkpoint import find_checkpoint, read_run_config, read_run_state
from cat_lm.training.metrics import read_records

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


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
    """Write the newest complete checkpoint at `checkpoint` as the transformers folder `out`.

    With a `method` of `cat_lm.pretrained.conversion`, the exported model reads contexts of `factor`
    times its training length, which then is its `max_position_embeddings`. With `library` it is
    transformers' own class, if that computes the same.

    Returns the path of `out`. Raises UserError where there is no complete checkpoint with its
    tokenizer, where the method or the library's class does not exist for the model, or as
    `export_model`.
    """
    out = _check_replaceable(out)
    step_folder = find_checkpoint(checkpoint)
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
    if library:
        model = library_model(model)
    tokenizer = loading.load_tokenizer(step_folder / "tokenizer")
    return export_model(model, tokenizer, out, dtype=dtype, facts=facts)


def export_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    out: Path | str,
    *,
    dtype: str = "float32",
    facts: Mapping[str, Any] | None = None,
) -> Path:
    """Write `model` and `tokenizer` as the transformers folder `out`, verified and all at once.

    Args:
        model: its parameters are cast to `dtype` in place.
        dtype: of the tensors in the file; a narrower one than the model's rounds to nearest.
        facts: what is known about the training (see `training_facts`), for the card and record.

    Raises:
        UserError: `out` holds something that is no earlier export, or the folder read back does
            not have exactly the model's tensors.
    """
    import torch
    from transformers import GenerationConfig

    out = _check_replaceable(out)
    loading.check_vocabulary(tokenizer, model.config)
    # Parameters only: buffers such as RoPE's frequencies stay in the precision they are made in.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
    # A narrow dtype may have no room for a large weight.
    loading.refuse_non_finite(f"weights in {dtype}", dict(model.state_dict()))
    # What stood before every document in training is what evaluations should put before a text; a
    # start token of the tokenizer's own (Mistral's <s>) was never seen.
    tokenizer.bos_token = tokenizer.eos_token
    # Generation ends at the end of a document, whatever the configuration's default.
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.generation_config = GenerationConfig(
        bos_token_id=end, eos_token_id=end, pad_token_id=end if pad is None else pad
    )
    model.config.bos_token_id = model.config.eos_token_id = end
    with atomic_folder(out, record.listing) as folder:
        model.save_pretrained(folder, max_shard_size="1000GB")
        tokenizer.save_pretrained(folder)
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
        write_text(
            folder / record.CARD, model_card(model.config, written, loading.model_label(out))
        )
        files[record.CARD] = record.describe_file(folder / record.CARD)
        write_json(folder / record.RECORD, written | {"files": files})
    return out


def training_facts(step_folder: Path) -> dict[str, Any]:
    """Gather what checkpoint and run know of the training. Raises UserError for damaged files."""
    state, config = read_run_state(step_folder), read_run_config(step_folder)
    facts = {
        "step": state.step,
        "tokens": state.tokens,
        "data_fingerprint": state.data.fingerprint,
        "code": state.code.model_dump(),
        "context_length": config.data.context_length,
        "precision": config.train.precision,  # a run's own file holds what auto came to
    }
    metrics, validation = step_folder.parent.parent / "metrics.jsonl", {}
    for line in read_records(metrics) if metrics.is_file() else ():
        if "val_loss" in line and line["step"] <= state.step:
            validation = {k: v for k, v in line.items() if k.startswith("val_")}
    return {key: value for key, value in (facts | validation).items() if value is not None}


def _verify(folder: Path, model: PreTrainedModel, dtype: str) -> None:
    """Read the folder as a user would, as a rule from the page cache, and compare every tensor."""
    import torch

    # load_model raises for missing and unexpected keys.
    read = loading.load_model(folder, dtype=dtype, device="cpu").state_dict()
    for name, tensor in model.state_dict().items():
        # A buffer is stored as it is, and cast by whoever loads it.
        if not torch.equal(tensor.cpu().to(read[name].dtype), read[name]):
            raise UserError(f"export {folder}: tensor {name} read back is not the one written")


def check_new(out: Path | str) -> Path:
    """Check, before any work, that `out` can be a folder and holds nothing. Raises UserError."""
    check_output(out, "OUT")
    out = Path(out)
    if out.exists() and any(out.iterdir()):
        raise UserError(f"OUT {out}: exists already and is not empty; give a new folder")
    return out


def _check_replaceable(out: Path | str) -> Path:
    """Check, before any work, that `out` is free, or an earlier export as it was written."""
    out = Path(out)
    # Of a link, the folder that it points to is made.
    check_output(os.path.realpath(out) if out.is_symlink() else out, "OUT")
    if out.is_dir() and any(out.iterdir()) and record.read_record(out) is None:
        raise UserError(f"OUT {out}: is not empty and no earlier export (by its {record.RECORD})")
    for path, problem in record.changed_files(out, lambda name: (out / name).is_file()):
        raise UserError(
            f"OUT {out}: {path.name} was changed since it was exported ({problem}) and would be "
            "lost; move the folder away or give another one"
        )
    return out


# The model card

_LABELS = {
    "tokens": "training tokens",
    "step": "training steps",
    "context_length": "training context length",
    "context_method": "read beyond it by",
    "context_factor": "by a factor of",
}


def model_card(config: PreTrainedConfig, facts: Mapping[str, Any], name: str) -> str:
    """Write the README.md of an export: what it is, how it was trained, how to load it."""
    family = architectures.of_config(config)
    sizes = family.summary(architectures.section_of(config)).sizes | {
        "vocabulary": config.vocab_size
    }
    rows = {
        "parameters": f"{facts['parameters']:,}",
        "shape": ", ".join(f"{name} {size:,}" for name, size in sizes.items()),
        "weights": f"{facts['dtype']}, sha256 `{facts['sha256'][:16]}…`",
    }
    held_out = {k: f"held-out {k[4:].replace('_', ' ')}" for k in facts if k[:4] == "val_"}
    for key, label in (_LABELS | held_out).items():
        if key in facts:
            value = facts[key]
            form = {int: ",", float: ".4f"}.get(type(value), "")
            rows[label] = f"{value:{form}}"
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    is_own = config.model_type == family.model_type
    package = "cat_lm" if is_own else family.library_import
    registers = f"import {package}  # registers the architecture with transformers\n"
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [{", ".join([*(["cat"] if is_own else []), family.name])}]
---

# {name}

A {describe_model(config)}, trained with cat_lm.

| | |
|---|---|
{table}

Held-out values are those of the last validation before the export (loss in nats per token).

## Use

```python
{registers if package else ""}from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH/TO/THIS/FOLDER")
tokenizer = AutoTokenizer.from_pretrained("PATH/TO/THIS/FOLDER")
inputs = tokenizer("Once", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))
```

`config.json` holds the whole configuration, `{record.RECORD}` where the weights came from.
"""


def describe_model(config: PreTrainedConfig) -> str:
    """Describe a model, as in "GPT-NeoX language model (no convolution; RoPE)"."""
    family = architectures.of_config(config)
    return family.summary(architectures.section_of(config)).description


@command
def main() -> None:
    parser = Parser(
        prog="python -m cat_lm.export",
        description="Writes a training checkpoint as a transformers model folder.",
    )
    add = parser.add_argument
    add("checkpoint", type=path_name, help="run folder, checkpoints folder or step folder")
    add("out", type=output_path, help="folder to write; an earlier export there is replaced")
    add("--dtype", choices=loading.DTYPES, default="float32", help="of the file's tensors")
    methods = "pi, pi+temperature, yarn, or without positions temperature (default: none)"
    add("--method", default="none", help=f"reads longer contexts than trained on: {methods}")
    number_of = number(SCALING_FACTOR)
    add("--factor", type=number_of, default=1.0, metavar="S", help="of the method, such as 4")
    add("--temperature-scope", choices=("logits", "rotary"), default="logits")
    library = "transformers' own class of the family, for models without convolutions"
    add("--library", action="store_true", help=f"as {library}, which needs no cat_lm")
    options = vars(parser.parse_args())
    method, scope = options["method"], options["temperature_scope"]
    if (method == "none") != (options["factor"] == 1):
        raise UserError("--method and --factor: give both, such as --method yarn --factor 4")
    if scope != "logits" and method in ("none", "pi"):
        raise UserError(f"--temperature-scope {scope}: does nothing with --method {method}")
    loading.quiet_transformers()
    out = export_checkpoint(**options)
    written = record.read_record(out)
    print(f"{out}: {written.parameters:,} parameters in {written.dtype}, read back and equal")


if __name__ == "__main__":
    main()
