"""`python -m cat_lm.upcycle FOLDER OUT`: a folder of a plain model (Pythia) as CAT, or back.

The filters of the new model are the identity, so that it computes what the original computes;
training then goes on from it (`train.init_from`). `--canon` adds Canon layers that add nothing yet.
`--conv none` turns a CAT model whose filters all still change nothing into the library's plain one.
Tensors keep their dtype, the tokenizer comes along. The logits of both folders are compared before
OUT appears, which is never half a model.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cat_lm import architectures
from cat_lm.core.cli import Parser, add_skip_checksums, output_path, whole
from cat_lm.core.errors import UserError, command
from cat_lm.core.folders import atomic_folder, check_output
from cat_lm.core.numbers import CONV_STATE, WINDOW
from cat_lm.core.readers import read_object
from cat_lm.export import refuse_checkpoints
from cat_lm.model.rules import DEFAULT_WINDOW
from cat_lm.ops.convolution import kinds
from cat_lm.ops.long_filter import filters
from cat_lm.pretrained.card import describe_model
from cat_lm.pretrained.library_model import TOLERANCE, checked_ids, difference_of_logits
from cat_lm.pretrained.loading import (
    is_of_tokenizer,
    load_model,
    load_tokenizer,
    load_weights,
    model_config,
    model_folder,
    quiet_transformers,
    skeleton,
)
from cat_lm.pretrained.record import comparing_files, verify

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

    from cat_lm.architectures import Architecture

_BESIDE_THE_MODEL = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
    "*.model",
)


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

    @property
    def makes_plain(self) -> bool:
        """Return True if the new model has no convolutions at all, and so is the library's."""
        return self.conv_type == self.canon == "none"


def upcycle(folder: Path | str, out: Path | str, convolution: Convolution) -> tuple[Path, float]:
    """Writes the model in `folder` with other convolutions, all of them the identity, to `out`.

    Args:
        folder: a model of an architecture that takes convolutions, its own filters, if it has any,
            being the identity: a transformers folder with safetensors or torch weights, in one
            file or in shards.
        out: a new folder, or an empty one.

    Returns:
        The path of `out`, and how far the logits of both are apart, in parts of the largest.

    Raises:
        UserError: `out` is not empty; `folder` holds no such model, lacks weights, or computes
            something that the new model cannot; or the new model computes something else.
    """
    check_output(out, "OUT")
    out = Path(out)
    refuse_checkpoints(out)
    refuse_used(out)
    folder = model_folder(folder)
    source, architecture = _read_config(folder)
    _refuse_active(folder, source, convolution, architecture)
    target = _target_config(source, convolution, architecture)
    model = _model_with(folder, target, _target_weights(folder, source, target, architecture))
    with atomic_folder(out) as new:
        model.save_pretrained(new)
        copy_tokenizer(folder, new)
        difference = _difference_of_logits(folder, new, source.vocab_size)
        if not difference <= TOLERANCE:  # also where it is NaN
            raise UserError(
                f"model {folder}: the new model's logits differ from its own by {difference:.1e} "
                f"of the largest, more than {TOLERANCE:.0e}; {out} was not written"
            )
    return out, difference


def refuse_used(out: Path) -> None:
    """Refuse an output that is there already. Raises UserError."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"OUT {out}: exists already and is not empty; give a new folder")


def _read_config(folder: Path) -> tuple[PreTrainedConfig, Architecture]:
    config = model_config(folder)
    able = [
        a for name in architectures.names() if (a := architectures.get(name)).takes_convolutions
    ]
    architecture = architectures.find(config)
    if architecture not in able:
        known = ", ".join(kind for other in able for kind in other.model_types)
        raise UserError(
            f"model {folder}: model_type is {config.model_type!r}; only models of {known} can be "
            "given convolutions"
        )
    return config, architecture


def _refuse_active(
    folder: Path, source: PreTrainedConfig, convolution: Convolution, architecture: Architecture
) -> None:
    """Refuse what makes source or target compute something that no filters undo."""
    if source.to_dict().get("conv_activation") == "silu":
        raise UserError(
            f"model {folder}: activation silu: SiLU changes the model whatever its filters, so "
            "that no other convolutions compute the same"
        )
    if not convolution.makes_plain:
        return
    if source.model_type != architecture.model_type:
        raise UserError(
            f"model {folder}: is plain {architecture.title} already; --conv none has nothing to do"
        )
    if architecture.library_type is None:
        raise UserError(
            f"model {folder}: --conv none: transformers has no model of {architecture.name}"
        )
    without = architecture.own_config(source, canon="none")  # whose filters are looked at next
    for problem in architecture.library_problems(without):
        raise UserError(f"model {folder}: {problem}")


def _target_config(
    source: PreTrainedConfig, convolution: Convolution, architecture: Architecture
) -> PreTrainedConfig:
    if convolution.makes_plain:
        return architecture.library_config(source)
    is_long = convolution.filter != filters.TAPS
    windows = {
        "--window": ("none" if is_long else convolution.conv_type, convolution.window),
        "--canon-window": (convolution.canon, convolution.canon_window),
    }
    for option, (used, window) in windows.items():
        if used != "none" and window > source.max_position_embeddings:
            raise UserError(
                f"{option} {window}: the model reads at most "
                f"{source.max_position_embeddings} tokens; use a window within them"
            )
    changes = {
        "conv_type": convolution.conv_type,
        "conv_window": convolution.window,
        "conv_filter": convolution.filter,
        "conv_state": convolution.state,
        "conv_streams": convolution.streams,
        "conv_mixing": convolution.mixing,
        "conv_activation": "none",
        "conv_init": "identity",
        "conv_norm": "none",
        "conv_rank": convolution.rank,
        "canon": convolution.canon,
        "canon_window": convolution.canon_window,
        "canon_init": "zero",
    }
    try:
        return architecture.own_config(source, **changes)
    except ValueError as error:
        raise UserError(" ".join(str(error).split())) from error


def _target_weights(
    folder: Path, source: PreTrainedConfig, target: PreTrainedConfig, architecture: Architecture
) -> dict[str, Tensor]:
    """The tensors of the new model, by the names of its state_dict."""
    weights = load_weights(folder, source)
    if source.tie_word_embeddings:
        weights.setdefault("lm_head.weight", weights[architecture.embedding])
    for name, like in _filters(folder, source).items():
        own = weights.pop(name)
        # As it was stored: the rates of long filters are no numbers of half precision.
        difference = (own - _identity_filter(source, name, like).to(own.dtype)).abs().max()
        if not difference == 0:
            raise UserError(
                f"model {folder}: {name} is no longer the identity (it differs by "
                f"{difference:.1e}); only convolutions that are all still the identity can be "
                "taken away or replaced"
            )
    dtype = weights[architecture.layer_weight.format(layer=0)].dtype
    added = _filters(folder, target)
    convolved = bool(getattr(target, "convolved_streams", ""))
    for name in list(weights):
        new = architecture.own_name(target, name) if convolved else architecture.plain_name(name)
        weights[new] = weights.pop(name)
    for name, like in added.items():
        weights[name] = _identity_filter(target, name, like).to(dtype)
    return weights


def _filters(folder: Path, config: PreTrainedConfig) -> dict[str, Tensor]:
    """Return a model's filters by name, on the meta device."""
    weights = skeleton(folder, config).state_dict()
    return {name: x for name, x in weights.items() if name.endswith("_filter")}


def _identity_filter(config: PreTrainedConfig, name: str, like: Tensor) -> Tensor:
    """Make the filter that changes nothing, for a parameter named `…q_filter` or so.

    That of a Canon layer, named `….canon.A.canon_filter`, adds nothing to what it reads.
    """
    import torch

    from cat_lm.model.streams.operations import Ranks
    from cat_lm.model.streams.pipeline import filter_of

    if name.endswith(".canon_filter"):
        return torch.zeros(like.shape)
    if name.endswith("_rank_filter"):
        return Ranks(filter_of(config)).initial(name.removesuffix("_rank_filter")[-1])
    return filter_of(config).initial(name.removesuffix("_filter")[-1])


def _model_with(
    folder: Path, config: PreTrainedConfig, weights: dict[str, Tensor]
) -> PreTrainedModel:
    model = skeleton(folder, config)
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    return model


def copy_tokenizer(folder: Path, new: Path) -> None:
    """Copy the tokenizer's files as they are, and generation_config.json."""
    verify(folder, is_of_tokenizer)
    if (generation := folder / "generation_config.json").is_file():
        read_object(generation, finite=True)  # a copy of ours is JSON that any reader takes
    for pattern in _BESIDE_THE_MODEL:
        for file in folder.glob(pattern):
            shutil.copyfile(file, new / file.name)
    settings = new / "tokenizer_config.json"
    if not (new / "tokenizer.json").is_file() and not settings.is_file():
        return
    # transformers would guess a missing class from the model's type, which is another one now.
    values = read_object(settings) if settings.is_file() else {}
    if "tokenizer_class" not in values:
        values["tokenizer_class"] = type(load_tokenizer(folder)).__name__
        settings.write_text(json.dumps(values, indent=2, ensure_ascii=False), encoding="utf-8")
    load_tokenizer(new)


def _difference_of_logits(folder: Path, new: Path, vocab_size: int) -> float:
    """The largest difference of the logits in fp32, in parts of the largest logit."""
    import torch

    ids = checked_ids(vocab_size)

    def logits(path: Path) -> Tensor:
        # One model at a time: the weights of both may not fit into memory.
        with torch.inference_mode():
            return load_model(path, device="cpu")(ids, use_cache=False).logits

    expected = logits(folder)
    return difference_of_logits(logits(new), expected)


def model_section(config: PreTrainedConfig) -> dict[str, Any]:
    """The `model:` section of a training configuration that goes on from this model."""
    architecture = architectures.of_config(config)
    fields = architecture.Section.model_fields
    values = architecture.section_values(config)
    said = {name: value for name, value in values.items() if value != fields[name].default}
    if architecture.name != architectures.DEFAULT:
        said = {"architecture": architecture.name} | said
    return said


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
        help="kind of convolution; none makes the plain model (default: head)",
    )
    parser.add_argument("--window", type=whole(WINDOW), help="taps of a filter (default: 21)")
    parser.add_argument(
        "--filter",
        choices=(filters.TAPS, *filters.names()),
        help="for --conv head: exponential and ssm are as long as the text (default: taps)",
    )
    parser.add_argument(
        "--state", type=whole(CONV_STATE), help="numbers of state of such a filter, as in 16"
    )
    parser.add_argument("--streams", metavar="qkv", help="some of q, k and v (default: qkv)")
    parser.add_argument(
        "--mixing",
        choices=("embeddings", "maps"),
        help="what a multihead convolution mixes (default: embeddings)",
    )
    parser.add_argument(
        "--canon", metavar="ACD", help="places of Canon layers, with any --conv (default: none)"
    )
    parser.add_argument(
        "--canon-window", type=whole(WINDOW), help="taps of a Canon layer's filter (default: 4)"
    )
    parser.add_argument(
        "--rank", type=whole(WINDOW), help="of the kernel of scores, for --conv head (default: 1)"
    )
    add_skip_checksums(parser)
    arguments = parser.parse_args()
    names = ("window", "filter", "state", "streams", "mixing", "rank")
    names += ("canon", "canon_window")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    _refuse_idle(arguments.conv, given)
    quiet_transformers()
    convolution = Convolution(conv_type=arguments.conv, **given)
    with comparing_files(skip=arguments.skip_checksums):
        out, difference = upcycle(arguments.folder, arguments.out, convolution)
    _print_result(out, difference)


def _refuse_idle(conv_type: str, given: dict[str, Any]) -> None:
    """Refuse options that say nothing."""
    if given.get("canon", "none") == "none" and "canon_window" in given:
        raise UserError("--canon-window: says nothing without --canon; leave it out")
    idle = [name for name in given if name not in ("canon", "canon_window")]
    if conv_type == "none" and idle:
        raise UserError(f"--{idle[0]}: says nothing with --conv none; leave it out")


def _print_result(out: Path, difference: float) -> None:
    import yaml

    config, architecture = _read_config(out)
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
