"""Transforms and a pattern of one's own, as a user would write them, for the tests of the registry.

Each is defined in two classes: the facts, and the module. None of them is in the project.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from cat_lm.model import attention
from cat_lm.model.attention import Pattern, ScoreTransform, ValueTransform
from cat_lm.model.attention.modules.scores import ScoreModule
from cat_lm.ops import head_conv


class LearnedDecay(ScoreTransform):
    """l − s_h (i − j), as ALiBi, with a learned slope for each head."""

    name, title, words, form = "decay", "learned decay", "learned decay", "additive"
    options = {"start": 0.1}  # noqa: RUF012

    def problems(self, model, options):
        start = options["start"]
        wrong = not isinstance(start, int | float) or start < 0
        return [f"score_options.start={start}: must be a number of at least 0"] if wrong else []

    def build(self, config, options):
        return DecayModule(config.num_attention_heads, options["start"])


class DecayModule(ScoreModule):
    no_decay = ("slopes",)

    def __init__(self, heads, start):
        super().__init__()
        self.heads, self.start = heads, start
        self.slopes = nn.Parameter(self.initial_values()["slopes"])

    def initial_values(self):
        return {"slopes": self.start * torch.arange(1.0, self.heads + 1)}

    def tensors(self):
        return (self.slopes,)

    @staticmethod
    def score(logits, query_position, key_position, head, slopes):
        return logits - slopes[head] * (query_position - key_position)


class SoftCap(ScoreTransform):
    """c tanh(l / c), times 1 + the part of even keys: a function of the logit itself."""

    name, title, form = "softcap", "capped scores", "elementwise"

    def build(self, config, options):
        return SoftCapModule()


class SoftCapModule(ScoreModule):
    @staticmethod
    def score(logits, query_position, key_position, head):
        return 2.0 * torch.tanh(logits / 2.0) * (1 + (key_position % 2) * 0.5)


class Fading(ScoreTransform):
    """l e^{−a_h (i − j)}: separable into a factor of the query and one of the key."""

    name, title, form = "fading", "fading scores", "separable"

    def build(self, config, options):
        return FadingModule(config.num_attention_heads)


class FadingModule(ScoreModule):
    no_decay = ("rates",)

    def __init__(self, heads):
        super().__init__()
        self.heads = heads
        self.rates = nn.Parameter(self.initial_values()["rates"])

    def initial_values(self):
        return {"rates": torch.linspace(0.01, 0.05, self.heads)}

    def tensors(self):
        return (self.rates,)

    @staticmethod
    def factors(position, head, rates):
        exponent = rates[head] * position
        return torch.exp(-exponent), torch.exp(exponent)


class Box(ValueTransform):
    """The mean of the last `width` values."""

    name, title, words = "box", "smoothed values", "box of values"
    options = {"width": 3}  # noqa: RUF012

    def holds_state(self, model):
        return self.resolved(model.value_options)["width"] > 1

    def build(self, config, options):
        return BoxModule(config.stream_heads("v"), options["width"])


class BoxModule(nn.Module):
    def __init__(self, heads, width):
        super().__init__()
        self.heads, self.width = heads, width

    def forward(self, value, context):
        value = context.without_padding(value)
        before = context.inputs_before("value", value, self.width)
        taps = value.new_full((self.heads, self.width), 1 / self.width)
        return head_conv(value, taps, document_ids=context.documents, initial_state=before)


class Sigmoid(Pattern):
    """sigmoid(q·k / sqrt(D) − ln of the keys seen) V: no softmax."""

    name, title, words = "sigmoid", "sigmoid attention", "sigmoid attention"
    implementations = ("eager", "sdpa")
    takes_transforms = False
    reads_positions = True
    options = {"offset": 0.5}  # noqa: RUF012

    def build(self, config):
        options = self.resolved(config.attention_options)
        return SigmoidCore(config.num_attention_heads, options["offset"])


class SigmoidCore(nn.Module):
    no_decay = ("offset",)

    def __init__(self, heads, offset):
        super().__init__()
        self.heads, self.start = heads, offset
        self.offset = nn.Parameter(self.initial_values()["offset"])

    def initial_values(self):
        return {"offset": torch.full((self.heads,), self.start)}

    def forward(self, query, key, value, extra, call):
        from cat_lm.model.attention.modules.call import visible_keys

        groups = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
        seen = (call.query_positions + 1)[:, None, :, None].to(query.dtype)
        scores = query @ key.mT * call.scaling - seen.log() + self.offset[:, None, None]
        weights = scores.sigmoid()
        if (visible := visible_keys(call.mask, query, key)) is not None:
            weights = weights * visible
        return (weights @ value).transpose(1, 2), weights


ENTRIES = (LearnedDecay(), SoftCap(), Fading(), Box(), Sigmoid())


def register_entries():
    """Registers those that are not."""
    for entry in ENTRIES:
        with contextlib.suppress(ValueError):
            attention.register(entry)


@contextlib.contextmanager
def registered_entries():
    """Registers all of them, and takes them away again."""
    register_entries()
    try:
        yield
    finally:
        for registry in attention.REGISTRIES.values():
            for entry in ENTRIES:
                registry._entries.pop(entry.name, None)


@pytest.fixture
def entries():
    """Registers all of them for a test."""
    with registered_entries():
        yield
