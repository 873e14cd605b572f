"""Mamba-2: state spaces of heads, with one rate for each."""

from __future__ import annotations

from typing import Any, ClassVar

from cat_lm.architectures.base import Summary, sizes_of
from cat_lm.architectures.families.mamba import StateSpace
from cat_lm.model.hf.sections.recurrent import NO_LIMIT, Mamba2Section


class Mamba2(StateSpace):
    """The channels of a head share their decay rate, and the heads of a group share B and C."""

    name = "mamba2"
    title = "Mamba-2"
    model_type = "cat_mamba2"
    library_type = "mamba2"
    class_prefix, library_prefix = "CatMamba2", "Mamba2"
    Section = Mamba2Section
    short_names: ClassVar[dict[str, str]] = {"": "mamba2"}

    def section_values(self, config: Any) -> dict[str, Any]:
        values = super().section_values(config)
        limit = tuple(config.time_step_limit)
        usual = values["expand"] * values["hidden_size"] == values["num_heads"] * values["head_dim"]
        return values | {
            "num_heads": None if usual else values["num_heads"],
            "time_step_limit": None if limit == NO_LIMIT else limit,
        }

    def summary(self, section: Mamba2Section) -> Summary:
        said, heads = super().summary(section), section.heads
        groups = f" in {section.n_groups} groups" if section.n_groups > 1 else ""
        words = f"{heads} heads{groups}, {said.words}"
        return said._replace(words=words, sizes=sizes_of(section, heads=heads))


ENTRY = Mamba2()
