"""`python -m cat_lm.generate MODEL "prompt"`: text from a trained model.

MODEL is a transformers folder or a run folder with `model/`. The prompt `-` is read from
standard input. Text goes through transformers' own `generate`; on a terminal it appears as it is
made.
"""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Any

from cat_lm.core.cli import Parser, add_skip_checksums, number, whole
from cat_lm.core.errors import UserError, command
from cat_lm.core.host import GIB
from cat_lm.core.numbers import FRACTION, NEW_TOKENS, SAMPLES, SEED, TEMPERATURE
from cat_lm.core.readers import decode
from cat_lm.pretrained import loading
from cat_lm.pretrained.memory import free_bytes, generation_bytes
from cat_lm.pretrained.record import comparing_files

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase
    from transformers.generation.streamers import BaseStreamer


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> BatchEncoding:
    """Encode the prompt as a batch of one: input_ids and attention_mask, each [1, T] int64.

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
    """Return the arguments of `generate` for sampling, or for greedy decoding."""
    if greedy:
        return {"do_sample": False}
    # transformers would keep the 50 likeliest tokens by default, so that is switched off.
    return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}


def refuse_nonsense(input_ids: Tensor, scores: Tensor) -> Tensor:
    """Return scores [B, V] unchanged if they are numbers; greedy decoding would choose NaN as the
    maximum.

    Raises UserError where they are not numbers, whatever the weights are.
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
    """Return the text that `model.generate` adds to `prompt`, without special tokens.

    `options` are those of `sampling_options`; `streamer` gets the tokens as they are made.
    """
    inputs = encode_prompt(tokenizer, prompt).to(model.device)
    options = {**options, "max_new_tokens": max_new_tokens, "streamer": streamer}
    options["logits_processor"] = [refuse_nonsense]
    try:
        ids = model.generate(**inputs, **options)[0]
    except (ArithmeticError, AssertionError, ImportError, TypeError, ValueError) as error:
        # transformers reads the other settings of the folder's generation_config.json only here.
        raise UserError(
            f"model {model.name_or_path}: cannot generate with its generation_config.json: "
            f"{loading.reason(error)}"
        ) from error
    # Decoding the new tokens by themselves would lose a leading space in sentencepiece
    # vocabularies.
    start = len(tokenizer.decode(inputs["input_ids"][0], skip_special_tokens=True))
    return tokenizer.decode(ids, skip_special_tokens=True)[start:]


def _read_prompt(text: str) -> str:
    if text == "-":
        given = sys.stdin.buffer.read() if sys.stdin is not None else b""
        # Normalise the line ends, as text files of every system do.
        text = io.StringIO(decode(given, "prompt -"), newline=None).read()
    text = decode(text.encode("utf-8", "surrogateescape"), "prompt")
    if not text.strip():
        raise UserError("prompt: is empty; give some text to continue")
    return text


def _check_memory(model: PreTrainedModel, prompt_tokens: int, new_tokens: int) -> None:
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
    parser = Parser(
        prog="python -m cat_lm.generate", description="Continues a prompt with a trained model."
    )
    parser.add_argument("model", help="transformers folder, or run folder with model/")
    parser.add_argument("prompt", help="text to continue; - reads it from standard input")
    parser.add_argument("--max-new-tokens", type=whole(NEW_TOKENS), default=100, metavar="N")
    parser.add_argument("--temperature", type=number(TEMPERATURE), default=0.8)
    parser.add_argument("--top-p", type=number(FRACTION, above=0), default=0.95)
    parser.add_argument("--greedy", action="store_true", help="always choose the most likely token")
    parser.add_argument("--num-samples", type=whole(SAMPLES), default=1, metavar="N")
    parser.add_argument("--seed", type=whole(SEED), default=0)
    parser.add_argument("--device", default="auto", help="device: auto, cpu, cuda, cuda:1, …")
    add_skip_checksums(parser)
    given = parser.parse_args()
    if given.greedy and given.num_samples > 1:
        raise UserError("--num-samples: greedy decoding gives one continuation only")
    prompt, new = _read_prompt(given.prompt), given.max_new_tokens
    loading.begin(given.model)
    import torch
    from transformers import TextStreamer

    with comparing_files(skip=given.skip_checksums):
        # Do the cheap checks before loading the weights.
        config = loading.model_config(given.model)
        tokenizer = loading.load_tokenizer(given.model)
        loading.check_vocabulary(tokenizer, config)
        tokens = encode_prompt(tokenizer, prompt)["input_ids"].shape[1]
        what = f"prompt: its {tokens:,} tokens and --max-new-tokens {new:,}"
        # The last token is never fed back into the model.
        loading.refuse_beyond_positions(config, tokens + new - 1, what)
        model = loading.load_model(given.model, device=given.device)
    _check_memory(model, tokens, new)
    trained = getattr(config, "max_position_embeddings", None)
    if trained and tokens + new > trained:
        print(
            f"note: up to {tokens + new} tokens, but the model was trained on {trained}; "
            "what lies beyond is extrapolation",
            file=sys.stderr,
        )
    options = sampling_options(given.temperature, given.top_p, given.greedy)
    live = sys.stdout.isatty()
    torch.manual_seed(given.seed)
    for index in range(given.num_samples):
        if given.num_samples > 1:
            print(f"--- sample {index + 1}")
        streamer = TextStreamer(tokenizer, skip_special_tokens=True) if live else None
        text = continue_text(model, tokenizer, prompt, new, options, streamer)
        if not live:
            print(prompt + text)


if __name__ == "__main__":
    main()
