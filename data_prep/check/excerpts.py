"""Decoded samples of prepared data, with the ends of documents and the edges of windows marked."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cat_lm.data.corpus import TokenCorpus
from cat_lm.data.tokenizers import DocumentEncoder

SAMPLE_CHARACTERS = 400
PIECE_CHARACTERS = 160  # of each document in a window
PIECES = 6  # documents shown of a window
GAP = " … "


def print_documents(
    corpus: TokenCorpus, encoder: DocumentEncoder, samples: int, context_length: int
) -> None:
    """Documents at even distances: their beginnings, what ends them, and where windows begin."""
    count = min(samples, corpus.num_documents)
    for index in (i * corpus.num_documents // count for i in range(count)):
        start, stop = corpus.document(index)
        first, last = start // context_length, (stop - 1) // context_length
        windows = f"window {first:,}" if first == last else f"windows {first:,} to {last:,}"
        print(f"\n----- {corpus.split} document {index:,}: tokens {start:,} to {stop:,}, {windows}")
        print(printable(_beginning(corpus, encoder, start, stop, context_length)))


def print_windows(
    corpus: TokenCorpus, encoder: DocumentEncoder, samples: int, context_length: int
) -> None:
    """Whole windows of the stream at even distances, each of their documents shortened."""
    windows = corpus.num_tokens // context_length
    count = min(samples, windows)
    for window in (i * windows // count for i in range(count)):
        start = window * context_length
        stop = start + context_length
        pieces = list(_pieces(corpus, start, stop))
        ends = sum(ended for *_, ended in pieces)
        print(
            f"\n----- {corpus.split} window {window:,} of {context_length:,}: tokens {start:,} to "
            f"{stop:,}, {ends} document{'s' if ends != 1 else ''} end in it"
        )
        shown = [
            _shortened(encoder, tokens) + (f"[EOD {corpus.eod_id}]" if ended else "")
            for tokens, ended in pieces[:PIECES]
        ]
        if len(pieces) > PIECES:
            shown.append(f"[{len(pieces) - PIECES} more]")
        print(printable(f"[window {window}]" + "\n".join(shown) + f"[window {window + 1}]"))


def _pieces(corpus: TokenCorpus, start: int, stop: int) -> Iterator[tuple[np.ndarray, bool]]:
    """The tokens between ends of documents, EOD left out, and whether one ends the piece."""
    tokens = corpus.tokens(start, stop)
    begin = 0
    for end in np.flatnonzero(tokens == corpus.eod_id).tolist():
        yield tokens[begin:end], True
        begin = end + 1
    if begin < len(tokens):
        yield tokens[begin:], False


def _shortened(encoder: DocumentEncoder, tokens: np.ndarray) -> str:
    text = encoder.decode(tokens)
    if len(text) <= PIECE_CHARACTERS + len(GAP):
        return text
    half = PIECE_CHARACTERS // 2
    return text[:half] + GAP + text[-half:]


def _beginning(
    corpus: TokenCorpus, encoder: DocumentEncoder, start: int, stop: int, context_length: int
) -> str:
    """A document's first characters, with marks where windows begin, and the mark of its end."""
    text, left, begin = "", SAMPLE_CHARACTERS, start
    # A token may be less than a character (a byte), but no more of them are looked at.
    last = min(stop - 1, start + 4 * SAMPLE_CHARACTERS)
    edges = range(-(-start // context_length) * context_length, last, context_length)
    for edge in [*edges, last]:
        piece = encoder.decode(corpus.tokens(begin, edge))
        text += piece[:left]
        left -= len(piece)
        if left <= 0:
            break
        text += f"[window {edge // context_length}]" if edge < last else ""
        begin = edge
    cut = " …" if left < 0 or last < stop - 1 else ""
    return f"{text}{cut}[EOD {int(corpus.tokens(stop - 1, stop)[0])}]"


def printable(text: str) -> str:
    """Text without the control characters that would act on the terminal."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
