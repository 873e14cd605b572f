"""`CatMixerConfig`: the configuration of a language model around a mixer."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from cat_lm.mixers import mixer_of
from cat_lm.model.hf.sections.mixer import MixerSection
from cat_lm.model.hf.settings import RecurrentSettings


@strict
class CatMixerConfig(RecurrentSettings, PreTrainedConfig):
    r"""Configuration of a language model around one of the mixers of `cat_lm.mixers`.

    Every layer is RMSNorm, mixer, RMSNorm, SwiGLU, each pair on the residual stream.

    mixer (`str`): its name.
    mixer_options (`dict`): what differs from the options' defaults; all of them are stored.
    intermediate_size (`int`): the width of the MLP.
    learned_positions (`int`, *optional*): rows of the table of positions that is added to the
        embeddings, of a mixer that asks for one; the longest sequence.
    max_position_embeddings (`int`): tokens of a training sequence.
    initializer_range (`float`): the standard deviation of linear layers and embeddings. Everything
        else, and mixers that keep their own, start as `cat_lm.mixers` says.

    Wrong values raise a `ValueError` that says what is supported.
    """

    model_type = "cat_mixer"
    Section = MixerSection

    vocab_size: int = 32000
    hidden_size: int = 1024
    num_hidden_layers: int = 24
    mixer: str = "gla"
    mixer_options: dict[str, Any] | None = None
    intermediate_size: int = 2816
    learned_positions: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.mixer_options = asdict(mixer_of(self).options)

    @property
    def keeps_state(self) -> bool:
        """Return True if the mixer has a decoding state."""
        return "state" in mixer_of(self).kind.supports

    @property
    def cache_layers(self) -> tuple[type, type]:
        """Import the class of the mixer's cache layers, which grow."""
        mixer = mixer_of(self)
        own = mixer.kind.cache_layer(mixer.options)
        return own, own
