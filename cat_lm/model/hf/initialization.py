"""Initial weights of models with attention: GPT-NeoX's small-init and wang-init, and the filters.

C is the model width, L the number of layers, W the window, H the number of heads:

| parameter                                    | distribution                | name       |
|----------------------------------------------|-----------------------------|------------|
| embed_in, query_key_value, dense_h_to_4h,    | normal, std sqrt(2 / (5 C)) | small-init |
| lm_head; of Llama embed_tokens, q_proj,      |                             |            |
| k_proj, v_proj, gate_proj, up_proj, lm_head  |                             |            |
| attention.dense, mlp.dense_4h_to_h; of Llama | normal, std 2 / (L sqrt(C)) | wang-init  |
| o_proj, down_proj                            |                             |            |
| biases                                       | 0                           |            |
| norms                                        | weight 1, bias 0            |            |
| filters, `conv_init: identity`               | 1 at lag 0, 0 elsewhere     |            |
|                                              | (of the same head, channel) |            |
| filters, `conv_init: uniform`                | uniform in ±1 / sqrt(W),    |            |
|                                              | multihead ±1 / sqrt(W H)    |            |
| filters, `conv_init: residual`               | identity + uniform          |            |
| long filters: coefficients and lag 0         | as above, W being N         |            |
| long filters: rates, turns                   | `cat_lm.ops.long_filter`    |            |
| filters of ranks beyond the first           | q: 1/64 at a lag of their   |            |
|                                              | own, k: 0                   |            |
| Canon filters, `canon_init: uniform`         | uniform in ±1 / sqrt(W)     |            |
| Canon filters, `canon_init: zero`            | 0                           |            |

Small-init is Nguyen and Salazar's (2019), wang-init Wang and Komatsuzaki's (GPT-J), both as
GPT-NeoX uses them for Pythia; GPT-NeoX and Llama both start so. Recurrent families start as in
their libraries, see `cat_lm.model.hf.recurrent`: from a standard deviation of 0.02 at any width,
which small-init is at a width of 1,000. For equal starts at another, `initializer_range` is set to
sqrt(2 / (5 C)), as in configs/study; what writes to the residual stream starts in their own ways.
`uniform` is what `torch.nn.Conv1d` would draw; `residual` is where a Canon layer in the place of
the convolution would start.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import nn
from transformers import initialization as init

from cat_lm.model.streams.pipeline import StreamPipeline
from cat_lm.model.streams.short_convolution import CanonLayer

if TYPE_CHECKING:
    from cat_lm.model.attention.settings import AttentionSettings


def small_init_std(config: AttentionSettings) -> float:
    """The standard deviation of weights that do not write to the residual stream."""
    return math.sqrt(2 / (5 * config.hidden_size))


def wang_init_std(config: AttentionSettings) -> float:
    """The standard deviation of the two matrices of a layer that write to the residual stream."""
    return 2 / (config.num_hidden_layers * math.sqrt(config.hidden_size))


def initialize(module: nn.Module, config: AttentionSettings) -> bool:
    """Initialises the parameters of `module` itself by the table above; False if it has none there.

    Goes through transformers' `initialization`, which leaves tensors alone that were loaded. What a
    module gives in `initial_values` comes afterwards (`cat_lm.model.hf.starts`).
    """
    if isinstance(module, nn.Linear | nn.Embedding):
        writes_residual = getattr(module, "writes_residual", False)
        std = wang_init_std(config) if writes_residual else small_init_std(config)
        init.normal_(module.weight, mean=0.0, std=std)
        if getattr(module, "bias", None) is not None:
            init.zeros_(module.bias)
        return True
    if isinstance(module, StreamPipeline):
        for bias in module.biases():
            init.zeros_(bias)
        _initialize_filters(module)
        return True
    if isinstance(module, CanonLayer):
        if config.canon_init == "zero":
            init.zeros_(module.canon_filter)
        else:
            bound = 1 / math.sqrt(config.canon_window)
            init.uniform_(module.canon_filter, -bound, bound)
        return True
    return False


def _initialize_filters(pipeline: StreamPipeline) -> None:
    for stream, filters in pipeline.filters().items():
        init.copy_(filters, pipeline.filter.drawn(stream))
    for ranks in pipeline.ranks:
        for stream in "qk":
            init.copy_(getattr(pipeline, f"{stream}_{ranks.name}"), ranks.initial(stream))
