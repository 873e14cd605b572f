"""The keys of language models around a mixer, see `cat_lm.mixers`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from cat_lm import mixers
from cat_lm.core import numbers
from cat_lm.core.fields import number, whole
from cat_lm.mixers import mixer_of, mixer_problems
from cat_lm.model.hf.sections.base import GatedWidth, ModelSection


def _known_mixer(name: str) -> str:
    if name not in mixers.names():
        where = "; its options are mixer_options" if ":" in name else ""
        raise ValueError(f"must be one of {', '.join(mixers.names())}{where}")
    return name


class MixerSection(GatedWidth, ModelSection):
    """Shape of the model and its mixer, in the names of CatMixerConfig."""

    architecture: Literal["mixer"] = "mixer"
    mixer: Annotated[str, AfterValidator(_known_mixer)] = Field(
        description="what mixes tokens, by its name in cat_lm/mixers"
    )
    mixer_options: dict[str, Any] = Field(
        default_factory=dict, description="as {heads: 4, window: 3}; see cat_lm/mixers"
    )
    intermediate_size: Annotated[int, whole(numbers.INTERMEDIATE_SIZE)] | None = Field(
        None, description="default: 8/3 x hidden_size, up to a multiple of 256"
    )
    learned_positions: Annotated[int, whole(numbers.CONTEXT)] | None = Field(
        None, description="rows of the table of positions, of a mixer that has one"
    )
    rms_norm_eps: Annotated[float, number(numbers.NORM_EPSILON)] = Field(
        1e-6, description="added to mean squares in RMS norms"
    )
    initializer_range: Annotated[float, number(numbers.NORM_EPSILON)] = Field(
        0.02, description="standard deviation of first weights"
    )

    @property
    def isolates_documents(self) -> bool:
        """Return True if the mixer keeps documents apart."""
        return "documents" in mixer_of(self).kind.supports

    def derived(self) -> dict[str, Any]:
        """Return the width of the MLP, and all options, so that no default can change."""
        return super().derived() | {"mixer_options": asdict(mixer_of(self).options)}

    def shape_problems(self) -> list[str]:
        """Return what of mixer and sizes does not go together."""
        return mixer_problems(self)

    def portable(self) -> MixerSection:
        """Return the same model with this project's own operators."""
        if "operator" not in self.mixer_options:
            return self
        options = self.mixer_options | {"operator": "torch"}
        return self.model_copy(update={"mixer_options": options})
