"""Small models, checkpoints and finished runs for tests of export and evaluation.

Made without the engine: what is tested here is what comes after training.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cat_lm import architectures
from cat_lm.config import load_config
from cat_lm.core.files import write_json
from tests.checkpoints import STATE, seal
from tests.runs import run_values, write_config

CONTEXT = 32


def tiny_model(vocab_size: int, seed: int = 0, family: str = "gpt_neox", **changes: Any):
    """A CAT model of two layers, with weights and filters away from their initial values."""
    import torch

    kinds = architectures.get(family).classes()
    values = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": CONTEXT,
        "conv_type": "head",
        "conv_window": 4,
    }
    torch.manual_seed(seed)
    model = kinds.causal_lm(kinds.config(**values | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def checkpoint(run: Path, model: Any, tokenizer: Path, step: int = 12) -> Path:
    """A complete checkpoint of `model` in the run folder `run`, as the engine leaves it."""
    import shutil

    from safetensors.torch import save_file

    folder = run / "checkpoints" / f"step-{step:08d}"
    (folder / "model").mkdir(parents=True)
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "model/model.safetensors", {"format": "pt"})
    model.config.save_pretrained(folder / "model")
    shutil.copytree(tokenizer, folder / "tokenizer")
    data = tokenizer.parent
    config = write_config(run, run_values(data, run))
    load_config(config).save(folder / "run_config.yaml")
    data = {"path": None, "fingerprint": "f" * 64}
    state = STATE | {"step": step, "tokens": step * 8 * CONTEXT, "data": data}
    write_json(folder / "state.json", state)
    seal(folder)
    return folder


def finished_run(run: Path, data: Path, model: Any, **model_keys: Any) -> Path:
    """A run folder with configuration, metrics and export, as after training.

    Args:
        model_keys: beside those of `run_values`; of another family, all of them.
    """
    from cat_lm.export import export_model
    from cat_lm.pretrained.loading import load_tokenizer

    run.mkdir(parents=True)
    values = run_values(data, run)
    values["model"] = model_keys if "architecture" in model_keys else values["model"] | model_keys
    load_config(write_config(run, values)).save(run / "config.yaml")
    with open(run / "metrics.jsonl", "w", encoding="utf-8") as file:
        for record in metrics():
            file.write(json.dumps(record) + "\n")
    export_model(model, load_tokenizer(data / "tokenizer"), run / "model")
    return run


def metrics(steps: int = 12) -> list[dict[str, Any]]:
    """Records of a run whose loss falls from 6 nats; its fifth step was skipped."""
    records: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        tokens = step * 8 * CONTEXT
        speed = {"tokens_per_second": 1000.0 + step, "mfu": None, "step_seconds": 0.1}
        record = {"step": step, "tokens": tokens, "loss": 6.0 - 0.25 * step, "lr": 1e-3, **speed}
        records.append(record | ({"loss": None, "skipped": True} if step == 5 else {}))
        if step % 6 == 0:
            loss = 5.9 - 0.25 * step
            values = {"val_loss": loss, "val_perplexity": 2.0**loss, "val_bits_per_byte": loss / 3}
            records.append({"step": step, "tokens": tokens, **values})
    return records
