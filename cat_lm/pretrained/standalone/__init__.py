"""The model as one file of torch and transformers, for machines without cat_lm.

The file is assembled from the library's own modules, so that there is no second implementation:
`assemble` takes the classes of a model and all definitions that they need, and `stand_ins` has what
takes the place of kernels, of the checks of configurations and of what trains on several ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cat_lm import architectures
from cat_lm.core import __version__
from cat_lm.model.attention import chosen_entries
from cat_lm.ops.convolution import kinds
from cat_lm.ops.long_filter import filters
from cat_lm.pretrained.standalone.assemble import Assembly, CannotAssemble, Name

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["CannotAssemble", "auto_map", "file_name", "source"]

_HERE = f"{__name__}.stand_ins"
# What stands in the file for definitions of a module: those of the same name in stand_ins.py, or
# others that are named.
_STAND_INS: dict[str, tuple[str, ...] | dict[str, str]] = {
    "core.registry": ("Registry",),
    "model.attention.core": {"check_attention": "check_nothing"},
    "model.blocks.mlp": ("activate",),
    "model.hf.sections.base": ("KnownKeys",),
    "model.hf.sections.recurrent": {"MambaSection": "SECTION", "Mamba2Section": "SECTION"},
    "model.hf.sections.transformer": {"GPTNeoXSection": "SECTION", "LlamaSection": "SECTION"},
    "model.rules": {"problems": "no_problems"},
    "model.sequence": {
        "SequenceGroup": "SequenceGroup",
        "check_divided": "check_nothing",
        "own_heads": "own_heads",
        "to_tokens": "to_tokens",
    },
    "model.streams.pipeline": ("FUSIONS",),
    "ops.attention.causal_cpu": {"causal_attention": "no_kernel", "serves_training": "never"},
    "ops.convolution.backends": ("BACKENDS", "serving_backend"),
    "ops.convolution.kinds": {"chosen": "chosen_kind"},
    "ops.convolution.triton": {"rotate": "no_kernel"},
    "ops.long_filter.api": {"_forward": "long_conv_forward", "choose_backend": "reference_backend"},
    "ops.loss.linear_cross_entropy": ("linear_cross_entropy",),
    "ops.recurrence.backends": {"choose_backend": "torch_backend"},
    "ops.recurrence.decaying_scan": {"_forward": "decaying_scan_forward"},
    "ops.residual.parallel": ("add_branches", "two_norms"),
    "ops.runtime.flops": ("flops",),
    "ops.runtime.triton_launch": ("why_not",),
}
# The modules, or packages of them, that definitions may come from.
_CARRIED = (
    *("core.errors", "core.numbers", "core.parameters", "core.readers", "core.registry"),
    *("mixers", "model", "ops.convolution", "ops.decay_rates", "ops.landmark.layout"),
    *("ops.long_filter", "ops.loss", "ops.recurrence", "ops.runtime.documents", "ops.runtime.fake"),
    *("ops.runtime.precision", "pretrained.standalone.stand_ins"),
)
_REGISTER = Name("cat_lm.model.attention", "register")
_HEADER = '''\
"""{model_type} for transformers: the model of this folder, without cat_lm.

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

This file was assembled by cat_lm {version} (Apache License 2.0) from its own modules, whose
comments it keeps; changes belong there. It computes by torch's operators; cat_lm has kernels for
GPUs and CPUs beside them.
"""

from __future__ import annotations

'''


def file_name(config: PreTrainedConfig) -> str:
    """Return the name of a model's file."""
    return f"modeling_{config.model_type}.py"


def auto_map(config: PreTrainedConfig) -> dict[str, str]:
    """Return the entry of config.json by which transformers finds the classes in the file."""
    classes, module = architectures.of_config(config).classes(), file_name(config)[:-3]
    named = {
        "AutoConfig": classes.config,
        "AutoModel": classes.base_model,
        "AutoModelForCausalLM": classes.causal_lm,
    }
    return {auto: f"{module}.{kind.__name__}" for auto, kind in named.items()}


def source(config: PreTrainedConfig) -> str:
    """Write the file that has the classes of a configuration's model.

    Raises:
        CannotAssemble: the model has a part that needs cat_lm; names it.
    """
    classes = architectures.of_config(config).classes()
    entries = []
    if getattr(config, "attends", False):
        for registry in (kinds.KINDS, filters.FILTERS):
            name = getattr(config, registry.key)
            if name not in (*registry.others, *registry.own_names()):
                raise CannotAssemble(f"{registry.key}={name} is not carried (it is a plugin's)")
        entries = [
            Name(type(entry).__module__, "ENTRY") for entry in chosen_entries(config).values()
        ]
    stand_ins = _stand_ins()
    if not getattr(config, "has_long_filters", False):
        stand_ins[Name("cat_lm.model.streams.operations", "LongFilter")] = Name(_HERE, "NoFilter")
    assembly = Assembly(stand_ins, [f"cat_lm.{module}" for module in _CARRIED])
    for kind in (classes.base_model, classes.causal_lm):
        if kind is None:
            raise CannotAssemble(f"{config.model_type} has no class of its body")
        assembly.add(Name(kind.__module__, kind.__name__))
    for entry in entries:
        assembly.add(entry)
        assembly.add(_REGISTER)
    header = _HEADER.format(model_type=config.model_type, version=__version__)
    return header + assembly.text([(_REGISTER, entry) for entry in entries])


def _stand_ins() -> dict[Name, Name]:
    found = {}
    for module, names in _STAND_INS.items():
        renamed = names if isinstance(names, dict) else dict(zip(names, names, strict=True))
        for name, stand_in in renamed.items():
            found[Name(f"cat_lm.{module}", name)] = Name(_HERE, stand_in)
    return found
