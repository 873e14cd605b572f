"""Attention to the blocks of keys that their landmarks select (Landmark CAT)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from cat_lm.core.numbers import CONV_STATE
from cat_lm.model.attention import OWN_WEIGHT, Objective, Pattern, whole_problems
from cat_lm.model.rules import head_width
from cat_lm.ops.landmark.options import (
    CALIBRATE,
    DENSE,
    FILTERS,
    TAUGHT,
    USUAL_ROWS,
    value_problems,
)
from cat_lm.ops.long_filter import filters

if TYPE_CHECKING:
    import torch


def filter_names() -> tuple[str, ...]:
    """List the filters: short ones, and long ones with `filter_state`."""
    return tuple(dict.fromkeys((*FILTERS, *filters.names())))


class Landmark(Pattern):
    """softmax(q Kᵀ / (t sqrt(D))) V over the keys near the query and those of `top_k` blocks.

    A complete block of `block` tokens has a landmark, its keys' sum by a filter (`filter`); the
    blocks whose landmarks have the highest products with the query are attended to, beside the
    query's own block and those before it (`local` together). See
    `cat_lm.model.attention.modules.landmark`.
    """

    name = "landmark"
    title = "landmark attention"
    words = "landmark attention"
    implementations = ("eager", "sdpa")
    takes_transforms = False
    masks_keys = True
    takes_any_weights = True
    options: ClassVar[dict[str, Any]] = {
        "block": 64,
        "top_k": 8,
        "local": 2,
        "sink": False,
        "filter": "box",
        "filter_state": 0,
        "share": "head",
    }
    free_options = frozenset(options)

    def objective(self, train: Any) -> Objective:
        way = train.landmark_loss
        # SDPA computes this, whatever computes the selected blocks.
        dense = {"attention_options": None, "attention": "softmax", "attn_implementation": "sdpa"}
        return Objective(
            "landmark_loss",
            token_weight=0.0 if way == CALIBRATE else 1.0,
            own_weight=train.landmark_weight or OWN_WEIGHT,
            trains_all=way != CALIBRATE,
            section=dense if way in DENSE else {},
            said=f"train.landmark_loss={way}",
        )

    def prepare(self, model: Any, train: Any) -> None:
        from cat_lm.model.attention.modules.landmark import train_landmarks

        train_landmarks(model, train.landmark_loss, train.landmark_rows or USUAL_ROWS)

    def objective_problems(self, config: Any) -> list[str]:
        train, loss = config.train, config.train.landmark_loss
        way, errors = f"train.landmark_loss={loss}", []
        for key, ways in (("landmark_weight", ("guided",)), ("landmark_rows", TAUGHT)):
            value = getattr(train, key)
            if value is not None and loss not in ways:
                only = f"says nothing with {way}; only with {' and '.join(ways)}"
                errors.append(f"train.{key}={value}: {only}")
        if getattr(config.model, "attention", None) != self.name:
            needs = [f"{way}: needs model.attention=landmark"]
            return errors + (needs if loss != "hard" else [])
        given = config.model.attention_options
        options = self.resolved(given if isinstance(given, dict) else {})
        if loss in TAUGHT and options["top_k"] == 0:
            errors.append(f"{way}: says nothing with model.attention_options.top_k=0")
        learns = bool(options["filter"] == "learned" or options["filter_state"])
        if learns and loss not in TAUGHT:
            problem = (
                "gives the landmarks' parameters no gradient; use guided, or "
                "attention_options.filter=box"
            )
            errors.append(f"{way}: {problem}")
        if loss == CALIBRATE and not learns:
            problem = "a fixed filter learns nothing; use attention_options.filter=learned"
            errors.append(f"{way}: {problem}")
        if loss == CALIBRATE and train.init_from is None:
            problem = "changes nothing but landmarks; give the model as train.init_from"
            errors.append(f"{way}: {problem}")
        decay = config.optimizer.weight_decay
        if loss == CALIBRATE and decay:
            problem = f"optimizer.weight_decay={decay} would change the other weights; set it to 0"
            errors.append(f"{way}: {problem}")
        if loss in TAUGHT and not (errors or self.problems(config.model, options)):
            errors += _row_problems(way, config.data.context_length, **options)
        return errors

    def keeps_parameters(
        self, theirs: Mapping[str, Any] | None, ours: Mapping[str, Any] | None
    ) -> bool:
        before, now = self.resolved(theirs), self.resolved(ours)
        return all(before[key] == now[key] for key in ("filter", "filter_state", "block"))

    def problems(self, model: Any, options: dict[str, Any]) -> list[str]:
        found = value_problems(options, filter_names(), "attention_options.")
        state = options["filter_state"]
        found = found or whole_problems("attention_options.filter_state", state, CONV_STATE)
        name, keys = (
            options["filter"],
            ("attention_options.filter", "attention_options.filter_state"),
        )
        if not found and state and name not in filters.names():
            choices = " or ".join(filters.names())
            found = [f"{keys[1]}={state}: says nothing with filter={name}; choose {choices}"]
        elif not found and (state or name not in FILTERS):
            found = filters.problems(name, state, "head", keys)
        if found:
            return found
        if options["top_k"] == 0:
            for key, usual in (("filter", "box"), ("share", "head")):
                if options[key] != usual:
                    found.append(
                        f"attention_options.{key}={options[key]}: says nothing with top_k=0, which "
                        f"chooses no blocks; leave it {usual}"
                    )
        return found

    def holds_state(self, model: Any) -> bool:
        return True  # The state consists of the landmarks.

    def describe_backend(self, config: Any, device: torch.device, dtype: torch.dtype) -> str:
        from cat_lm.ops.landmark.attend import MEANINGS, choose_backend, choose_decoder
        from cat_lm.ops.landmark.segments import why_not

        length, by = config.max_position_embeddings, config._attn_implementation or "sdpa"
        block = self.resolved(config.attention_options)["block"]
        has_triton = why_not(device, dtype, block, head_width(config)) is None
        row = choose_backend(by, length, length, 0.0, has_triton)
        step = choose_decoder(by, 1, length, device, dtype)
        return (
            f"landmark attention: rows of {length} tokens by {row} ({MEANINGS[row]}), decoding by "
            f"{step} ({MEANINGS[step]})"
        )

    def cache_layers(self) -> tuple[type, type]:
        from cat_lm.model.attention.modules.landmark import (
            LandmarkDynamicLayer,
            LandmarkStaticLayer,
        )

        return LandmarkDynamicLayer, LandmarkStaticLayer

    def division_problems(self, model: Any) -> list[str]:
        share = self.resolved(model.attention_options)["share"]
        if share == "head":
            return []
        return [f"attention_options.share={share} chooses blocks by all heads; use share=head"]

    def build(self, config: Any) -> Any:
        from cat_lm.model.attention.modules.landmark import LandmarkCore

        return LandmarkCore(config, self.resolved(config.attention_options))


def _row_problems(way: str, length: int, block: int, local: int, **others: Any) -> list[str]:
    least = local + 1  # The loss compares blocks, so that it needs at least two.
    if least * block < length:
        return []
    return [
        f"{way}: no query of data.context_length={length} tokens has two blocks to choose from "
        f"with model.attention_options.block={block} and local={local}; {least} x block must be "
        "below the context"
    ]


ENTRY = Landmark()
