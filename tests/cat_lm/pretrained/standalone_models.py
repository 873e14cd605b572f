"""Computes what models of a folder give, each by the file beside its weights, without cat_lm.

    python standalone_models.py FOLDER

Writes FOLDER/found.pt: for each model folder, what `outputs` returns.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch


def outputs(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Compute logits, gradients and tokens of a fixed batch, with padding and documents."""
    tokens = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    documents = (torch.arange(17) > 5).long().expand(2, -1)
    model.eval().zero_grad()
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    found = {"loss": loss.detach()}
    learned = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    with torch.no_grad():
        found["gradient"] = torch.cat(learned)
        found["logits"] = model(tokens).logits
        found["padded"] = model(tokens, attention_mask=mask).logits[mask.bool()]
        found["documents"] = model(tokens, document_ids=documents).logits
        how: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
        found["generated"] = model.generate(tokens, attention_mask=mask, **how)
    return found


def main(folder: Path) -> None:
    sys.modules["cat_lm"] = None  # An import of it raises ImportError.
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    found = {}
    for path in sorted(part for part in folder.iterdir() if part.is_dir()):
        model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
        # What is saved and read again by its own file is the same model.
        model.save_pretrained(path / "again")
        again = AutoModelForCausalLM.from_pretrained(path / "again", trust_remote_code=True)
        found[path.name] = outputs(again)
    torch.save(found, folder / "found.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
