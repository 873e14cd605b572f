"""What the files of a family say of each other, once its first model is there.

`register` imports no torch; whether classes, names and counts belong together shows here.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from cat_lm.architectures.base import Architecture

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_classes(architecture: Architecture) -> None:
    """Check that a family's classes are of one family.

    Raises:
        ValueError: naming the family and the class.
    """
    from cat_lm.model.hf.causal_lm import CausalLanguageModel

    named = f"architecture {architecture.name!r}"
    config, causal_lm, _ = architecture.classes()
    if config.model_type != architecture.model_type:
        raise ValueError(
            f"{named}: {config.__name__}.model_type is {config.model_type!r}; must be "
            f"{architecture.model_type!r}, as the architecture says"
        )
    if causal_lm.config_class is not config:
        raise ValueError(f"{named}: {causal_lm.__name__}.config_class must be {config.__name__}")
    if not issubclass(causal_lm, CausalLanguageModel):
        raise ValueError(
            f"{named}: {causal_lm.__name__} must extend CausalLanguageModel of "
            "cat_lm.model.hf.causal_lm"
        )


def check_model(architecture: Architecture, section: Any, model: PreTrainedModel) -> None:
    """Check that a model is what its family says of it.

    Raises:
        ValueError: naming the family and what differs.
    """
    named = f"architecture {architecture.name!r}"
    names = {name for name, _ in model.named_parameters()}
    last = architecture.layer_weight.format(layer=section.num_hidden_layers - 1)
    for key, name in (("embedding", architecture.embedding), ("layer_weight", last)):
        if name not in names:
            raise ValueError(f"{named}: {key} names {name}, which its model has not")
    body = type(model.base_model)
    taken = inspect.signature(body.forward).parameters
    if architecture.isolates_documents(section) and "document_ids" not in taken:
        raise ValueError(
            f"{named}: isolates_documents, but the forward of {body.__name__} takes no document_ids"
        )
