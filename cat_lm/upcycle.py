"""`python -m cat_lm.upcycle FOLDER OUT`: a folder of a plain model (Pythia) as CAT, or back.

The filters of the new model are the identity, so that it computes what the original computes;
training then goes on from it (`train.init_from`). `--canon` adds Canon layers that add nothing yet.
`--conv none` turns a CAT model whose filters all still change nothing into the library's plain one.
Tensors keep their dtype, the tokenizer comes along. The logits of both folders are compared before
OUT appears, which is never half a model.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cat_lm import architectures
from cat_lm.core.cli import Parser, add_skip_checksums, output_path, whole
from cat_lm.core.errors import UserError, command
from cat_lm.core.folders import atomic_folder
from cat_lm.core.numbers import CONV_STATE, WINDOW
from cat_lm.core.readers import read_object
from cat_lm.export import check_new
from cat_lm.model.attention.settings import refuse
from cat_lm.model.rules import DEFAULT_WINDOW, tap_problems
from cat_lm.ops.convolution import kinds
from cat_lm.ops.long_filter import filters
from cat_lm.pretrained import conversion, loading
from cat_lm.pretrained.card import describe_model
from cat_lm.pretrained.record import comparing_files

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig

    from cat_lm.architectures import Architecture


@dataclass(frozen=True)
class Convolution:
    """The convolutions of the new model, in the terms of `model:`; `conv_type` none for none."""

    conv_type: str = "head"
    window: int = DEFAULT_WINDOW
    filter: str = filters.TAPS
    state: int = 0
    streams: str = "qkv"
    mixing: str = "embeddings"
    canon: str = "none"
    canon_window: int = 4
    rank: int = 1


def upcycle(folder: Path | str, out: Path | str, convolution: Convolution) -> tuple[Path, float]:
    """Write the model in `folder` with other convolutions, all of them the identity, to `out`.

    Args:
        folder: a transformers folder of a model of an architecture that takes convolutions, its own
            filters, if it has any, being the identity.
        out: a new folder, or an empty one.

    Returns:
        The path of `out`, and how far the logits of both are apart, in parts of the largest.

    Raises:
        UserError: `out` is not empty; `folder` holds no such model, lacks weights, or computes
            something that the new model cannot; or the new model computes something else.
    """
    out = check_new(out)
    folder = loading.model_folder(folder)
    source = loading.model_config(folder)
    architecture = architectures.find(source)
    if architecture is None or not architecture.takes_convolutions:
        problem = f"model_type is {source.model_type!r}, whose models cannot be given convolutions"
        raise UserError(f"model {folder}: {problem}")
    target = _target_config(folder, source, convolution, architecture)
    model = conversion.model_with(target, _target_weights(folder, target, architecture))
    with atomic_folder(out) as new:
        model.save_pretrained(new)
        copy_tokenizer(folder, new)
        # One model at a time: the weights of both may not fit into memory.
        expected = conversion.logits_of(loading.load_model(folder, device="cpu"))
        found = conversion.logits_of(loading.load_model(new, device="cpu"))
        what = f"model {folder}: its logits and those of the new model"
        difference = conversion.compare_logits(found, expected, what, f"{out} was not written")
    return out, difference


def _target_config(
    folder: Path, source: PreTrainedConfig, convolution: Convolution, architecture: Architecture
) -> PreTrainedConfig:
    if source.to_dict().get("conv_activation") == "silu":
        raise UserError(
            f"model {folder}: activation silu: SiLU changes the model whatever its filters, so "
            "that no other convolutions compute the same"
        )
    if convolution.conv_type == convolution.canon == "none":
        return _plain_config(folder, source, architecture)
    changes = {
        name if name.startswith(("conv", "canon")) else f"conv_{name}": value
        for name, value in asdict(convolution).items()
    }
    changes |= {"conv_activation": "none", "conv_init": "identity", "conv_norm": "none"}
    changes |= {"canon_init": "zero", "conv_options": None}
    try:
        target = architecture.own_config(source, **changes)
        windows = architectures.section_of(target).windows
        refuse(tap_problems(windows, target.max_position_embeddings))
        return target
    except ValueError as error:
        raise UserError(" ".join(str(error).split())) from error


def _plain_config(
    folder: Path, source: PreTrainedConfig, architecture: Architecture
) -> PreTrainedConfig:
    if source.model_type != architecture.model_type:
        raise UserError(
            f"model {folder}: is plain {architecture.title} already; --conv none has nothing to do"
        )
    if architecture.library_type is None:
        raise UserError(
            f"model {folder}: --conv none: transformers has no model of {architecture.name}"
        )
    without = architecture.own_config(source, canon="none")  # Its filters are examined next.
    for problem in architecture.library_problems(without):
        raise UserError(f"model {folder}: {problem}")
    return architectures.library_config(source)


def _target_weights(
    folder: Path, target: PreTrainedConfig, architecture: Architecture
) -> dict[str, Tensor]:
    import torch

    source = loading.load_model(folder, dtype="auto", device="cpu")
    weights = dict(source.state_dict())
    for name, identity in _identity_filters(source.config).items():
        own = weights.pop(name)
        # As it was stored: the rates of long filters are no numbers of half precision.
        if not torch.equal(own, identity.to(own.dtype)):
            raise UserError(
                f"model {folder}: {name} is no longer the identity; only convolutions that are all "
                "still the identity can be taken away or replaced"
            )
    dtype = weights[architecture.layer_weight.format(layer=0)].dtype
    for name in list(weights):
        weights[architecture.own_name(target, name)] = weights.pop(name)
    filters_of_target = _identity_filters(target)
    return weights | {name: x.to(dtype) for name, x in filters_of_target.items()}


def _identity_filters(config: PreTrainedConfig) -> dict[str, Tensor]:
    """Make the filters of a model, by name, with which its convolutions change nothing."""
    import torch

    from cat_lm.model.streams.operations import Ranks
    from cat_lm.model.streams.pipeline import filter_of

    found = {}
    for name, parameter in conversion.empty_model(config).state_dict().items():
        if name.endswith(".canon_filter"):  # Its output is added to its input.
            found[name] = torch.zeros(parameter.shape)
        elif name.endswith("_rank_filter"):
            found[name] = Ranks(filter_of(config)).initial(name.removesuffix("_rank_filter")[-1])
        elif name.endswith("_filter"):
            found[name] = filter_of(config).initial(name.removesuffix("_filter")[-1])
    return found


def copy_tokenizer(folder: Path, new: Path) -> None:
    """Write the tokenizer of `folder`, if it has any, and its generation_config.json to `new`."""
    if (generation := folder / "generation_config.json").is_file():
        read_object(generation, finite=True)  # Check that the copied file is valid JSON.
        shutil.copyfile(generation, new / generation.name)
    if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        loading.load_tokenizer(folder).save_pretrained(new)


def model_section(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the `model:` section of a training configuration that goes on from this model."""
    architecture = architectures.of_config(config)
    fields = architecture.Section.model_fields
    values = architecture.section_values(config)
    chosen = {name: value for name, value in values.items() if value != fields[name].default}
    if architecture.name != architectures.DEFAULT:
        chosen = {"architecture": architecture.name} | chosen
    return chosen


# Fields of `Convolution`, whose values are checked with the model's configuration.
_OPTIONS = {
    "window": (whole(WINDOW), "taps of a filter (default: 21)"),
    "filter": (None, "for --conv head: taps (default); exponential, ssm: as long as the text"),
    "state": (whole(CONV_STATE), "numbers of state of such a filter, as in 16"),
    "streams": (None, "some of q, k and v (default: qkv)"),
    "mixing": (None, "what a multihead convolution mixes: embeddings (default) or maps"),
    "canon": (None, "places of Canon layers, such as ACD, with any --conv (default: none)"),
    "canon_window": (whole(WINDOW), "taps of a Canon layer's filter (default: 4)"),
    "rank": (whole(WINDOW), "of the kernel of scores, for --conv head (default: 1)"),
}


@command
def main() -> None:
    parser = Parser(
        prog="python -m cat_lm.upcycle",
        description="Gives a plain model (Pythia) convolutions that change nothing yet, ready "
        "for further training, or takes such convolutions away again.",
    )
    parser.add_argument("folder", help="transformers folder of the model")
    parser.add_argument("out", type=output_path, help="folder to write; must be new or empty")
    parser.add_argument(
        "--conv",
        choices=(*kinds.names(), "none"),
        default="head",
        help="type of convolution; none makes the plain model (default: head)",
    )
    for name, (kind, text) in _OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=text)
    add_skip_checksums(parser)
    arguments = vars(parser.parse_args())
    folder, out, skip = (arguments.pop(name) for name in ("folder", "out", "skip_checksums"))
    conv_type = arguments.pop("conv")
    given = {name: value for name, value in arguments.items() if value is not None}
    idle = [name for name in given if name not in ("canon", "canon_window")]
    if conv_type == "none" and idle:
        raise UserError(f"--{idle[0]}: says nothing with --conv none; leave it out")
    if "canon_window" in given and "canon" not in given:
        raise UserError("--canon-window: says nothing without --canon; leave it out")
    loading.begin(folder)
    with comparing_files(skip=skip):
        out, difference = upcycle(folder, out, Convolution(conv_type, **given))
    _print_result(out, difference)


def _print_result(out: Path, difference: float) -> None:
    import yaml

    config = loading.model_config(out)
    architecture = architectures.of_config(config)
    print(f"{out}: {describe_model(config)}")
    print(f"logits equal the original's to {difference:.1e} of the largest")
    usual = architecture.config_class()()
    other = [
        key for key in architecture.unoffered_keys if getattr(config, key) != getattr(usual, key)
    ]
    if other:
        print(f"train.py cannot go on training it: it has no key for {', '.join(other)}")
    elif config.model_type == architecture.model_type:
        section = yaml.safe_dump({"model": model_section(config)}, sort_keys=False)
        print(f"to go on training, with train.init_from={out}:\n{section}", end="")


if __name__ == "__main__":
    main()
