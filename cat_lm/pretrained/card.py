"""The model card of an export: what the model is, how it was trained, how to load it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cat_lm import architectures
from cat_lm.pretrained.record import RECORD

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def model_card(config: PreTrainedConfig, record: Mapping[str, Any], name: str) -> str:
    """The README.md of an exported model: what it is, how it was trained, how to load it."""
    architecture = architectures.of_config(config)
    sizes = architecture.sizes(architecture.section(config)) | {"vocabulary": config.vocab_size}
    rows = {
        "parameters": f"{record['parameters']:,}",
        "shape": ", ".join(f"{name} {size:,}" for name, size in sizes.items()),
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
    is_own = config.model_type == architecture.model_type
    tags = [*(["cat"] if is_own else []), architecture.name]
    package = "cat_lm" if is_own else architecture.library_import
    registers = f"import {package}  # registers the architecture with transformers\n"
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [{", ".join(tags)}]
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

`config.json` holds the whole configuration, `{RECORD}` where the weights came from.
"""


def _shown(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


def describe_model(config: PreTrainedConfig) -> str:
    """A model in a few words, as in "GPT-NeoX language model (no convolution; RoPE)"."""
    architecture = architectures.of_config(config)
    return architecture.describe(architecture.section(config))
