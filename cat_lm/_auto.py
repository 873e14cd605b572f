"""Makes transformers' Auto classes and peft know our models, at no cost for the import.

Registering needs the models' classes, hence torch and transformers, and the modules of transformers
import each other in circles, so it can be done neither on `import cat_lm` nor while one loads.
Instead the Auto classes' entry points (`from_pretrained`, `from_config`, `for_model`) are wrapped:
their first call registers the models and puts the original methods back. Auto modules that are not
loaded yet are awaited by a finder on `sys.meta_path`. So is peft's module of target modules.

torch calls `install` at the end of its own import, by `launch/cat_lm_entry.py`. Programs that know
nothing of cat_lm, such as lm_eval, then open the models too.
"""

from __future__ import annotations

import functools
import importlib.machinery
import sys
import warnings
from collections.abc import Callable, Sequence
from inspect import getattr_static
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cat_lm.architectures import Architecture


def _architectures() -> list[Architecture]:
    """List all families; those of a plugin that is broken are missed, and that is said.

    A program that opens other models must go on.
    """
    from cat_lm import architectures
    from cat_lm.core.errors import UserError

    try:
        names = architectures.names()
    except UserError as error:
        warnings.warn(f"cat_lm: {error}", stacklevel=2)
        return list(architectures.built_in())
    return [architectures.get(name) for name in names]


def _register_configs() -> None:
    from transformers import AutoConfig

    for architecture in _architectures():
        AutoConfig.register(architecture.model_type, architecture.config_class(), exist_ok=True)


def _register_models() -> None:
    from transformers import AutoModel, AutoModelForCausalLM

    _register_configs()
    for architecture in _architectures():
        kinds = architecture.classes()
        AutoModelForCausalLM.register(kinds.config, kinds.causal_lm, exist_ok=True)
        if kinds.base_model is not None:
            AutoModel.register(kinds.config, kinds.base_model, exist_ok=True)


def _await_config_use(auto: ModuleType) -> None:
    _register_on_first_call([auto.AutoConfig], ("from_pretrained", "for_model"), _register_configs)


def _await_model_use(auto: ModuleType) -> None:
    owners = [auto.AutoModel, auto.AutoModelForCausalLM]
    _register_on_first_call(owners, ("from_pretrained", "from_config"), _register_models)


def _name_adapter_modules(constants: ModuleType) -> None:
    """Enter what adapters go to, where nobody says, into peft's tables by type of model.

    A type of ours has what peft knows of its library's. Other families name linear layers, for
    methods that adapt any: those that know every library's type that peft knows at all.
    """
    tables = {k: v for k, v in vars(constants).items() if k.endswith("_MODULES_MAPPING")}
    families = _architectures()
    known = {f.library_type for f in families if any(f.library_type in t for t in tables.values())}
    for family in families:
        for name, table in tables.items():
            if family.library_type in table:
                table.setdefault(family.model_type, table[family.library_type])
            elif family.adapter_modules and known <= table.keys():
                # (IA)³ scales the inputs of feed-forward modules, the outputs of others.
                modules = () if "FEEDFORWARD" in name else family.adapter_modules
                table.setdefault(family.model_type, list(modules))


# What is done once a module is there, and its last name but for functions. Tokenizers need no
# entry: the tokenizer_config.json of an exported folder names their class.
_AWAITED: dict[str, tuple[str, Callable[[ModuleType], None]]] = {
    "transformers.models.auto.configuration_auto": ("AutoConfig", _await_config_use),
    "transformers.models.auto.modeling_auto": ("AutoModelForCausalLM", _await_model_use),
    "peft.utils.constants": ("DUMMY_MODEL_CONFIG", _name_adapter_modules),
}


def _register_on_first_call(
    owners: Sequence[type], names: Sequence[str], register: Callable[[], None]
) -> None:
    """Wraps methods of `owners` so that the first call of one registers and unwraps all."""
    originals = [(owner, name, getattr_static(owner, name)) for owner in owners for name in names]
    if any(hasattr(original, "_cat_lm_waits") for _, _, original in originals):
        return

    def restore_and_register() -> None:
        for owner, name, original in originals:
            setattr(owner, name, original)
        register()

    for owner, name, original in originals:
        setattr(owner, name, _calling_first(restore_and_register, original))


def _calling_first(action: Callable[[], None], method: classmethod | staticmethod):
    function = method.__func__

    @functools.wraps(function)
    def call(*args, **kwargs):
        action()
        return function(*args, **kwargs)

    wrapped = type(method)(call)
    wrapped._cat_lm_waits = True
    return wrapped


class _AutoModuleFinder:
    """Finds the Auto modules as the other finders would, and looks at them once they are loaded."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _AWAITED:
            return None
        for finder in sys.meta_path:
            if _is_ours(finder):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                _call_after_execution(spec.loader, _AWAITED[name][1])
                return spec
        return None


def _is_ours(finder: object) -> bool:
    # By name, because a reload of this module makes another class of it.
    return type(finder).__name__ == _AutoModuleFinder.__name__


def _call_after_execution(loader, look: Callable[[ModuleType], None]) -> None:
    execute = loader.exec_module

    def execute_and_look(module: ModuleType) -> None:
        execute(module)
        look(module)

    loader.exec_module = execute_and_look


def _call_after_definition(
    module: ModuleType, last: str, look: Callable[[ModuleType], None]
) -> None:
    """Looks at a module that is being executed on the first use of it that finds `last`."""
    original = type(module)

    class Executing(original):
        def __getattribute__(self, name: str):
            if last in original.__getattribute__(self, "__dict__"):
                self.__class__ = original
                look(self)
            return original.__getattribute__(self, name)

    module.__class__ = Executing


def install() -> None:
    """Wraps the loaded Auto modules and waits for the others; safe to repeat."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not _is_ours(finder)]
    sys.meta_path.insert(0, _AutoModuleFinder())
    for name, (last, look) in _AWAITED.items():
        module = sys.modules.get(name)
        if hasattr(module, last):
            look(module)
        elif module is not None:
            # torch, and so this function, may be imported while transformers is.
            _call_after_definition(module, last, look)
