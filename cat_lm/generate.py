"""`python -m cat_lm.generate MODEL "prompt"`: text from a trained model.

MODEL is a transformers folder or a run folder with `model/`. The prompt `-` is read from
standard input. Text goes through transformers' own `generate`; on a terminal it appears as it is
made.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from cat_lm.errors import UserError, command
from cat_lm.pretrained import load_model, load_tokenizer, quiet_transformers

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase
    from transformers.generation.streamers import BaseStreamer


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
    ids = model.generate(**inputs, max_new_tokens=max_new_tokens, streamer=streamer, **options)[0]
    # Decoding the new tokens alone would lose a leading space in sentencepiece vocabularies.
    start = len(tokenizer.decode(inputs["input_ids"][0], skip_special_tokens=True))
    return tokenizer.decode(ids, skip_special_tokens=True)[start:]


def _positive(kind: type) -> Any:
    def parse(text: str) -> Any:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text} must be greater than 0")
        return value

    parse.__name__ = kind.__name__
    return parse


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m cat_lm.generate", description="Continues a prompt with a trained model."
    )
    parser.add_argument("model", help="transformers folder, or run folder with model/")
    parser.add_argument("prompt", help="text to continue; - reads it from standard input")
    parser.add_argument("--max-new-tokens", type=_positive(int), default=100, metavar="N")
    parser.add_argument("--temperature", type=_positive(float), default=0.8)
    parser.add_argument("--top-p", type=_positive(float), default=0.95)
    parser.add_argument("--greedy", action="store_true", help="the likeliest token every time")
    parser.add_argument("--num-samples", type=_positive(int), default=1, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, …")
    arguments = parser.parse_args()
    if arguments.top_p > 1:
        raise UserError(f"--top-p {arguments.top_p}: must be at most 1")
    if arguments.greedy and arguments.num_samples > 1:
        raise UserError("--num-samples: greedy decoding gives one continuation only")
    return arguments


def _note_length(model: PreTrainedModel, prompt_tokens: int, new_tokens: int) -> None:
    trained = getattr(model.config, "max_position_embeddings", None)
    total = prompt_tokens + new_tokens
    if trained and total > trained:
        print(
            f"note: up to {total} tokens, but the model was trained on {trained}; "
            "what lies beyond is extrapolation",
            file=sys.stderr,
        )


@command
def main() -> None:
    arguments = _parse_arguments()
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if not prompt.strip():
        raise UserError("prompt: is empty; give some text to continue")
    quiet_transformers()
    import torch
    from transformers import TextStreamer

    model = load_model(arguments.model, device=arguments.device)
    tokenizer = load_tokenizer(arguments.model)
    prompt_tokens = encode_prompt(tokenizer, prompt)["input_ids"].shape[1]
    _note_length(model, prompt_tokens, arguments.max_new_tokens)
    options = sampling_options(arguments.temperature, arguments.top_p, arguments.greedy)
    live = sys.stdout.isatty()
    torch.manual_seed(arguments.seed)
    for number in range(arguments.num_samples):
        if arguments.num_samples > 1:
            print(f"--- sample {number + 1}")
        streamer = TextStreamer(tokenizer, skip_special_tokens=True) if live else None
        text = continue_text(model, tokenizer, prompt, arguments.max_new_tokens, options, streamer)
        if not live:
            print(prompt + text)


if __name__ == "__main__":
    main()
