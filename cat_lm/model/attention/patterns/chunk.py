"""Attention within chunks of a fixed size (`attention: chunk`): linear in the row's length."""

from __future__ import annotations

from typing import Any, ClassVar

from cat_lm.core import numbers
from cat_lm.model.attention import Pattern, whole_problems
from cat_lm.model.rules import CHUNK_SIZE, chunk_size


class Chunk(Pattern):
    """Softmax over the keys of a query's own chunk, up to itself.

    Chunk n of a document holds its tokens n·size … (n + 1)·size − 1, as LaS-chunk's and that of
    Ma et al. (Mega, 2022).
    """

    name = "chunk"
    title = words = "attention inside chunks"
    implementations = ("eager", "sdpa")
    reads_positions = True
    takes_any_weights = True
    divides = True  # Heads are independent.
    options: ClassVar[dict[str, Any]] = {"size": CHUNK_SIZE}

    def problems(self, model: Any, options: dict[str, Any]) -> list[str]:
        return whole_problems("attention_options.size", options["size"], numbers.CONTEXT)

    def length_problems(self, model: Any, length: int) -> list[str]:
        size = chunk_size(model)
        if size <= length:
            return []
        return [
            f"attention_options.size={size}: is beyond data.context_length={length}; use "
            "attention=softmax"
        ]

    def mask(self, config: Any, **inputs: Any) -> Any:
        """Return a causal mask for eager, after a cache, and with padding between tokens.

        Without one the module reads documents and padding, and holds no mask of [T, T].
        """
        import torch

        from cat_lm.model.cache import follows_cache
        from cat_lm.ops.landmark.layout import interior_padding

        given = inputs.get("attention_mask")
        starts = not follows_cache(inputs.get("past_key_values"), 0)
        if starts and config._attn_implementation == "sdpa":
            if given is None:
                return None
            is_read = given.ndim == 2 and not torch.compiler.is_compiling()
            if is_read and not interior_padding(given.bool(), None).any():
                return None
        return super().mask(config, **inputs)

    def build(self, config: Any) -> Any:
        from cat_lm.model.attention.modules.chunk import ChunkCore

        return ChunkCore(chunk_size(config), config)


ENTRY = Chunk()
