"""The code shared by all language models: the loop over layers, and the head with the loss.

`CausalLanguageModel` is the contract with the training engine, generation and evaluation: loss,
labels, `skip_logits`, `document_ids`, backends. All classes are mixins before a family's own of
transformers. `CausalBody` wants a configuration that extends
`cat_lm.model.attention.settings.AttentionSettings` or
`cat_lm.model.hf.configuration.RecurrentSettings`; `CausalLanguageModel` takes any.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import can_return_tuple, logging
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from cat_lm.core.parameters import apply_initial_values
from cat_lm.core.registry import one_of
from cat_lm.model.attention.core import check_attention
from cat_lm.model.attention.masks import check_call, context_of, count_positions, positions_restart
from cat_lm.model.cache import CatCache, attach_layer_state, count_tokens, without_plans
from cat_lm.model.context import Context, layer_context
from cat_lm.model.sequence import SequenceGroup, check_divided
from cat_lm.ops import BACKENDS
from cat_lm.ops.loss.linear_cross_entropy import IGNORE_INDEX, LanguageModelHead
from cat_lm.ops.recurrence.backends import NAMES as MIXER_BACKENDS

logger = logging.get_logger(__name__)


class InitialValuesMixin:
    """A mixin, before `PreTrainedModel`, that initialises a module by its own `initial_values`."""

    _supports_context_parallel = False  # `cat_lm.model.sequence` does it instead.
    # accelerate would pass copies of these arguments, which layers write to.
    _skip_keys_device_placement = ("past_key_values", "auxiliary_losses", "norm")

    def _initialize_weights(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Initialise a module's own parameters, then those in its `initial_values`.

        Here and not in `_init_weights`: transformers passes over a module without parameters of its
        own, or whose own were loaded, where it calls that. What was loaded is left alone.
        """
        has_started = getattr(module, "_is_hf_initialized", False)
        super()._initialize_weights(module, *args, **kwargs)
        is_loaded = all(getattr(p, "_is_hf_initialized", False) for p in module.parameters())
        if not (has_started or is_loaded):
            apply_initial_values(module, init.copy_)


class CausalBody:
    """The forward pass of a model without its head; a family supplies the modules.

    The model has `layers`, whose forward takes hidden states and a `Context`, and `rotary_emb` if
    positions are rotated.
    """

    sequence_group: SequenceGroup | None = None
    conv_backend = mixer_backend = "auto"

    def post_init(self) -> None:
        """Check the model's and plugins' parts, then run transformers' post-initialization."""
        if self.config.attends:
            check_attention(self)
        super().post_init()

    @property
    def layout_settings(self) -> Any:
        """Return the settings by which rows are laid out, here the configuration."""
        return self.config

    def _enter(self, inputs_embeds: Tensor, context: Context) -> Tensor:
        """Process the embeddings [B, T, C] before the first layer."""
        return inputs_embeds

    def _leave(self, hidden_states: Tensor) -> Tensor:
        """Process the output of the last layer, [B, T, C]: the final norm."""
        raise NotImplementedError

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        document_ids: Tensor | None = None,
        padding_mask: Tensor | None = None,
        document_borders: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Compute hidden states [B, T, C] after the final norm; see `CausalLanguageModel`.

        Args:
            document_borders: those of `document_ids` (see `cat_lm.ops.runtime.documents`), for a
                caller that knows them on the host, which then does not wait for a GPU.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        settings = self.layout_settings
        said = position_ids, attention_mask, padding_mask, document_ids, past_key_values
        check_call(settings, kwargs, *said)
        if document_borders is not None and not settings.attends:
            raise ValueError("document_borders: no layer reads them; say document_ids")
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        past_key_values = self._usable_cache(past_key_values, use_cache)
        group = self.sequence_group
        check_divided(group, attention_mask, padding_mask, past_key_values)
        context = context_of(
            settings,
            inputs_embeds if group is None else group.whole_like(inputs_embeds),
            attention_mask,
            position_ids,
            document_ids,
            past_key_values,
            padding_mask,
            document_borders,
            kwargs,
        )
        context.group = group
        context.conv_backend, context.mixer_backend = self.conv_backend, self.mixer_backend
        hidden_states = self._enter(inputs_embeds, context)
        if (rotary_emb := getattr(self, "rotary_emb", None)) is not None:
            context.rotary = rotary_emb(hidden_states, context.positions)
        with without_plans(past_key_values, hidden_states):
            for index, layer in enumerate(self.layers):
                hidden_states = layer(hidden_states, layer_context(context, index))
        count_tokens(past_key_values, inputs_embeds.shape[1])
        return BaseModelOutputWithPast(
            last_hidden_state=self._leave(hidden_states), past_key_values=past_key_values
        )

    def _usable_cache(self, cache: Cache | None, use_cache: bool | None) -> Cache | None:
        if cache is not None:
            attach_layer_state(cache, self.config)
        elif use_cache and getattr(self.config, "keeps_state", True):
            cache = CatCache(self.config)
        computes_again = self.training and any(x.gradient_checkpointing for x in self.layers)
        if cache is None or not computes_again:
            return cache
        # A recomputed layer would add its tokens to the cache twice.
        if cache.get_seq_length() > 0:
            raise ValueError(
                "past_key_values: gradient checkpointing cannot train after cached tokens; "
                "give all tokens, or disable it"
            )
        logger.warning_once("no cache is kept: gradient checkpointing computes layers again")
        return None


@dataclass
class CausalOutput(CausalLMOutputWithPast):
    """transformers' output, with the layers' auxiliary loss as a scalar."""

    auxiliary_loss: Tensor | None = None


class CausalLanguageModel:
    """The head, the loss and generation of a language model of any family.

    The body is `base_model`, the head `lm_head`, a `LanguageModelHead`. A body whose forward has no
    argument `past_key_values` keeps no state; generation then computes the text anew each time.
    With `collects_losses` the mean of layers' own losses in training is `auxiliary_loss`.

    Args of `forward`:
        input_ids: [B, T].
        attention_mask: [B, S], 1 at real tokens, 0 at padding; S counts cached tokens too, of
            which it says what it said before. Padding stands at a row's beginning or end.
        position_ids: [B, T]; by default real tokens are counted, from 0 in every document.
        inputs_embeds: [B, T, C] instead of `input_ids`.
        past_key_values: an empty or earlier cache; see `cat_lm.model.cache`.
        document_ids: [B, T] integers; attention, convolution and positions start anew where
            the id changes. Not with a cache.
        padding_mask: [B, T], 0 at padding; needed only beside an attention mask that was
            prepared for the attention function.
        labels: [B, T], as in transformers: labels[:, t] is scored against the logits at t−1.
            −100 is not scored.
        num_items_in_batch: the loss is the sum divided by this; by default by the number of
            scored positions.
        skip_logits: return no logits.
        use_cache: by default the configuration's; off with labels, documents and in training.
        logits_to_keep: logits of the last so many positions, or of these positions; 0 for all.
        shift_labels: [B, T], scored against the logits at t, in the place of `labels`. Not in
            the signature, off which `Trainer` reads which inputs every batch of labels has.
    """

    collects_losses = False
    # The head computes the loss and filters mix heads, so that no split of the weights is possible.
    _tp_plan = _pp_plan = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Register the class where transformers looks up the loss by class name."""
        super().__init_subclass__(**kwargs)
        names, kind = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, getattr(cls, "config_class", None)
        # Wrappers such as FSDP's create a second class with the same model type.
        if kind is not None and names.setdefault(kind.model_type, cls.__name__) != cls.__name__:
            names[cls.__name__] = cls.__name__

    def post_init(self) -> None:
        """Run transformers' post-initialization, then set the loss type."""
        super().post_init()
        self.loss_type = "ForCausalLM"  # Independent of the class's name.
        taken = inspect.signature(type(self.base_model).forward).parameters
        self.keeps_state = "past_key_values" in taken
        self.takes_borders = "document_borders" in taken and getattr(self.config, "attends", True)

    def set_conv_backend(self, name: str) -> None:
        """Set the convolution backend of all layers: `auto`, or a name of `cat_lm.ops.BACKENDS`.

        Raises ValueError for an unknown name at once, and for one that cannot serve when the model
        runs; `Architecture.describe_backend` tells before.
        """
        self._set_backend("conv_backend", name, BACKENDS.problem(name))

    def set_mixer_backend(self, name: str) -> None:
        """Set the recurrence backend of all layers: `auto`, or a name of `recurrence.backends`."""
        known = ("auto", *MIXER_BACKENDS)
        self._set_backend("mixer_backend", name, None if name in known else one_of(name, known))

    def _set_backend(self, key: str, name: str, problem: str | None) -> None:
        if problem:
            raise ValueError(f"backend={name!r}: {problem}")
        for module in self.modules():
            if isinstance(module, CausalBody):
                setattr(module, key, name)

    def set_sequence_group(self, group: SequenceGroup | None) -> None:
        """Set the group of ranks that share every sequence; None for a single rank.

        `input_ids`, labels and what comes out are then this rank's part, [B, T/P], and
        `document_ids`, `position_ids` those of whole sequences, [B, T]. What can be divided is
        said by `ModelSection.division_problems`.
        """
        for module in self.modules():
            if hasattr(module, "sequence_group"):
                module.sequence_group = group

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Set the head; a plain linear layer, as resizing makes one, is wrapped to compute the
        loss.
        """
        if type(new_embeddings) is nn.Linear:
            new_embeddings.__class__ = LanguageModelHead
        self.lm_head = new_embeddings

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Prepare inputs as transformers does, including the attention mask if the cache is static.

        The convolution then gets the padding beside it; a pattern of attention that masks keys
        itself gets no prepared mask. Raises ValueError for flex attention with a static cache,
        whose block mask transformers copies as if it were a tensor.
        """
        is_static = getattr(kwargs.get("past_key_values"), "is_compileable", False)
        if is_static and self.config._attn_implementation == "flex_attention":
            raise ValueError(
                "attn_implementation=flex_attention: does not generate with a static cache; use "
                "cache_implementation='dynamic'"
            )
        # transformers reads from these argument names that generation may start with embeddings.
        inputs = super().prepare_inputs_for_generation(
            input_ids, inputs_embeds=inputs_embeds, **kwargs
        )
        prepared, given = inputs.get("attention_mask"), kwargs.get("attention_mask")
        if getattr(self.config, "masks_keys", False):
            inputs["attention_mask"] = given
        elif prepared is not None and prepared is not given and prepared.ndim == 4:
            batch, _, time, _ = prepared.shape
            cache = inputs["past_key_values"]
            if given is None:
                given = prepared.new_ones(batch, int(cache.get_seq_length()) + time)
            is_first = time > 1 or kwargs.get("is_first_iteration")
            # Keep shape and strides constant, because otherwise each token would recompile.
            new = given if is_first else given[:, -time:]
            inputs["padding_mask"] = new.clone(memory_format=torch.contiguous_format)
            if getattr(self.config, "reads_positions", False):
                inputs["key_positions"] = count_positions(given, prepared.shape[3])
        return inputs

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ValueError: continuous batching is not supported."""
        raise ValueError(
            f"{type(self).__name__} does not serve by continuous batching, whose cache holds keys "
            "and values alone; use generate with a batch"
        )

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Add the layers' states to the cache, with recording so that drafted tokens can be
        removed.
        """
        if generation_config.is_assistant and self._is_stateful:
            raise ValueError(
                f"{type(self).__name__} cannot draft tokens for another model: its recurrent "
                "states cannot go back before those that are rejected"
            )
        if not self.keeps_state:
            generation_config.use_cache = model_kwargs["use_cache"] = False
            return None
        if not getattr(self.config, "attends", True):
            self._prepare_states(generation_config, model_kwargs)
            return None
        result = super()._prepare_cache_for_generation(
            generation_config, model_kwargs, *args, **kwargs
        )
        cache = model_kwargs.get("past_key_values")
        if cache is not None:
            attach_layer_state(cache, self.config)
            if generation_config.is_assistant:
                # transformers activated only the layers that existed before.
                cache.activate_past_recording()
        return result

    def _prepare_states(self, generation_config: Any, model_kwargs: dict[str, Any]) -> None:
        """Set the cache of recurrent states; stateless models have none."""
        kind, cache = generation_config.cache_implementation, model_kwargs.get("past_key_values")
        if kind not in (None, "dynamic"):
            raise ValueError(f"cache_implementation={kind!r}: the states of mixers have none")
        if cache is not None:
            attach_layer_state(cache, self.config)
        elif self.config.keeps_state and generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = CatCache(self.config)
        else:
            generation_config.use_cache = model_kwargs["use_cache"] = False

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Cache | None = None,
        document_ids: Tensor | None = None,
        padding_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        skip_logits: bool = False,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalOutput:
        """Compute logits, and the next-token loss if labels are given; see the class."""
        if past_key_values is not None and not self.keeps_state:
            raise ValueError("past_key_values: the model keeps no state; give all tokens each time")
        shift_labels = kwargs.pop("shift_labels", None)
        has_loss = labels is not None or shift_labels is not None
        if use_cache is None and past_key_values is None:
            # An unrequested cache would cost memory, and packed rows cannot be continued.
            is_unasked = has_loss or self.training or document_ids is not None
            is_unasked = is_unasked or kwargs.get("seq_idx") is not None
            # Positions are checked last, because that synchronises with the GPU.
            if is_unasked or positions_restart(position_ids, attention_mask):
                use_cache = False
        losses: list[Tensor] = []
        if self.collects_losses and self.training:
            kwargs["auxiliary_losses"] = losses
        outputs = self.base_model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
            document_ids=document_ids,
            padding_mask=padding_mask,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        loss = logits = None
        if has_loss:
            loss = self._loss(hidden_states, labels, shift_labels, num_items_in_batch)
        if not skip_logits:
            kept = logits_to_keep
            kept = slice(-kept, None) if isinstance(kept, int) else kept
            logits = self.lm_head(hidden_states[:, kept])
        return CausalOutput(
            # Sum now, because recomputed layers add theirs again later.
            auxiliary_loss=torch.stack(losses).mean() if losses else None,
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _loss(
        self,
        hidden_states: Tensor,
        labels: Tensor | None,
        shift_labels: Tensor | None,
        num_items: Tensor | int | None,
    ) -> Tensor:
        if hasattr(self, "_loss_function"):
            # A function set from outside, as by DeepSpeed's tensor parallelism, is called as
            # transformers does.
            how = {"num_items_in_batch": num_items, "shift_labels": shift_labels}
            return self.loss_function(
                logits=self.lm_head(hidden_states),
                labels=labels,
                vocab_size=self.config.vocab_size,
                **{name: value for name, value in how.items() if value is not None},
            )
        if shift_labels is None:
            shift_labels = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        labels, inputs = shift_labels.to(hidden_states.device), hidden_states.shape[:2]
        if labels.shape != inputs:
            raise ValueError(f"labels are {list(labels.shape)} for inputs of {list(inputs)}")
        if num_items is None:
            num_items = (labels != IGNORE_INDEX).sum().clamp(min=1)
        elif isinstance(num_items, Tensor):
            num_items = num_items.to(hidden_states.device)
        if isinstance(self.lm_head, LanguageModelHead):
            return self.lm_head(hidden_states, labels) / num_items
        # A wrapped or replaced head (an adapter, a quantised layer) computes its own logits.
        logits = self.lm_head(hidden_states).float().flatten(0, 1)
        total = F.cross_entropy(logits, labels.flatten(), reduction="sum")
        return total / num_items
