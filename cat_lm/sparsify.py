"""`python -m cat_lm.sparsify FOLDER OUT --block B --top-k K`: landmark attention for a dense model.

The weights stay as they are: queries then attend to the blocks that landmarks find, see
`cat_lm.model.attention.modules.landmark`. `--filter learned --calibrate DATA` learns the landmarks'
filters, and nothing else; `--filter ssm --state N` filters as long as the text. Before OUT appears,
the logits of the new model with all blocks chosen are compared with the original's. Tensors keep
their dtype, the tokenizer comes along.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cat_lm import architectures
from cat_lm.core.cli import Parser, add_skip_checksums, output_path, whole
from cat_lm.core.errors import UserError, command
from cat_lm.core.folders import atomic_folder
from cat_lm.core.numbers import CONTEXT, CONV_STATE, TOKENS, Range
from cat_lm.export import check_new
from cat_lm.model import attention
from cat_lm.model.attention.patterns.landmark import ENTRY, filter_names
from cat_lm.ops.landmark.options import SHARES
from cat_lm.ops.long_filter import filters
from cat_lm.pretrained import loading
from cat_lm.pretrained.card import describe_model
from cat_lm.pretrained.conversion import compare_logits, logits_of, model_with, own_config
from cat_lm.pretrained.record import comparing_files
from cat_lm.upcycle import copy_tokenizer

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Calibration:
    """The prepared folder that filters are learned from, and how many of its tokens."""

    data: Path | str
    tokens: int


def sparsify(
    folder: Path | str,
    out: Path | str,
    options: dict[str, Any],
    calibration: Calibration | None = None,
) -> tuple[Path, float, tuple[float, float] | None]:
    """Write the model in `folder` with landmark attention to `out`.

    Args:
        folder: a transformers folder of a model with softmax attention over all keys, or with
            landmark attention, which gets other options.
        out: a new folder, or an empty one.
        options: `attention_options`.
        calibration: for filters that are learned; without it they are those of `folder`.

    Returns:
        The path of `out`; how far the logits with all blocks chosen are from those of softmax
        attention, in parts of the largest; and the filters' loss before and after calibration.

    Raises:
        UserError: `out` is not empty; `folder` holds no such model; options that are wrong, or
            filters that come from nowhere; data that do not serve; or the logits differ.
    """
    out = check_new(out)
    folder = loading.model_folder(folder)
    source = loading.model_config(folder)
    dense = _with_attention(folder, source, "softmax", None)
    target = _with_attention(folder, source, "landmark", options)
    keeps_filters = ENTRY.keeps_parameters(_options_of(source), options)
    name = options.get("filter", "box")
    if calibration is not None and not _learns(options):
        raise UserError(
            f"--calibrate {calibration.data}: says nothing with --filter {name}; give --filter "
            f"learned, or {' or '.join(filters.names())} with --state N"
        )
    if calibration is None and _learns(options) and not keeps_filters:
        raise UserError(
            f"--filter {name}: model {folder} has no learned filters of {options['block']} "
            "tokens; give --calibrate DATA to learn them"
        )
    weights = loading.load_model(folder, dtype="auto", device="cpu").state_dict()
    if not keeps_filters:
        # Numbers of another filter, which may be as many.
        weights = {name: x for name, x in weights.items() if attention.PATTERNS_OWN not in name}
    losses = None
    if calibration is not None:
        losses = _calibrate(target, weights, calibration)
    all_blocks = options | {"top_k": source.max_position_embeddings}
    every = _with_attention(folder, source, "landmark", all_blocks)
    what = f"model {folder}: its logits and those with all blocks chosen"
    found, expected = (logits_of(model_with(config, weights).float()) for config in (every, dense))
    difference = compare_logits(found, expected, what, f"{out} was not written")
    with atomic_folder(out) as new:
        model_with(target, weights).save_pretrained(new)
        copy_tokenizer(folder, new)
    return out, difference, losses


def dense_model(folder: Path | str) -> PreTrainedModel:
    """Load the model in `folder` in fp32 with softmax attention, without filters of landmarks.

    Raises UserError where it is none that could have landmark attention.
    """
    folder = loading.model_folder(folder)
    source = loading.model_config(folder)
    _with_attention(folder, source, "landmark", None)
    weights = loading.load_model(folder, device="cpu").state_dict()
    return model_with(_with_attention(folder, source, "softmax", None), weights)


def _calibrate(
    target: PreTrainedConfig, weights: dict[str, Tensor], calibration: Calibration
) -> tuple[float, float]:
    from cat_lm.model.attention.modules.landmark import LandmarkCore, train_landmarks
    from cat_lm.training.landmark_calibration import QUERIES, calibrate, first_and_last_loss

    dtype = next(iter(weights.values())).dtype
    model = model_with(target, weights).float().to(loading.choose_device())
    train_landmarks(model, "guided", QUERIES)
    cores = [module.train() for module in model.modules() if isinstance(module, LandmarkCore)]
    learned = [parameter for core in cores for parameter in core.parameters()]
    length = target.max_position_embeddings
    losses = calibrate(model, learned, calibration.data, calibration.tokens, length)
    own = {name: x for name, x in model.state_dict().items() if attention.PATTERNS_OWN in name}
    weights.update({name: x.to("cpu", dtype) for name, x in own.items()})
    return first_and_last_loss(losses)


def _options_of(source: PreTrainedConfig) -> dict[str, Any]:
    return getattr(source, "attention_options", None) or {}


def _learns(options: dict[str, Any]) -> bool:
    return options.get("filter") == "learned" or options.get("filter_state", 0) > 0


def _with_attention(
    folder: Path, source: PreTrainedConfig, pattern: str, options: dict[str, Any] | None
) -> PreTrainedConfig:
    """Return a model's configuration with another attention pattern and all else unchanged.

    Raises UserError where its attention cannot be made sparse, or for options that are wrong.
    """
    architecture = architectures.find(source)
    if architecture is None or "attention_options" not in architecture.Section.model_fields:
        problem = f"model_type is {source.model_type!r}, whose attention cannot be made sparse"
        raise UserError(f"model {folder}: {problem}")
    entry = attention.pattern(own_config(source))
    if entry.name not in ("softmax", "landmark"):
        title = f"{entry.title} (attention={entry.name})"
        raise UserError(f"model {folder}: has {title}; only one softmax can be made sparse")
    try:
        return own_config(source, attention=pattern, attention_options=options)
    except ValueError as error:
        raise UserError(" ".join(str(error).split())) from error


_STATE, _TOKENS = whole(CONV_STATE.at_least(1)), whole(TOKENS.at_least(1))


@command
def main() -> None:
    parser = Parser(
        prog="python -m cat_lm.sparsify",
        description="Gives a trained model landmark attention: each query reads its own block of "
        "keys, those before it, and those that their landmarks say matter to it.",
    )
    add, positive = parser.add_argument, whole(CONTEXT)
    long = " and ".join(filters.names())
    add("folder", help="transformers folder of the model")
    add("out", type=output_path, help="folder to write; must be new or empty")
    add("--block", type=positive, required=True, help="tokens per block")
    chosen = "blocks that a query chooses; 0 reads the nearest ones alone"
    add("--top-k", type=whole(Range(0, CONTEXT.high)), required=True, help=chosen)
    local = "blocks near the query that it always reads, its own being one (default: 2)"
    add("--local", type=positive, default=2, help=local)
    add("--sink", action="store_true", help="always read the first block too")
    sums = "sums a block's keys (default: box)"
    add("--filter", choices=filter_names(), default="box", help=sums)
    state = (
        f"of --filter {long}, as long as the text and learned: numbers of state for each channel"
    )
    add("--state", type=_STATE, dest="filter_state", metavar="N", help=state)
    add("--calibrate", metavar="DATA", help="prepared folder to train filters on")
    add("--tokens", type=_TOKENS, help="tokens of DATA to read (default: 1,000,000)")
    share = "who chooses blocks: each head of keys, or the layer (default: head)"
    add("--share", choices=SHARES, default="head", help=share)
    add_skip_checksums(parser)
    options = vars(parser.parse_args())
    folder, out, skip = (options.pop(name) for name in ("folder", "out", "skip_checksums"))
    data, tokens = options.pop("calibrate"), options.pop("tokens")
    if options["filter_state"] is None:
        del options["filter_state"]
    if tokens is not None and data is None:
        raise UserError(f"--tokens {tokens}: says nothing without --calibrate")
    calibration = None if data is None else Calibration(data, tokens or 1_000_000)
    loading.begin(folder)
    with comparing_files(skip=skip):
        out, difference, losses = sparsify(folder, out, options, calibration)
    _print_result(folder, out, options, difference, losses)


def _print_result(
    folder: str,
    out: Path,
    options: dict[str, Any],
    difference: float,
    losses: tuple[float, float] | None,
) -> None:
    config = loading.model_config(out)
    print(f"{out}: {describe_model(config)}")
    equal = f"equal those of all keys to {difference:.1e} of the largest"
    print(f"with all blocks chosen, logits {equal}")
    before = _options_of(loading.model_config(folder))
    if _learns(before) and not ENTRY.keeps_parameters(before, options):
        name, block = before["filter"], before["block"]
        print(f"the model's own landmarks (filter={name}, block={block}) are left out")
    if losses is not None:
        print(f"landmark loss {losses[0]:.4f} at first, {losses[1]:.4f} at last")
    blocks = options["top_k"] + options["local"] + options["sink"]
    length = config.max_position_embeddings
    share = min(1.0, blocks * options["block"] / length)
    print(f"a query at {length} tokens reads at most {share:.0%} of the keys")


if __name__ == "__main__":
    main()
