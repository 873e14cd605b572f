"""`python -m cat_lm.export CHECKPOINT OUT`: a training checkpoint as a transformers folder.

CHECKPOINT is a run folder, its checkpoints folder, or one step folder; the newest complete step
is taken. OUT gets config.json, model.safetensors, generation_config.json, the tokenizer, a model
card, and export.json (where the weights came from). The folder is written beside its name, read
back, compared with the model tensor by tensor, and only then renamed: OUT is never half an
export. Needs neither DeepSpeed nor the data.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cat_lm.errors import UserError, command
from cat_lm.io.checksums import sha256
from cat_lm.io.files import write_json, write_text
from cat_lm.io.folders import replaced_folder
from cat_lm.pretrained import (
    DTYPES,
    load_model,
    load_tokenizer,
    model_config,
    quiet_transformers,
)

if TYPE_CHECKING:
    import torch
    from transformers import (
        GenerationConfig,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )

RECORD = "export.json"


def export_checkpoint(
    checkpoint: Path | str,
    out: Path | str,
    dtype: str = "float32",
    *,
    method: str = "none",
    factor: float = 1.0,
    temperature_scope: str = "logits",
) -> Path:
    """Writes the newest complete checkpoint at `checkpoint` as the transformers folder `out`.

    With a `method` of `cat_lm.model.rope_scaling`, the exported model reads contexts of `factor`
    times its training length, which then is its `max_position_embeddings`.

    Returns the path of `out`. Raises UserError where there is no complete checkpoint, where it
    lacks its tokenizer, where `out` holds something else, where the export read back differs, or
    where the method does not exist for the model.
    """
    from cat_lm.training.checkpoint import find_checkpoint

    _refuse_foreign(Path(out))
    step_folder = find_checkpoint(checkpoint)
    facts = training_facts(step_folder)
    config = None
    if method != "none":
        config = model_config(step_folder / "model")
        facts.setdefault("context_length", config.max_position_embeddings)
        trained = facts["context_length"]
        config = _scaled_config(config, method, factor, trained, temperature_scope)
        facts |= {"context_method": method, "context_factor": factor}
    model = load_model(step_folder / "model", device="cpu", config=config)
    tokenizer = load_tokenizer(step_folder / "tokenizer")
    return export_model(model, tokenizer, out, dtype=dtype, facts=facts)


def _scaled_config(
    config: PreTrainedConfig, method: str, factor: float, training_length: int, scope: str
) -> PreTrainedConfig:
    from cat_lm.model.rope_scaling import scaled_config, scaled_fields

    try:
        fields = scaled_fields(config, method, factor, training_length, scope)
    except ValueError as error:
        raise UserError(f"--method {method} --factor {factor:g}: {error}") from None
    return scaled_config(config, fields)


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

    out = Path(out)
    _refuse_foreign(out)
    if len(tokenizer) > model.config.vocab_size:
        raise UserError(
            f"tokenizer has {len(tokenizer)} entries, the model {model.config.vocab_size}: "
            "it is not the one the model was trained with"
        )
    # Parameters only: buffers such as RoPE's frequencies stay in the precision they are made in.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
    # What stood before every document in training is what evaluations should put before a text; a
    # start token of the tokenizer's own (Mistral's <s>) was never seen.
    tokenizer.bos_token = tokenizer.eos_token
    model.generation_config = _generation_config(model, tokenizer)
    facts = dict(facts or {})
    with replaced_folder(out) as folder:
        model.save_pretrained(folder, max_shard_size="1000GB")
        tokenizer.save_pretrained(folder)
        _verify(folder, model, dtype)
        record = facts | {
            "dtype": dtype,
            "parameters": model.num_parameters(),
            "sha256": sha256(folder / "model.safetensors"),
        }
        write_text(folder / "README.md", model_card(model.config.to_dict(), record, _title(out)))
        write_json(folder / RECORD, record)
    return out


def training_facts(step_folder: Path) -> dict[str, Any]:
    """What the checkpoint and its run know about the training: step, tokens, context, loss."""
    state = json.loads((step_folder / "state.json").read_text(encoding="utf-8"))
    facts = {
        "step": state["step"],
        "tokens": state["tokens"],
        "data_fingerprint": state.get("data", {}).get("fingerprint"),
        "code": state.get("code"),
    }
    run_config = step_folder / "run_config.yaml"
    if run_config.is_file():
        import yaml

        data = yaml.safe_load(run_config.read_text(encoding="utf-8")).get("data", {})
        facts["context_length"] = data.get("context_length")
    facts |= _last_validation(step_folder.parent.parent / "metrics.jsonl", state["step"])
    return {key: value for key, value in facts.items() if value is not None}


def _last_validation(metrics: Path, step: int) -> dict[str, float]:
    """The newest validation at or before `step`; empty where there was none."""
    found: dict[str, float] = {}
    if metrics.is_file():
        for line in metrics.read_text(encoding="utf-8").splitlines():
            # A line cut short by a kill is not evidence of anything.
            values = json.loads(line) if line.endswith("}") else {}
            if "val_loss" in values and values["step"] <= step:
                found = {k: v for k, v in values.items() if k.startswith("val_")}
    return found


def model_card(config: Mapping[str, Any], record: Mapping[str, Any], name: str) -> str:
    """The README.md of an exported model: what it is, how it was trained, how to load it."""
    kind = describe_model(config)
    rows = {
        "parameters": f"{record['parameters']:,}",
        "shape": f"{config['num_hidden_layers']} layers of width {config['hidden_size']} with "
        f"{config['num_attention_heads']} heads, vocabulary {config['vocab_size']:,}",
        "weights": f"{record['dtype']}, sha256 `{record['sha256'][:16]}…`",
    }
    labels = {"tokens": "training tokens", "step": "training steps"}
    labels |= {"context_length": "training context length"}
    labels |= {"context_method": "read beyond it by", "context_factor": "by a factor of"}
    labels |= {key: f"held-out {key[4:].replace('_', ' ')}" for key in record if key[:4] == "val_"}
    for key, label in labels.items():
        if key in record:
            value = record[key]
            rows[label] = _shown(value)
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [cat, gpt_neox]
---

# {name}

A {kind}, trained with cat_lm.

| | |
|---|---|
{table}

Held-out values are those of the last validation before the export (loss in nats per token).

## Use

```python
import cat_lm  # registers the architecture with transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH/TO/THIS/FOLDER")
tokenizer = AutoTokenizer.from_pretrained("PATH/TO/THIS/FOLDER")
inputs = tokenizer("Once", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))
```

`config.json` holds the whole configuration, `{RECORD}` where the weights came from.
"""


def _shown(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


def _title(out: Path) -> str:
    """The folder's name, or the run's for RUN/model."""
    out = out.resolve()
    return out.parent.name if out.name == "model" else out.name


def describe_model(config: Mapping[str, Any]) -> str:
    """A configuration in a few words, as in "CAT language model (head convolution, W=21, …)"."""
    positions = {"none": "no position embedding", "rope": "rotary positions"}[
        config.get("position_embedding", "rope")
    ]
    conv_type = config.get("conv_type", "none")
    if conv_type == "none":
        return f"GPT-NeoX (Pythia) language model with {positions}"
    streams = ", ".join(config["conv_streams"])
    details = ""
    if config.get("conv_mixing", "embeddings") == "maps":
        details += ", mixing attention maps in place of values"
    if config.get("conv_activation", "none") != "none":
        details += f", then {config['conv_activation']}"
    return (
        f"convolution-augmented (CAT) GPT-NeoX language model: {conv_type} convolution of "
        f"{streams} with window {config['conv_window']}{details}, {positions}"
    )


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
    """Reads the folder as a user would and compares every tensor bit by bit."""
    import torch

    # load_model raises for missing and unexpected keys.
    read = _tensors(load_model(folder, dtype=dtype, device="cpu"))
    written = _tensors(model)
    if read.keys() != written.keys():
        names = sorted(read.keys() ^ written.keys())
        raise UserError(f"export {folder}: tensors differ from the checkpoint's: {names[:3]}")
    for name, tensor in written.items():
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


def _refuse_foreign(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"OUT {out}: is a file; give a new folder or an earlier export")
    if out.is_dir() and any(out.iterdir()) and not (out / RECORD).is_file():
        raise UserError(f"OUT {out}: is not empty and no earlier export (it has no {RECORD})")


@command
def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m cat_lm.export",
        description="Writes a training checkpoint as a transformers model folder.",
    )
    parser.add_argument("checkpoint", help="run folder, checkpoints folder or step folder")
    parser.add_argument("out", help="folder to write; an earlier export there is replaced")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the file's tensors")
    parser.add_argument(
        "--method",
        default="none",
        help="reads longer contexts than trained on: pi, pi+temperature, yarn; without positions "
        "temperature (default: none)",
    )
    parser.add_argument(
        "--factor", type=float, default=1.0, metavar="S", help="of the method, such as 4"
    )
    parser.add_argument("--temperature-scope", choices=("logits", "rotary"), default="logits")
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
    )
    record = json.loads((out / RECORD).read_text(encoding="utf-8"))
    print(f"{out}: {record['parameters']:,} parameters in {record['dtype']}, read back and equal")


if __name__ == "__main__":
    main()
