"""Check that the attention of a plugin reads no later tokens, in a transformer of one layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from cat_lm.core.causality import TIME, changed, check_causal
from cat_lm.core.plugins import is_own
from cat_lm.model import attention

# The parts of a configuration of which one layer needs little beside its attention.
_SMALL = {"num_hidden_layers": 1, "intermediate_size": 16, "vocab_size": 8}
_SMALL |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


def check_attention(body: nn.Module) -> None:
    """Check the plugins' pattern and transforms of a transformer's body; raise UserError."""
    config = body.config
    entries = attention.chosen_entries(config)
    foreign = {kind: entry for kind, entry in entries.items() if not is_own(entry)}
    names = sorted(("sdpa", "eager"), key=lambda name: name != config._attn_implementation)
    able = [name for name in names if not attention.implementation_problems(config, name)]
    is_computed = able and all(entry.computes_on_cpu for entry in foreign.values())
    if not (foreign and is_computed) or attention.length_problems(config, TIME):
        return
    named = " with ".join(attention.described(kind, config) for kind in foreign)
    small = changed(config, _SMALL | {"_attn_implementation": able[0]})
    shape = config.num_attention_heads, config.stream_heads("k"), config.head_width
    key = type(body), *map(id, foreign.values()), named, able[0], shape
    check_causal(named, key, partial(layer_of, type(body), small))


def layer_of(family: type[nn.Module], config: Any) -> tuple[nn.Module, Callable[..., Tensor], int]:
    """Return a transformer of one layer, what its attention's core returns for inputs, and C."""
    body = family(config).eval()
    body.initialize_weights()  # which is left out inside of `no_init_weights`
    seen: list[Any] = []
    core = next(module.core for module in body.modules() if hasattr(module, "core"))
    core.register_forward_hook(lambda module, given, output: seen.append(output[0]))

    def attend(x: Tensor, **how: Any) -> Tensor:
        attend.cache = body(inputs_embeds=x, **{"use_cache": False} | how).past_key_values
        return seen.pop()

    return body, attend, config.hidden_size
