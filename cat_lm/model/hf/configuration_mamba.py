"""`CatMambaConfig` and `CatMamba2Config`: the library's, for the models of this project."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.models.mamba.configuration_mamba import MambaConfig
from transformers.models.mamba2.configuration_mamba2 import Mamba2Config

from cat_lm.model.hf.sections.mamba import Mamba2Section, MambaSection
from cat_lm.model.hf.settings import RecurrentSettings


class _StateSpaceSettings(RecurrentSettings):
    """Refuse an activation that the layers do not have."""

    def shape_problems(self) -> list[str]:
        """Return what does not go together, in lines that begin with the key."""
        other = [] if self.hidden_act == "silu" else [f"hidden_act={self.hidden_act!r}: use silu"]
        return [*super().shape_problems(), *other]


@strict
class CatMambaConfig(_StateSpaceSettings, MambaConfig):
    r"""Configuration of a Mamba model of this project; the fields are those of `MambaConfig`.

    max_position_embeddings (`int`): tokens of a training sequence.
    initializer_range (`float`): the standard deviation of embeddings and of the projections that
        have no start of their own; the library's default of 0.1 is not the paper's.
    use_mambapy, use_associative_scan, time_step_scale, time_step_init_scheme: of the library's
        class alone.

    Wrong values raise a `ValueError` that says what is supported.
    """

    model_type = "cat_mamba"
    Section = MambaSection

    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False

    @classmethod
    def other_keys(cls) -> Collection[str]:
        """Return the attribute that the library's class computes and writes."""
        return ("intermediate_size",)


@strict
class CatMamba2Config(_StateSpaceSettings, Mamba2Config):
    r"""Configuration of a Mamba-2 model of this project; the fields are those of `Mamba2Config`.

    max_position_embeddings (`int`), initializer_range (`float`): as of `CatMambaConfig`.
    chunk_size, time_step_rank: of the library's class alone.

    Wrong values raise a `ValueError` that says what is supported.
    """

    model_type = "cat_mamba2"
    Section = Mamba2Section

    max_position_embeddings: int = 2048
    initializer_range: float = 0.02

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.time_step_limit = tuple(self.time_step_limit)
