"""Convolution-augmented transformer language models.

After `import cat_lm`, transformers' Auto classes know the models of all architectures, whichever of
the two packages is imported first. The import itself loads neither torch nor transformers.
"""

# Before all others, even __future__: they too may lie in the working directory.
import cat_lm.core.working_directory  # noqa: F401

# isort: split
from typing import TYPE_CHECKING, Any

from cat_lm import _auto
from cat_lm.core import __version__

if TYPE_CHECKING:
    from cat_lm.model import CatConfig, CatForCausalLM

__all__ = ["CatConfig", "CatForCausalLM", "__version__"]

_auto.install()


def __getattr__(name: str) -> Any:
    if name in ("CatConfig", "CatForCausalLM"):
        import cat_lm.model

        return getattr(cat_lm.model, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
