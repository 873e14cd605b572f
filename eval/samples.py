"""`python -m eval.samples RUN`: what a model writes after the beginnings of held-out documents."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cat_lm.core import numbers
from cat_lm.core.cli import Parser, add_skip_checksums, path_name, whole
from cat_lm.core.errors import UserError, command
from cat_lm.core.files import write_json
from cat_lm.pretrained.loading import (
    check_vocabulary,
    load_model,
    load_tokenizer,
    quiet_transformers,
)
from cat_lm.pretrained.record import comparing_files
from eval.common.precision import DTYPES, HELP, evaluation_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TEMPERATURE, TOP_P = 0.8, 0.95


def held_out_prompts(
    data: Path | str, count: int, prompt_tokens: int, reference_tokens: int
) -> tuple[list[dict[str, str]], dict[str, int]]:
    """Return beginnings of `count` documents spread over the validation split, and their rest.

    Tokens are those of the data, whose own tokenizer spells them: a model's may be another one.

    Returns:
        Dictionaries with `prompt` and `reference` (the document's own next tokens); and how many
        documents were `looked_at`, of which `used`, `too_short` and `not_needed`, in how many
        `tokens_looked_at` of the split, where `tokens_left_out` are the others.

    Raises:
        UserError: the split has too few documents that are long enough.
    """
    import numpy as np

    from cat_lm.data.opening import open_verified

    corpus, tokenizer = open_verified(data, "validation"), load_tokenizer(Path(data) / "tokenizer")
    # Prompts from the first million tokens: a few of them need no more of a large split.
    tokens = corpus.tokens(0, min(corpus.num_tokens, 1_000_000))
    ends = np.flatnonzero(tokens == corpus.eod_id)
    starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else np.array([], dtype=int)
    lengths = ends - starts
    long_enough = starts[lengths >= prompt_tokens + reference_tokens]
    if len(long_enough) < count:
        raise UserError(
            f"--data {data}: {len(long_enough)} held-out documents have "
            f"{prompt_tokens + reference_tokens} tokens, {count} are needed"
        )
    chosen = long_enough[np.linspace(0, len(long_enough) - 1, count).astype(int)]
    prompts = []
    for start in chosen:
        middle, stop = start + prompt_tokens, start + prompt_tokens + reference_tokens
        # Up to a whole word, so that its end and the continuation's beginning can be read.
        prompt = _whole_words(tokenizer.decode(tokens[start:middle]))
        whole = tokenizer.decode(tokens[start:stop])
        prompts.append({"prompt": prompt, "reference": whole[len(prompt) :]})
    documents = {
        "looked_at": len(starts),
        "used": count,
        "too_short": len(starts) - len(long_enough),
        "not_needed": len(long_enough) - count,
        "tokens_looked_at": len(tokens),
        "tokens_left_out": corpus.num_tokens - len(tokens),
    }
    return prompts, documents


def _whole_words(text: str) -> str:
    words = re.match(r"(.*\S)\s+\S*$", text, re.DOTALL)
    return words[1] if words else text


def sample_continuations(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[dict[str, str]],
    *,
    max_new_tokens: int,
    seed: int,
) -> list[dict[str, str]]:
    """Add `continuation` to every prompt, sampled through transformers' generate."""
    import torch

    from cat_lm.generate import continue_text, sampling_options

    options = sampling_options(TEMPERATURE, TOP_P, greedy=False)
    results = []
    for prompt in prompts:
        torch.manual_seed(seed)
        text = continue_text(model, tokenizer, prompt["prompt"], max_new_tokens, options)
        results.append({**prompt, "continuation": text})
    return results


def write_samples(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: Path | str,
    out: Path | str,
    *,
    count: int = 4,
    prompt_tokens: int = 48,
    max_new_tokens: int = 96,
    seed: int = 0,
) -> dict[str, Any]:
    """Sample after `count` held-out prompts and write the texts to the JSON file `out`.

    Args:
        model: of a folder (see `cat_lm.pretrained.loading.load_model`); its hash is kept.
    """
    from eval.common.models import folder_sha256
    from eval.common.provenance import provenance

    check_vocabulary(tokenizer, model.config)
    prompts, documents = held_out_prompts(data, count, prompt_tokens, max_new_tokens)
    result = {
        "format": 1,
        "data": str(data),
        "documents": documents,
        "model_sha256": folder_sha256(Path(model.name_or_path)),
        "dtype": str(model.dtype).removeprefix("torch."),
        "seed": seed,
        "temperature": TEMPERATURE,
        "top_p": TOP_P,
        "max_new_tokens": max_new_tokens,
        "samples": sample_continuations(
            model, tokenizer, prompts, max_new_tokens=max_new_tokens, seed=seed
        ),
        **provenance(),
    }
    write_json(out, result)
    print(_account(data, documents), file=sys.stderr)
    return result


def _account(data: Path | str, documents: dict[str, int]) -> str:
    line = (
        f"{data} (validation split): {documents['used']} of {documents['looked_at']} documents are "
        f"continued; left out: {documents['too_short']} too short, {documents['not_needed']} not "
        "needed"
    )
    if documents["tokens_left_out"]:
        line += f", and what follows the first {documents['tokens_looked_at']:,} tokens"
    return line


@command
def main() -> None:
    parser = Parser(
        prog="python -m eval.samples",
        description="Continues the beginnings of held-out documents; writes RUN/eval/samples.json.",
    )
    parser.add_argument(
        "run", type=path_name, metavar="RUN", help="run folder with an export in model/"
    )
    parser.add_argument(
        "--data", type=path_name, metavar="DIR", help="prepared data; default: the run's own"
    )
    parser.add_argument("--count", type=whole(numbers.SAMPLES), default=4)
    parser.add_argument("--prompt-tokens", type=whole(numbers.PROMPT_TOKENS), default=48)
    parser.add_argument("--max-new-tokens", type=whole(numbers.NEW_TOKENS), default=96)
    parser.add_argument("--seed", type=whole(numbers.SEED), default=0)
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help=HELP)
    add_skip_checksums(parser)
    arguments = parser.parse_args()
    quiet_transformers()
    from cat_lm.config import load_config
    from cat_lm.core.outputs import claim_outputs

    run = Path(arguments.run)
    with comparing_files(skip=arguments.skip_checksums):
        dtype = evaluation_dtype(arguments.dtype, [run], "auto")
        model, tokenizer = load_model(run, dtype=dtype), load_tokenizer(run)
    claim_outputs(run / "eval", "samples.json")
    result = write_samples(
        model,
        tokenizer,
        arguments.data or load_config(run / "config.yaml").data.folders[0],
        run / "eval" / "samples.json",
        count=arguments.count,
        prompt_tokens=arguments.prompt_tokens,
        max_new_tokens=arguments.max_new_tokens,
        seed=arguments.seed,
    )
    for sample in result["samples"]:
        print(f"{sample['prompt']}\N{BLACK RIGHT-POINTING TRIANGLE}{sample['continuation']}\n")


if __name__ == "__main__":
    main()
