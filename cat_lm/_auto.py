"""Register this project's classes with transformers' Auto classes and with peft, without importing
either.

Registering needs the models' classes, hence torch and transformers, whose modules import each other
in circles. So the Auto classes' entry points are wrapped: their first call registers the models and
puts the original methods back. Modules that are not loaded yet, those of the Auto classes and
peft's of target modules, are awaited by a finder on `sys.meta_path`.

`import cat_lm` calls `install`. Programs that know nothing of cat_lm open an export by the file
beside its weights (`cat_lm.pretrained.standalone`).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial, wraps
from importlib.machinery import PathFinder
from inspect import getattr_static
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cat_lm.architectures import Architecture


def _families() -> Sequence[Architecture]:
    """List all registered families, and warn about plugins that fail to load.

    A program that opens other models must go on.
    """
    from cat_lm import architectures
    from cat_lm.core.errors import UserError

    try:
        return [architectures.get(name) for name in architectures.names()]
    except UserError as error:
        warnings.warn(f"cat_lm: {error}", stacklevel=2)
        return architectures.built_in()


def _register(models: bool) -> None:
    """Register the configuration classes with transformers' Auto registries, or the model classes
    too if `models` is set.
    """
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    for family in _families():
        AutoConfig.register(family.model_type, family.config_class(), exist_ok=True)
        if models:
            kinds = family.classes()
            AutoModelForCausalLM.register(kinds.config, kinds.causal_lm, exist_ok=True)
            if kinds.base_model is not None:
                AutoModel.register(kinds.config, kinds.base_model, exist_ok=True)


def _name_adapter_modules(constants: ModuleType) -> None:
    """Add the default target modules of every model type to peft's tables of adapters.

    A type of ours has what peft knows of its library's. Other families name linear layers, for
    methods that adapt any: those that know every library's type that peft knows at all.
    """
    tables = {k: v for k, v in vars(constants).items() if k.endswith("_MODULES_MAPPING")}
    families = _families()
    known = {f.library_type for f in families if any(f.library_type in t for t in tables.values())}
    for family in families:
        for name, table in tables.items():
            if family.library_type in table:
                table.setdefault(family.model_type, table[family.library_type])
            elif family.adapter_modules and known <= table.keys():
                # (IA)³ scales the inputs of feed-forward modules, and the outputs of all others.
                modules = () if "FEEDFORWARD" in name else family.adapter_modules
                table.setdefault(family.model_type, list(modules))


# Each module is patched as soon as it is imported. Tokenizers need no entry: the
# tokenizer_config.json of an exported folder names their class.
_AWAITED: dict[str, Callable[[ModuleType], None]] = {
    "transformers.models.auto.configuration_auto": lambda auto: _on_first_call(
        [auto.AutoConfig], ("from_pretrained", "for_model"), partial(_register, models=False)
    ),
    "transformers.models.auto.modeling_auto": lambda auto: _on_first_call(
        [auto.AutoModel, auto.AutoModelForCausalLM],
        ("from_pretrained", "from_config"),
        partial(_register, models=True),
    ),
    "peft.utils.constants": _name_adapter_modules,
}


def _on_first_call(owners: list[type], names: Sequence[str], register: Callable[[], None]) -> None:
    """Wrap methods of classes so that the first call of one registers and unwraps all."""
    originals = [(owner, name, getattr_static(owner, name)) for owner in owners for name in names]

    def waiting(method: classmethod | staticmethod) -> classmethod | staticmethod:
        @wraps(method.__func__)
        def call(*args, **kwargs):
            for owner, name, original in originals:
                setattr(owner, name, original)
            register()
            return method.__func__(*args, **kwargs)

        wrapped = type(method)(call)
        wrapped._cat_lm_waits = True
        return wrapped

    if not any(hasattr(method, "_cat_lm_waits") for _, _, method in originals):
        for owner, name, method in originals:
            setattr(owner, name, waiting(method))


class _Finder:
    """An import hook that waits for the awaited modules and patches each one after it is loaded."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None):
        spec = PathFinder.find_spec(name, path) if name in _AWAITED else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_look(module: ModuleType) -> None:
                execute(module)
                _AWAITED[name](module)

            spec.loader.exec_module = execute_and_look
        return spec


def install() -> None:
    """Patch the awaited modules that are loaded and wait for the others; safe to repeat."""
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
    for name, look in _AWAITED.items():
        module = sys.modules.get(name)
        if module is not None:
            look(module)
