"""`python -m eval.samples RUN`: what a model writes after the beginnings of held-out documents."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cat_lm.core import numbers
from cat_lm.core.cli import Parser, add_skip_checksums, path_name
from cat_lm.core.errors import UserError, command
from cat_lm.core.files import write_json
from cat_lm.pretrained.loading import (
    begin,
    check_vocabulary,
    load_model,
    load_tokenizer,
)
from cat_lm.pretrained.record import comparing_files
from eval.common.options import Option, add_options, options_of
from eval.common.precision import HELP, Dtype, evaluation_dtype
from eval.common.result_files import EVALUATION

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TEMPERATURE, TOP_P = 0.8, 0.95


@dataclass(frozen=True)
class Sampling:
    """The options of sampling: continuations of `count` prompts."""

    count: Annotated[int, Option("number of documents to continue", numbers.SAMPLES)] = 4
    prompt_tokens: Annotated[
        int, Option("tokens of a prompt, the beginning of a document", numbers.PROMPT_TOKENS)
    ] = 48
    max_new_tokens: Annotated[int, Option("tokens of a continuation", numbers.NEW_TOKENS)] = 96
    seed: Annotated[int, Option("seed of each continuation", numbers.SEED)] = 0
    dtype: Annotated[Dtype, Option(HELP)] = "auto"


def held_out_prompts(
    data: Path | str, asked: Sampling
) -> tuple[list[dict[str, str]], dict[str, int]]:
    """Return beginnings of documents spread over the validation split, and their rest.

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
    whole, count = asked.prompt_tokens + asked.max_new_tokens, asked.count
    long_enough = starts[ends - starts >= whole]
    if len(long_enough) < count:
        raise UserError(
            f"--data {data}: {len(long_enough)} held-out documents have {whole} tokens, {count} "
            "are needed"
        )
    prompts = []
    for start in long_enough[np.linspace(0, len(long_enough) - 1, count).astype(int)]:
        # Up to a whole word, so that its end and the continuation's beginning can be read.
        text = tokenizer.decode(tokens[start : start + asked.prompt_tokens])
        words = re.match(r"(.*\S)\s+\S*$", text, re.DOTALL)
        prompt = words[1] if words else text
        reference = tokenizer.decode(tokens[start : start + whole])[len(prompt) :]
        prompts.append({"prompt": prompt, "reference": reference})
    documents = {
        "looked_at": len(starts),
        "used": count,
        "too_short": len(starts) - len(long_enough),
        "not_needed": len(long_enough) - count,
        "tokens_looked_at": len(tokens),
        "tokens_left_out": corpus.num_tokens - len(tokens),
    }
    return prompts, documents


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


def write_samples(run: Path, asked: Sampling, data: Path | str | None = None) -> dict[str, Any]:
    """Sample after held-out prompts and write the texts to RUN/eval/samples.json.

    Args:
        data: prepared data; None: the run's own.
    """
    from cat_lm.config import load_config
    from cat_lm.core.outputs import claim_outputs
    from eval.common.models import folder_sha256
    from eval.common.provenance import provenance

    dtype = evaluation_dtype(asked.dtype, [run], "auto")
    model, tokenizer = load_model(run, dtype=dtype), load_tokenizer(run)
    check_vocabulary(tokenizer, model.config)
    claim_outputs(run / EVALUATION, "samples.json")
    data = data or load_config(run / "config.yaml").data.folders[0]
    prompts, documents = held_out_prompts(data, asked)
    how = {"max_new_tokens": asked.max_new_tokens, "seed": asked.seed}
    result = {
        "format": 1,
        "data": str(data),
        "documents": documents,
        "model_sha256": folder_sha256(Path(model.name_or_path)),
        "dtype": dtype,
        "temperature": TEMPERATURE,
        "top_p": TOP_P,
        **how,
        "samples": sample_continuations(model, tokenizer, prompts, **how),
        **provenance(),
    }
    write_json(run / EVALUATION / "samples.json", result)
    line = (
        f"{data} (validation split): {documents['used']} of {documents['looked_at']} documents are "
        f"continued; left out: {documents['too_short']} too short, {documents['not_needed']} not "
        "needed"
    )
    if documents["tokens_left_out"]:
        line += f", and what follows the first {documents['tokens_looked_at']:,} tokens"
    print(line, file=sys.stderr)
    return result


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
    add_options(parser, Sampling)
    add_skip_checksums(parser)
    arguments = parser.parse_args()
    begin(arguments.run)
    with comparing_files(skip=arguments.skip_checksums):
        asked = options_of(arguments, Sampling)
        result = write_samples(Path(arguments.run), asked, arguments.data)
    for sample in result["samples"]:
        print(f"{sample['prompt']}\N{BLACK RIGHT-POINTING TRIANGLE}{sample['continuation']}\n")


if __name__ == "__main__":
    main()
