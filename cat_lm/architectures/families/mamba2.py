"""Mamba-2: state spaces of heads, with one rate for each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from cat_lm.architectures.base import Classes
from cat_lm.architectures.families.mamba import StateSpace, StateSpaceSection
from cat_lm.core import numbers
from cat_lm.core.fields import number, whole
from cat_lm.model.recurrent_rules import inner_size, limit_problems, state_head_problems

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_NO_LIMIT = (0.0, float("inf"))
_Bound = Annotated[float, number(numbers.Range(*_NO_LIMIT))]


def _pair(value: Any) -> Any:
    if value is not None and not (isinstance(value, list | tuple) and len(value) == 2):
        raise ValueError("must be two numbers from 0 up, the lower one first")
    return value


class Mamba2Section(StateSpaceSection):
    """Shape of the model, in the names of `transformers`' Mamba-2 and CatMamba2Config."""

    architecture: Literal["mamba2"] = "mamba2"
    state_size: Annotated[int, whole(numbers.STATE_SIZE)] = Field(
        128, description="numbers of the state a channel"
    )
    head_dim: Annotated[int, whole(numbers.HIDDEN_SIZE)] = Field(
        64, description="channels of a head"
    )
    num_heads: Annotated[int, whole(numbers.HEADS)] | None = Field(
        None, description="default: expand x hidden_size / head_dim"
    )
    n_groups: Annotated[int, whole(numbers.HEADS)] = Field(
        1, description="each with its own keys and queries, for all heads in it"
    )
    time_step_limit: Annotated[tuple[_Bound, _Bound] | None, BeforeValidator(_pair)] = Field(
        None, description="bounds of every step size; default: none"
    )

    @property
    def heads(self) -> int:
        """The number of heads."""
        return self.num_heads or max(1, inner_size(self) // self.head_dim)


class Mamba2(StateSpace):
    """A head's channels share their rate, and a group's heads what is written and read."""

    name = "mamba2"
    title = "Mamba-2"
    model_type = "cat_mamba2"
    library_type = "mamba2"
    Section = Mamba2Section
    short_names: ClassVar[dict[str, str]] = {"": "mamba2"}

    def config_class(self) -> type[PreTrainedConfig]:
        """Import `CatMamba2Config`."""
        from cat_lm.model.hf.configuration_mamba import CatMamba2Config

        return CatMamba2Config

    def classes(self) -> Classes:
        """Import `CatMamba2Config`, `CatMamba2ForCausalLM` and `CatMamba2Model`."""
        from cat_lm.model.hf.modeling_mamba2 import CatMamba2ForCausalLM, CatMamba2Model

        return Classes(self.config_class(), CatMamba2ForCausalLM, CatMamba2Model)

    def library_classes(self) -> Classes:
        """Import transformers' Mamba-2."""
        from transformers import Mamba2Config, Mamba2ForCausalLM, Mamba2Model

        return Classes(Mamba2Config, Mamba2ForCausalLM, Mamba2Model)

    def fields(
        self, section: Mamba2Section, vocab_size: int, context_length: int
    ) -> dict[str, Any]:
        """Return the arguments of `CatMamba2Config`."""
        return super().fields(section, vocab_size, context_length) | {
            "num_heads": section.heads,
            "time_step_limit": section.time_step_limit or _NO_LIMIT,
        }

    def section_values(self, config: PreTrainedConfig) -> dict[str, Any]:
        """Return the section's keys, those that say nothing as None."""
        values = super().section_values(config)
        limit = tuple(config.time_step_limit)
        usual = values["expand"] * values["hidden_size"] == values["num_heads"] * values["head_dim"]
        return values | {
            "num_heads": None if usual else values["num_heads"],
            "time_step_limit": None if limit == _NO_LIMIT else limit,
        }

    def check_settings(self, settings: dict[str, Any]) -> None:
        """Check a config.json of Mamba-2 or CatMamba2. Raises ValueError."""
        from cat_lm.model.hf.configuration_mamba import check_settings

        check_settings(settings, self.config_class())

    def problems(self, section: Mamba2Section, context_length: int) -> list[str]:
        """Return what does not go together in a section."""
        found = super().problems(section, context_length)
        return [*found, *state_head_problems(section, section.heads), *limit_problems(section)]

    def _divided_counts(self, section: Mamba2Section) -> dict[str, int]:
        return {"num_heads": section.heads}

    def _states(self, section: Mamba2Section) -> int:
        """Count the channels that all groups write and read by, each."""
        return section.n_groups * section.state_size

    def convolved_channels(self, section: Mamba2Section) -> int:
        """Count the inner channels and those that groups write and read by."""
        return inner_size(section) + 2 * self._states(section)

    def words(self, section: Mamba2Section) -> str:
        """Name also the heads and groups."""
        groups = f" in {section.n_groups} groups" if section.n_groups > 1 else ""
        return f"{section.heads} heads{groups}, {super().words(section)}"

    def sizes(self, section: Mamba2Section) -> dict[str, int]:
        """Return what the base gives, and the heads."""
        return super().sizes(section) | {"heads": section.heads}


ENTRY = Mamba2()
