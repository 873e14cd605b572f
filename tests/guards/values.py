"""Logits and gradients in fp64 of tiny models whose weights depend on parameters' names alone.

`python -m tests.guards.values OUT.json` measures; the guards start it as a command.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.guards.models import MODELS, pretrain_models
from tests.guards.processes import Command, Job, run_jobs

MODEL_TYPES = {"gpt_neox": "cat_neox"}
VOCABULARY, ROWS, LENGTH, PADDING, PREFIX, ELEMENTS = 61, 2, 37, 5, 30, 16


def measure(folder: Path) -> dict[str, Any]:
    """Return, by model, summaries of logits and of each gradient."""
    names = [*MODELS, *pretrain_models()]
    parts = [names[::2], names[1::2]]
    files = [folder / f"values_{number}.json" for number in range(len(parts))]

    def part(names: list[str], out: Path) -> Job:
        yield Command(["-m", "tests.guards.values", str(out), *names], out.with_suffix(".log"))

    run_jobs(part(*pair) for pair in zip(parts, files, strict=True))
    found: dict[str, Any] = {}
    for file in files:
        found |= json.loads(file.read_text())
    return {name: found[name] for name in names}


def measure_model(section: dict[str, Any]) -> dict[str, list[float] | str]:
    """Return the loss, and summaries of logits and of each parameter's gradient.

    The logits are those of whole rows, of left-padded rows, and of a prefix and single tokens with
    a cache.
    """
    import torch

    model = _build(section)
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=draw)
    mask = torch.ones_like(ids)
    mask[0, :PADDING] = 0
    loss = model.train()(input_ids=ids, labels=ids).loss
    loss.backward()
    model.eval()
    found = {
        "loss": [loss.item()],
        "logits": _elements(lambda: model(ids, use_cache=False).logits),
        "padded": _elements(lambda: model(ids, attention_mask=mask).logits[0, PADDING:]),
        "cached": _elements(lambda: _decode(model, ids)),
    }
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        found[name] = _summary(torch.zeros_like(parameter) if gradient is None else gradient)
    return found


def _decode(model: Any, ids: Any) -> Any:
    """Return the logits of `ids`, read as a prefix and then token by token."""
    import torch

    parts, cache = [ids[:, :PREFIX], *ids[:, PREFIX:].split(1, dim=1)], None
    logits = []
    for part in parts:
        output = model(part, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits.append(output.logits)
    return torch.cat(logits, dim=1)


def _build(section: dict[str, Any]) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import cat_lm  # noqa: F401 (registers the classes)

    fields = {key: value for key, value in section.items() if key != "architecture"}
    chosen = {key: fields.pop(key) for key in ("attn_implementation",) if key in fields}
    architecture = section["architecture"]
    fields |= {"vocab_size": VOCABULARY, "max_position_embeddings": 64}
    config = AutoConfig.for_model(MODEL_TYPES.get(architecture, f"cat_{architecture}"), **fields)
    model = AutoModelForCausalLM.from_config(config, **chosen).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
            parameter.copy_(_base(name, parameter) + 0.2 * _noise(parameter.shape, seed))
    return model


def _base(name: str, parameter: Any) -> float:
    """Return the mean of a parameter's values, which keeps norms, rates and gates in range."""
    if name.endswith(("A_log", "dt_bias", "log_decay")):
        return 0.3
    return 1.0 if parameter.dim() == 1 and "norm" in name.lower() else 0.0


def _elements(compute: Callable[[], Any]) -> list[float] | str:
    """Return the summary of a tensor and elements of it, or why it is refused."""
    import torch

    try:
        with torch.no_grad():
            tensor = compute().double()
    except (ValueError, NotImplementedError) as error:
        return f"refused: {type(error).__name__}"
    places = tensor.flatten()[:: tensor.numel() // ELEMENTS]
    return [*_summary(tensor), *map(_rounded, places.tolist())]


def _summary(tensor: Any) -> list[float]:
    """Return the norm, and the product with noise, in which every element counts."""

    flat = tensor.detach().double().flatten()
    return [_rounded(flat.norm().item()), _rounded((flat @ _noise(flat.shape, 7)).item())]


def _noise(shape: Any, seed: int) -> Any:
    """Return numbers of mean 0 and variance 1; whole ones are drawn alike by all processors."""
    import torch

    drawn = torch.randint(-1000, 1001, tuple(shape), generator=torch.Generator().manual_seed(seed))
    return drawn.double() * (3**0.5 / 1000)


def _rounded(number: float) -> float:
    """Return the number with the digits that a tolerance of 1e-10 needs."""
    return float(f"{number:.13g}")


def main() -> None:
    """Measure the named models and write their numbers."""
    out, *names = sys.argv[1:]
    models = MODELS | pretrain_models()
    Path(out).write_text(json.dumps({name: measure_model(models[name]) for name in names}))


if __name__ == "__main__":
    main()
