"""`python -m cat_lm.upcycle FOLDER OUT`: a GPT-NeoX (Pythia) folder as a CAT model, or back.

The filters of the new model are the identity, so that it computes what the original computes;
training then goes on from it (`train.init_from`). `--conv none` turns a CAT model whose filters are
all still the identity into plain GPT-NeoX. Tensors keep their dtype, the tokenizer comes along. The
logits of both folders are compared before OUT appears, which is never half a model.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cat_lm.cli import Parser, add_skip_checksums, whole
from cat_lm.errors import UserError, command
from cat_lm.export import refuse_checkpoints
from cat_lm.export_record import comparing_files, verify
from cat_lm.io.folders import check_output, replaced_folder
from cat_lm.io.readers import read_object
from cat_lm.limits import WINDOW
from cat_lm.model.names import current_name
from cat_lm.model_card import describe_model
from cat_lm.ops.convolution import kinds
from cat_lm.pretrained import (
    OWN_KINDS,
    is_of_tokenizer,
    load_model,
    load_tokenizer,
    load_weights,
    model_config,
    model_folder,
    quiet_transformers,
    skeleton,
)

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import GPTNeoXConfig, PreTrainedModel

TOLERANCE = 1e-5  # of the largest logit
CHECKED_TOKENS = (2, 48)

_NOT_FIELDS = ("model_type", "architectures", "transformers_version", "dtype", "torch_dtype")
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
    """The convolutions of the new model, in the terms of `CatConfig`; `conv_type` none for none."""

    conv_type: str = "head"
    window: int = 21
    streams: str = "qkv"
    mixing: str = "embeddings"
    activation: str = "none"


def upcycle(folder: Path | str, out: Path | str, convolution: Convolution) -> tuple[Path, float]:
    """Writes the model in `folder` with other convolutions, all of them the identity, to `out`.

    Args:
        folder: GPT-NeoX, or a CAT model whose filters are the identity: a transformers folder with
            safetensors or torch weights, in one file or in shards.
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
    _refuse_used(out)
    folder = model_folder(folder)
    source = _read_config(folder)
    _refuse_active(folder, source, convolution)
    target = _target_config(source, convolution)
    model = _model_with(folder, target, _target_weights(folder, source, target))
    with replaced_folder(out) as new:
        model.save_pretrained(new)
        _copy_tokenizer(folder, new)
        difference = _difference_of_logits(folder, new, source.vocab_size)
        if not difference <= TOLERANCE:  # also where it is NaN
            raise UserError(
                f"model {folder}: the new model's logits differ from its own by {difference:.1e} "
                f"of the largest, more than {TOLERANCE:.0e}; {out} was not written"
            )
    return out, difference


def _refuse_used(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"OUT {out}: exists already and is not empty; give a new folder")


def _read_config(folder: Path) -> GPTNeoXConfig:
    config = model_config(folder)
    if config.model_type not in OWN_KINDS:
        raise UserError(
            f"model {folder}: model_type is {config.model_type!r}; only GPT-NeoX ('gpt_neox', as "
            "Pythia is) and CAT ('cat_neox') models can be given convolutions"
        )
    return config


def _refuse_active(folder: Path, source: GPTNeoXConfig, convolution: Convolution) -> None:
    """What makes source or target compute something that no choice of filters undoes."""
    fields = source.to_dict()
    if "silu" in (convolution.activation, fields.get("conv_activation")):
        where = (
            "--activation" if convolution.activation == "silu" else f"model {folder}: activation"
        )
        raise UserError(
            f"{where} silu: SiLU changes the model whatever its filters, so the two cannot compute "
            "the same; use --activation none, or train from scratch with model.conv_activation=silu"
        )
    if convolution.conv_type != "none":
        return
    if source.model_type == "gpt_neox":
        raise UserError(f"model {folder}: is plain GPT-NeoX already; --conv none has nothing to do")
    for key, plain in (("position_embedding", "rope"), ("attention_temperature", 1)):
        value = getattr(source, key)
        if value != plain:
            raise UserError(f"model {folder}: has {key}={value!r}; plain GPT-NeoX has {plain!r}")


def _target_config(source: GPTNeoXConfig, convolution: Convolution) -> GPTNeoXConfig:
    from transformers import GPTNeoXConfig

    from cat_lm.model import CatConfig

    fields = {key: value for key, value in source.to_dict().items() if key not in _NOT_FIELDS}
    if convolution.conv_type == "none":
        known = GPTNeoXConfig().to_dict().keys()
        return GPTNeoXConfig(**{key: value for key, value in fields.items() if key in known})
    if convolution.window > source.max_position_embeddings:
        raise UserError(
            f"--window {convolution.window}: the model reads at most "
            f"{source.max_position_embeddings} tokens; use a window within them"
        )
    fields |= {
        "conv_type": convolution.conv_type,
        "conv_window": convolution.window,
        "conv_streams": convolution.streams,
        "conv_mixing": convolution.mixing,
        "conv_activation": convolution.activation,
        "conv_init": "identity",
    }
    try:
        return CatConfig(**fields)
    except ValueError as error:
        raise UserError(" ".join(str(error).split())) from error


def _target_weights(
    folder: Path, source: GPTNeoXConfig, target: GPTNeoXConfig
) -> dict[str, Tensor]:
    """The tensors of the new model, by the names of its state_dict."""
    from cat_lm.model import CatConfig
    from cat_lm.model.convolution import identity_filters

    weights = load_weights(folder, source)
    if source.tie_word_embeddings:
        weights.setdefault("lm_head.weight", weights["gpt_neox.embed_in.weight"])
    if isinstance(source, CatConfig):
        for name in [
            name for name in skeleton(folder, source).state_dict() if name.endswith("_filter")
        ]:
            unchanged = identity_filters(source, _stream_of(name))
            difference = (weights.pop(name).to(unchanged.dtype) - unchanged).abs().max()
            if not difference == 0:
                raise UserError(
                    f"model {folder}: {name} is no longer the identity (it differs by "
                    f"{difference:.1e}); only convolutions that are all still the identity can be "
                    "taken away or replaced"
                )
    weights = _with_bias_in_place(weights, target)
    dtype = weights["gpt_neox.layers.0.attention.query_key_value.weight"].dtype
    for name in skeleton(folder, target).state_dict():
        if name.endswith("_filter"):
            weights[name] = identity_filters(target, _stream_of(name)).to(dtype)
    return weights


def _stream_of(name: str) -> str:
    """The stream whose filters a parameter is: the `q` of `….q_filter`."""
    return name.rpartition(".")[2].removesuffix("_filter")


def _with_bias_in_place(weights: dict[str, Tensor], target: GPTNeoXConfig) -> dict[str, Tensor]:
    """Name the projections' biases as the target does: they follow its convolutions."""
    convolved = bool(getattr(target, "convolved_streams", ""))
    if convolved:
        return {current_name(name, convolved): tensor for name, tensor in weights.items()}
    return {
        re.sub(r"\.convolution\.bias$", ".query_key_value.bias", name): tensor
        for name, tensor in weights.items()
    }


def _model_with(folder: Path, config: GPTNeoXConfig, weights: dict[str, Tensor]) -> PreTrainedModel:
    model = skeleton(folder, config)
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    return model


def _copy_tokenizer(folder: Path, new: Path) -> None:
    """The tokenizer's files as they are, and generation_config.json."""
    verify(folder, is_of_tokenizer)
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

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, CHECKED_TOKENS, generator=generator)

    def logits(path: Path) -> Tensor:
        # One model at a time: the weights of both may not fit into memory.
        with torch.inference_mode():
            return load_model(path, device="cpu")(ids, use_cache=False).logits

    expected = logits(folder)
    return float((logits(new) - expected).abs().max() / expected.abs().max())


def model_section(config: GPTNeoXConfig) -> dict[str, Any]:
    """The `model:` section of a training configuration that goes on from this model."""
    from cat_lm.config import ModelSection

    values = config.to_dict() | {
        "rotary_pct": config.rope_parameters["partial_rotary_factor"],
        "rope_theta": config.rope_parameters["rope_theta"],
    }
    if config.rope_parameters["rope_type"] == "default":
        values["rope_parameters"] = None  # the two above say it all
    defaults = {name: field.default for name, field in ModelSection.model_fields.items()}
    return {
        name: values[name]
        for name, default in defaults.items()
        if name in values and values[name] != default
    }


@command
def main() -> None:
    parser = Parser(
        prog="python -m cat_lm.upcycle",
        description="Gives a GPT-NeoX (Pythia) model convolutions that change nothing yet, ready "
        "for further training, or takes such convolutions away again.",
    )
    parser.add_argument("folder", help="transformers folder of a GPT-NeoX or CAT model")
    parser.add_argument("out", help="folder to write; must be new or empty")
    parser.add_argument(
        "--conv",
        choices=(*kinds.names(), "none"),
        default="head",
        help="kind of convolution; none makes plain GPT-NeoX (default: head)",
    )
    parser.add_argument("--window", type=whole(WINDOW), help="taps of a filter (default: 21)")
    parser.add_argument("--streams", metavar="qkv", help="some of q, k and v (default: qkv)")
    parser.add_argument(
        "--mixing",
        choices=("embeddings", "maps"),
        help="what a multihead convolution mixes (default: embeddings)",
    )
    parser.add_argument(
        "--activation",
        choices=("none", "silu"),
        help="after a depthwise convolution; silu cannot start as the original (default: none)",
    )
    add_skip_checksums(parser)
    arguments = parser.parse_args()
    given = {
        name: getattr(arguments, name)
        for name in ("window", "streams", "mixing", "activation")
        if getattr(arguments, name) is not None
    }
    if arguments.conv == "none" and given:
        raise UserError(f"--{next(iter(given))}: says nothing with --conv none; leave it out")
    quiet_transformers()
    convolution = Convolution(conv_type=arguments.conv, **given)
    with comparing_files(skip=arguments.skip_checksums):
        out, difference = upcycle(arguments.folder, arguments.out, convolution)
    _print_result(out, difference)


def _print_result(out: Path, difference: float) -> None:
    import yaml

    from cat_lm.model import CatConfig
    from cat_lm.training.initial import UNOFFERED_KEYS

    config = _read_config(out)
    print(f"{out}: {describe_model(config.to_dict())}")
    print(f"logits equal the original's to {difference:.1e} of the largest")
    usual = CatConfig()
    other = [key for key in UNOFFERED_KEYS if getattr(config, key) != getattr(usual, key)]
    if other:
        print(f"train.py cannot go on training it: it has no key for {', '.join(other)}")
    elif config.model_type == "cat_neox":
        section = yaml.safe_dump({"model": model_section(config)}, sort_keys=False)
        print(f"to go on training, with train.init_from={out}:\n{section}", end="")


if __name__ == "__main__":
    main()
