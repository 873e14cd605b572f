"""`python -m cat_lm.generate MODEL "prompt"`: text from a trained model.

MODEL is a transformers folder or a run folder with `model/`. The prompt `-` is read from
standard input. Text goes through transformers' own `generate`; on a terminal it appears as it is
made.
"""

from __future__ import annotations

import argparse
import io
import sys
from typing import TYPE_CHECKING, Any

from cat_lm.core.cli import Parser, add_skip_checksums, number, whole
from cat_lm.core.errors import UserError, command
from cat_lm.core.host import GIB
from cat_lm.core.numbers import EXTRAPOLATION, FRACTION, NEW_TOKENS, SAMPLES, SEED, TEMPERATURE
from cat_lm.core.readers import decode
from cat_lm.pretrained.files import reason
from cat_lm.pretrained.loading import (
    check_vocabulary,
    load_model,
    load_tokenizer,
    model_config,
    quiet_transformers,
    refuse_beyond_positions,
)
from cat_lm.pretrained.memory import free_bytes, generation_bytes
from cat_lm.pretrained.record import comparing_files

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import (
        BatchEncoding,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )
    from transformers.generation.streamers import BaseStreamer

_PROMPT_BYTES = 2**24


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> BatchEncoding:
    """The prompt as a batch of one: input_ids and attention_mask, each [1, T] int64.

    No special tokens are added: training text has none but the end-of-document token. What looks
    like one in the prompt is ordinary text, as in data preparation. Raises UserError where the
    prompt gives no token.
    """
    inputs = tokenizer(
        prompt,
        return_tensors="pt",
        add_special_tokens=False,
        split_special_tokens=True,
        return_token_type_ids=False,
    )
    if inputs["input_ids"].shape[1] == 0:
        raise UserError("prompt: is empty; give some text to continue")
    return inputs


def sampling_options(temperature: float, top_p: float, greedy: bool) -> dict[str, Any]:
    """The arguments of `generate` for sampling, or for greedy decoding."""
    if greedy:
        return {"do_sample": False}
    # transformers would cut to the 50 likeliest tokens by default; only what was asked for here.
    return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}


def refuse_nonsense(input_ids: Tensor, scores: Tensor) -> Tensor:
    """Pass finite scores [B, V] on; greedy decoding would take NaN for the likeliest token.

    Raises:
        UserError: they are not numbers, whatever the weights are.
    """
    if scores.isnan().any() or scores.isposinf().any() or scores.isneginf().all():
        raise UserError(
            "the model's scores of the next token are not finite: its weights are damaged, or its "
            "training has diverged; take another model or an earlier checkpoint"
        )
    return scores


def continue_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    max_new_tokens: int,
    options: dict[str, Any],
    streamer: BaseStreamer | None = None,
) -> str:
    """The text that `model.generate` adds to `prompt`, without special tokens.

    Args:
        options: see `sampling_options`.
        streamer: gets the tokens as they are made.
    """
    inputs = encode_prompt(tokenizer, prompt).to(model.device)
    options = {**options, "max_new_tokens": max_new_tokens, "streamer": streamer}
    options["logits_processor"] = [refuse_nonsense]
    try:
        ids = model.generate(**inputs, **options)[0]
    except (ArithmeticError, AssertionError, ImportError, TypeError, ValueError) as error:
        # Whatever else the folder's generation_config.json asks for, transformers looks at it here.
        raise UserError(
            f"model {model.name_or_path}: cannot generate with its generation_config.json: "
            f"{reason(error)}"
        ) from error
    # Decoding the new tokens alone would lose a leading space in sentencepiece vocabularies.
    start = len(tokenizer.decode(inputs["input_ids"][0], skip_special_tokens=True))
    return tokenizer.decode(ids, skip_special_tokens=True)[start:]


def _parse_arguments() -> argparse.Namespace:
    parser = Parser(
        prog="python -m cat_lm.generate", description="Continues a prompt with a trained model."
    )
    parser.add_argument("model", help="transformers folder, or run folder with model/")
    parser.add_argument("prompt", help="text to continue; - reads it from standard input")
    parser.add_argument("--max-new-tokens", type=whole(NEW_TOKENS), default=100, metavar="N")
    parser.add_argument("--temperature", type=number(TEMPERATURE), default=0.8)
    parser.add_argument("--top-p", type=number(FRACTION, above=0), default=0.95)
    parser.add_argument("--greedy", action="store_true", help="the likeliest token every time")
    parser.add_argument("--num-samples", type=whole(SAMPLES), default=1, metavar="N")
    parser.add_argument("--seed", type=whole(SEED), default=0)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, …")
    add_skip_checksums(parser)
    arguments = parser.parse_args()
    if arguments.greedy and arguments.num_samples > 1:
        raise UserError("--num-samples: greedy decoding gives one continuation only")
    return arguments


def _read_prompt(text: str) -> str:
    """The prompt: `text`, or standard input for "-". Raises UserError where it cannot be used."""
    if text == "-":
        if sys.stdin is None:
            raise UserError("prompt -: there is no standard input")
        given = sys.stdin.buffer.read(_PROMPT_BYTES + 1)
        if len(given) > _PROMPT_BYTES:
            raise UserError(
                f"prompt -: standard input holds more than {_PROMPT_BYTES >> 20} MiB, which no "
                "model reads"
            )
        # With the ends of lines that text has on every system.
        text = io.StringIO(decode(given, "prompt -"), newline=None).read()
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError("prompt: is not UTF-8 text") from None
    if not text.strip():
        raise UserError("prompt: is empty; give some text to continue")
    return text


def _check_length(config: PreTrainedConfig, prompt_tokens: int, new_tokens: int) -> None:
    """Raise UserError for lengths that cannot be meant for the model."""
    trained = getattr(config, "max_position_embeddings", None)
    if trained and prompt_tokens + new_tokens > trained * EXTRAPOLATION.high:
        raise UserError(
            f"prompt: its {prompt_tokens:,} tokens and --max-new-tokens {new_tokens:,} are more "
            f"than {EXTRAPOLATION.high} times the {trained:,} that the model was trained on; "
            f"together they must be at most {trained * EXTRAPOLATION.high:,}"
        )
    # The last new token is not read.
    given = f"prompt: its {prompt_tokens:,} tokens and --max-new-tokens {new_tokens:,}"
    refuse_beyond_positions(config, prompt_tokens + new_tokens - 1, given)


def _note_length(config: PreTrainedConfig, prompt_tokens: int, new_tokens: int) -> None:
    trained = getattr(config, "max_position_embeddings", None)
    total = prompt_tokens + new_tokens
    if trained and total > trained:
        print(
            f"note: up to {total} tokens, but the model was trained on {trained}; "
            "what lies beyond is extrapolation",
            file=sys.stderr,
        )


def _check_memory(model: PreTrainedModel, prompt_tokens: int, new_tokens: int) -> None:
    """Raises UserError where prompt and continuation need more memory than is free."""
    settings = model.generation_config
    rows = max(settings.num_beams or 1, settings.num_return_sequences or 1)
    needed = generation_bytes(model, rows, prompt_tokens, new_tokens)
    free = free_bytes(model.device)
    if free is not None and needed > free:
        raise UserError(
            f"prompt: its {prompt_tokens:,} tokens and --max-new-tokens {new_tokens:,} do not fit "
            f"into memory (about {needed / GIB:.2g} GiB needed, {free / GIB:.2g} free); give fewer"
        )


@command
def main() -> None:
    arguments = _parse_arguments()
    prompt = _read_prompt(arguments.prompt)
    quiet_transformers()
    with comparing_files(skip=arguments.skip_checksums):
        # All that is cheap before the weights.
        config = model_config(arguments.model)
        tokenizer = load_tokenizer(arguments.model)
        check_vocabulary(tokenizer, config)
        tokens = encode_prompt(tokenizer, prompt)["input_ids"].shape[1]
        _check_length(config, tokens, arguments.max_new_tokens)
        model = load_model(arguments.model, device=arguments.device)
    _check_memory(model, tokens, arguments.max_new_tokens)
    _note_length(config, tokens, arguments.max_new_tokens)
    _write_samples(model, tokenizer, prompt, arguments)


def _write_samples(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    arguments: argparse.Namespace,
) -> None:
    import torch
    from transformers import TextStreamer

    options = sampling_options(arguments.temperature, arguments.top_p, arguments.greedy)
    live = sys.stdout.isatty()
    torch.manual_seed(arguments.seed)
    for index in range(arguments.num_samples):
        if arguments.num_samples > 1:
            print(f"--- sample {index + 1}")
        streamer = TextStreamer(tokenizer, skip_special_tokens=True) if live else None
        text = continue_text(model, tokenizer, prompt, arguments.max_new_tokens, options, streamer)
        if not live:
            print(prompt + text)


if __name__ == "__main__":
    main()
