"""The model card of an export: the README.md that the Hub shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cat_lm import architectures
from cat_lm.pretrained import record

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Facts of an export's record, in the order of the card's table.
_LABELS = {
    "average": "averaged weights",
    "tokens": "training tokens",
    "step": "training steps",
    "context_length": "training context length",
    "precision": "training precision",
    "optimizer": "optimizer",
    "data": "data",
    "context_method": "extended beyond it by",
    "context_factor": "by a factor of",
}
_LIMITS = """\
- It is a base language model: it continues text, and it can repeat what is false, biased or
  offensive in its training data."""
_CONTEXT_LIMIT = "\n- It was trained on sequences of at most the context length above."
_CITATION = """\
```bibtex
@inproceedings{li2025cat,
  title     = {On the Power of Convolution Augmented Transformer},
  author    = {Li, Mingchen and Zhang, Xuechen and Huang, Yixiao and Oymak, Samet},
  booktitle = {AAAI Conference on Artificial Intelligence},
  year      = {2025},
  note      = {arXiv:2407.05591}
}
```"""


def model_card(
    config: PreTrainedConfig,
    facts: Mapping[str, Any],
    name: str,
    *,
    needs: str | None = None,
    is_carried: bool = False,
    license_id: str | None = None,
    language: str | None = None,
) -> str:
    """Write the card: what the model is, how it was trained, how to load it, what it cannot do.

    Args:
        facts: the export's record.
        needs: why the model cannot be loaded without cat_lm, if it cannot.
        is_carried: whether the folder has the model's own file (`cat_lm.pretrained.standalone`).
        license_id: the license identifier of the weights, as the Hub writes it.
        language: the language of the text, as the Hub writes it.
    """
    from huggingface_hub import ModelCardData

    family = architectures.of_config(config)
    is_own = config.model_type == family.model_type
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=[*(["cat"] if is_own else []), family.name],
        license=license_id,
        language=language,
        model_name=name,
        eval_results=_results(facts),
    )
    return f"""---
{data.to_yaml()}
---

# {name}

A {describe_model(config)}, trained with cat_lm.

{_table(config, facts)}

## Use

{_use(config, needs, is_carried)}
`config.json` holds the whole configuration, `{record.RECORD}` where the weights came from.

## Limits

{_LIMITS}{_CONTEXT_LIMIT if "context_length" in facts else ""}
{"" if license_id else "- The licence of the weights was not given; ask whoever trained them."}

## Citation

{_CITATION}
"""


def describe_model(config: PreTrainedConfig) -> str:
    """Describe a model, as in "GPT-NeoX language model (no convolution; RoPE)"."""
    family = architectures.of_config(config)
    return family.summary(architectures.section_of(config)).description


def _held_out(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of validation metrics, and their names on the card."""
    return {k: f"held-out {k[4:].replace('_', ' ')}" for k in facts if k.startswith("val_")}


def _results(facts: Mapping[str, Any]) -> list[Any] | None:
    """Return the held-out results as the Hub's model index has them."""
    from huggingface_hub import EvalResult

    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type="validation",
            dataset_name=f"held-out documents of {facts.get('data', 'the training data')}",
            metric_type=key.removeprefix("val_"),
            metric_value=round(facts[key], 4),
        )
        for key in _held_out(facts)
    ]
    return results or None


def _table(config: PreTrainedConfig, facts: Mapping[str, Any]) -> str:
    summary = architectures.of_config(config).summary(architectures.section_of(config))
    sizes = summary.sizes | {"vocabulary": config.vocab_size}
    rows = {
        "parameters": f"{facts['parameters']:,}",
        "shape": ", ".join(f"{size_name} {size:,}" for size_name, size in sizes.items()),
        "weights": f"{facts['dtype']}, sha256 `{facts['sha256'][:16]}…`",
    }
    for key, label in (_LABELS | _held_out(facts)).items():
        if key in facts:
            form = {int: ",", float: ".4f"}.get(type(facts[key]), "")
            rows[label] = f"{facts[key]:{form}}"
    lines = [f"| {key} | {value} |" for key, value in rows.items()]
    if _held_out(facts):
        note = "Held-out values are those of the last validation before the export"
        lines += ["", f"{note} (loss in nats per token)."]
    return "\n".join(["| | |", "|---|---|", *lines])


def _use(config: PreTrainedConfig, needs: str | None, is_carried: bool) -> str:
    family = architectures.of_config(config)
    package = "cat_lm" if config.model_type == family.model_type else family.library_import
    trust = ", trust_remote_code=True" if is_carried else ""
    registers = f"import {package}  # registers the architecture with transformers\n"
    first = registers if package and not is_carried else ""
    code = f"""\
```python
{first}from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "PATH/TO/THIS/FOLDER"  # or its name on the Hub
model = AutoModelForCausalLM.from_pretrained(folder{trust})
tokenizer = AutoTokenizer.from_pretrained(folder{trust})
inputs = tokenizer("Once", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))
```
"""
    if is_carried:
        return f"""\
The model's code lies in this folder and needs nothing but torch and transformers. Where cat_lm is
installed, `import cat_lm` takes the place of `trust_remote_code=True`, and its kernels are used.

{code}"""
    if needs:
        return f"This model needs the package cat_lm. (No file can replace it: {needs}.)\n\n{code}"
    return code
