"""WikiText-2 raw, test split, page by page as lm-evaluation-harness reads it.

Rows, detokeniser, counts of words and bytes and the encoding are the harness's own (its task
`wikitext`, the paper's Table 2), and its rolling windows are those of perplexity.py with a stride
of the whole length. So at a length equal to `eval.zero_shot --max-length`, word and byte perplexity
are that command's. Words and bytes are of the pages before they are detokenised, as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from typing import TYPE_CHECKING

import numpy as np

from eval.length_sweep.options import WIKITEXT
from eval.length_sweep.text import load_tokenizers, long_enough
from eval.length_sweep.token_stream import TokenStream
from eval.zero_shot.tasks.harness import quiet, require_harness

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

    from eval.length_sweep.cells import Subject
    from eval.length_sweep.options import Options
    from eval.zero_shot.harness_model import Encoder


def page_streams(subjects: Sequence[Subject], asked: Options) -> list[TokenStream]:
    """Return the pages in each model's own tokens.

    Raises:
        UserError: the harness, the rows or a tokenizer's beginning are missing, or no page is as
            long as the largest length.
    """
    require_harness()
    tokenizers = load_tokenizers(subjects)
    with quiet():
        from eval.zero_shot.harness_model import Encoder
        from eval.zero_shot.tasks.catalog import Catalog
        from eval.zero_shot.tasks.sources import Hub, LocalFolder

        source = Hub() if asked.data_dir is None else LocalFolder(asked.data_dir)
        task = Catalog([WIKITEXT]).load(WIKITEXT, source)
        version = metadata.version("lm_eval")
        name = f"{source.describe(WIKITEXT)} (WikiText-2 raw as lm-evaluation-harness {version})"
        encoders = [
            Encoder(tokenizer) for subject, tokenizer in zip(subjects, tokenizers, strict=True)
        ]
        streams = [_stream(task, encoder, name) for encoder in encoders]
    return [long_enough(stream, asked.largest) for stream in streams]


def _stream(task: ConfigurableTask, encoder: Encoder, source: str) -> TokenStream:
    prefix, tokens, pages = encoder.prefix_token_id, [], []
    words = num_bytes = 0
    for row in task.task_docs:
        ids = encoder.tok_encode(task.doc_to_target(row))
        if ids:
            pages.append((len(tokens), len(tokens) + len(ids)))
            tokens += [prefix, *ids]
        counted = task.process_results(row, (0.0,))
        words += counted["word_perplexity"][1]
        num_bytes += counted["byte_perplexity"][1]
    array = np.array(tokens, dtype=np.int64)
    spans = tuple(pages)
    return TokenStream(array, encoder.tokenizer, num_bytes, words, prefix, source, spans=spans)
