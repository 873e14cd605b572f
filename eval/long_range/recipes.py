"""How each task is trained in the paper: its Table 9, and S4's code where the table is silent.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Recipe:
    """Fix a task's model and training.

    Attributes:
        layers, d_model, norm, norm_first, lr, batch_size, epochs, weight_decay: of Table 9.
        patience: epochs without a better validation after which the rate falls to a fifth; None: it
            never does.
        pool: what a class is read from, the mean over positions or the last one.
        feed_forward: whether layers have a network beside the mixer.
        width, bound: the paper's P and B.
    """

    layers: int
    d_model: int
    norm: str
    norm_first: bool
    lr: float
    batch_size: int
    epochs: int
    weight_decay: float
    patience: int | None
    pool: str
    width: int = 5
    bound: float = 1e-3
    feed_forward: bool = True

    def cell_options(self) -> dict[str, Any]:
        """Return what is a cell's, by its names."""
        names = ("layers", "d_model", "norm", "norm_first", "lr", "batch_size", "epochs")
        names += ("weight_decay", "patience", "pool", "feed_forward")
        return {name: getattr(self, name) for name in names}


_IMAGES = Recipe(6, 256, "layer", False, 1e-3, 50, 100, 0.01, 10, "mean", 3)
# DLR's (Gupta et al., 2022; `dss-sequence1d.yaml`): 12 epochs of 16,000 new rows, one rate for all
# of them, norms after what they belong to.
_ATOMIC = Recipe(2, 128, "layer", False, 1e-3, 64, 1, 0.0, None, "mean", 5, 1e-3, False)
# Not in Table 9: S4's for its own model.
_MNIST = Recipe(6, 256, "layer", False, 1e-3, 50, 100, 0.01, 10, "mean", 3)

RECIPES = {
    "listops": Recipe(6, 256, "batch", False, 1e-3, 50, 50, 0.01, 5, "mean"),
    "imdb": Recipe(4, 64, "batch", True, 1e-4, 50, 20, 0.0, 10, "last", 5, 1e-4),
    "aan": Recipe(6, 256, "batch", True, 2e-3, 64, 20, 0.0, 20, "mean"),
    "cifar10": _IMAGES,
    "pathfinder": Recipe(6, 256, "batch", True, 4e-3, 64, 100, 0.0, 10, "last", 3),
    "smnist": _MNIST,
    "pmnist": _MNIST,
    "select": _ATOMIC,
    "cumsum": _ATOMIC,
    "cummax": _ATOMIC,
}


def recipe_of(task: str) -> Recipe:
    """Return a task's recipe by the task's name; one that the paper does not have, ListOps'."""
    return RECIPES.get(task, RECIPES["listops"])
