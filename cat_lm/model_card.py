"""The model card of an export: what the model is, how it was trained, how to load it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cat_lm.export_record import RECORD


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
