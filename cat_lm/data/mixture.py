"""Several corpora in fixed proportions.

Weights count windows (sequences), not documents. They become whole numbers of windows in a block of
`BLOCK` by largest remainder, so that the proportions hold exactly in every block of the run, and
differ from the weights by less than 1 / BLOCK.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fractions import Fraction

from cat_lm.core.errors import UserError
from cat_lm.data.corpus import TokenCorpus

BLOCK = 10_000


class Mixture:
    """One split of several corpora; it has the attributes of a `TokenCorpus`, summed over them.

    Attributes: `parts` and `counts`, the corpora and the windows that each has in a block, sorted
    by fingerprint, so that the order in which they are named does not matter; `folder`, the first
    part's, whose tokenizer is everyone's; `fingerprint`, of the parts and their counts;
    `manifest["unigram_loss"]`, the mean of the parts', weighted by their held-out tokens as the
    validation loss is (weights of the mixture decide what is trained on, not what is scored).
    Raises `UserError` for parts that do not go together, and for weights too small to count.
    """

    def __init__(self, corpora: Sequence[TokenCorpus], weights: Sequence[float]) -> None:
        _check_parts(corpora)
        self.name = " + ".join(corpus.name for corpus in corpora)
        pairs = zip(corpora, weights, strict=True)
        corpora, weights = zip(*sorted(pairs, key=lambda pair: pair[0].fingerprint), strict=True)
        self.parts = list(corpora)
        self.counts = block_counts([corpus.name for corpus in corpora], weights)
        first = self.parts[0]
        self.folder, self.split = first.folder, first.split
        self.vocab_size, self.eod_id = first.vocab_size, first.eod_id
        self.num_tokens = sum(part.num_tokens for part in self.parts)
        self.num_documents = sum(part.num_documents for part in self.parts)
        self.num_bytes = sum(part.num_bytes for part in self.parts)
        self.shards = [shard for part in self.parts for shard in part.shards]
        fingerprints = [part.fingerprint for part in self.parts]
        self.fingerprint = joint_fingerprint(fingerprints, self.counts)
        self.manifest = {"unigram_loss": _unigram_loss(self.parts)}

    def describe(self) -> list[str]:
        """Describe the corpora for the log."""
        return [line for part in self.parts for line in part.describe()]

    def describe_draws(
        self, sizes: Sequence[int], done: Sequence[int], planned: Sequence[int] | None
    ) -> list[str]:
        """Describe the proportions for the log.

        Arguments, in the order of `parts`: windows in an epoch, drawn so far, drawn by the end.
        """
        lines = []
        for i, part in enumerate(self.parts):
            line = f"{part.name}: {self.counts[i] / BLOCK:.2%} of the windows"
            if planned is not None:
                line += f", {planned[i]:,} in the run ({planned[i] / sizes[i]:.2f} epochs)"
            if sum(done):
                line += f", {done[i]:,} so far ({done[i] / sum(done):.2%})"
            lines.append(line)
        return lines


def joint_fingerprint(fingerprints: Sequence[str], counts: Sequence[int]) -> str:
    """Identify a mixture by its parts, sorted by fingerprint, and their `block_counts`."""
    pairs = zip(fingerprints, counts, strict=True)
    identity = "".join(f"{fingerprint} {count}\n" for fingerprint, count in pairs)
    return hashlib.sha256(f"mixture of {BLOCK}\n{identity}".encode()).hexdigest()


def block_counts(names: Sequence[str], weights: Sequence[float]) -> list[int]:
    """Return how many windows of a block each corpus has: largest remainder, earlier ones win ties.

    Raises `UserError` for a weight that comes to none.
    """
    # Fractions: sums of floats would break ties by their rounding.
    total = sum(map(Fraction, weights))
    exact = [BLOCK * Fraction(weight) / total for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: BLOCK - sum(counts)]:
        counts[i] += 1
    for name, weight, count in zip(names, weights, counts, strict=True):
        if count == 0:
            raise UserError(
                f"data.mixture: the weight {weight:g} of {name} is {float(weight / total):.2g} of "
                f"all, less than one window in {BLOCK:,}; give it more, or leave it out"
            )
    return counts


def _check_parts(corpora: Sequence[TokenCorpus]) -> None:
    """Raise UserError for parts of different tokenizers, or with the same data."""
    first, names = corpora[0], {}
    for other in corpora:
        ours, theirs = first.manifest["tokenizer"], other.manifest["tokenizer"]
        if any(ours[key] != theirs[key] for key in ("sha256", "eod_id", "vocab_size")):
            raise UserError(
                f"data.mixture: {first.name} and {other.name} were prepared with different "
                f"tokenizers, {ours['spec']} ({ours['sha256'][:12]}) and {theirs['spec']} "
                f"({theirs['sha256'][:12]}); prepare them with the same one"
            )
        if other.fingerprint in names:
            raise UserError(
                f"data.mixture: {names[other.fingerprint]} and {other.name} hold the same data; "
                "name them once, with the sum of their weights"
            )
        names[other.fingerprint] = other.name


def _unigram_loss(parts: Sequence[TokenCorpus]) -> float:
    tokens = [part.manifest["splits"]["validation"]["tokens"] for part in parts]
    losses = [part.manifest["unigram_loss"] for part in parts]
    if not sum(tokens):
        return sum(losses) / len(losses)
    return sum(n * loss for n, loss in zip(tokens, losses, strict=True)) / sum(tokens)
