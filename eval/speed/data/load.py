"""Time the loader's batches, and how long a consumer of 1M tokens a second waits for them.

The corpora are random ids in documents of random lengths, about a thousand tokens each, in files
that lie in the page cache: what is measured is the loader, not the disk.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cat_lm.data import TrainLoader
from cat_lm.data.manifest import FORMAT_VERSION, fingerprint
from cat_lm.data.mixture import Mixture
from cat_lm.data.opening import open_corpus
from cat_lm.data.shards import ShardWriter, token_dtype
from cat_lm.io.checksums import sha256
from eval.speed.progress import rounds, say
from eval.speed.timing import summary, time_in_turn

VOCAB_SIZE = 32_000
EOD = 0
MEAN_LENGTH = 1000
SHARD_TOKENS = 50_000_000
CONSUMED_PER_SECOND = 1_000_000  # tokens
CONSUMED_STEPS = 12
CASES = {
    "stream": {},
    "stream, documents masked": {"mask_documents": True},
    "best_fit": {"packing": "best_fit"},
    "best_fit, documents masked": {"packing": "best_fit", "mask_documents": True},
    "mixture, documents masked": {"mask_documents": True},
}


def load_speed(
    tokens: int, global_batch_size: int, context_length: int, repeats: int, scratch: Path
) -> dict[str, Any]:
    """Loads batches [G, T] of corpora of `tokens` in all with each of `CASES`."""
    say(f"writing {tokens / 1e6:.0f}M tokens")
    parts = [_write(scratch / f"corpus-{n}", tokens // 2, seed=n) for n in range(2)]
    calls, loaders, seconds = {}, {}, {}
    for name, options in CASES.items():
        corpora = [open_corpus(part, "train") for part in parts]
        corpus = Mixture(corpora, [0.7, 0.3]) if name.startswith("mixture") else corpora[0]
        start = time.perf_counter()
        loaders[name] = TrainLoader(corpus, context_length, global_batch_size, 0, **options)
        seconds[name] = time.perf_counter() - start
        calls[name] = _Steps(loaders[name])
    timings = time_in_turn(
        calls, torch.device("cpu"), repeats, min_seconds=0.2, warm_ups=1, title="batches"
    )
    size = global_batch_size * context_length
    rows = []
    for name, loader in loaders.items():
        say(f"waiting, {name}")
        rows.append(
            {
                "case": name,
                "made_in_seconds": seconds[name],  # with best_fit, the plan of its windows
                "batch_seconds": summary(timings[name].seconds),
                "tokens_per_second": size / timings[name].median,
                **_waiting(loader, size),
            }
        )
    return {
        "tokens": tokens,
        "global_batch_size": global_batch_size,
        "context_length": context_length,
        "mean_document_tokens": MEAN_LENGTH,
        "consumed_tokens_per_second": CONSUMED_PER_SECOND,
        "cases": rows,
    }


class _Steps:
    """A batch a call, each of another step."""

    def __init__(self, loader: TrainLoader) -> None:
        self.loader, self.step = loader, 0

    def __call__(self) -> None:
        self.loader.batch(self.step)
        self.step += 1


def _waiting(loader: TrainLoader, size: int) -> dict[str, float]:
    """The share of time that a consumer waits for `prefetch`, and the wait for its first batch."""
    waited, step_seconds = 0.0, size / CONSUMED_PER_SECOND
    with loader.prefetch(0, CONSUMED_STEPS + 1) as batches:
        begin = time.perf_counter()
        next(batches)
        first = time.perf_counter() - begin
        begin = time.perf_counter()
        for _ in rounds(CONSUMED_STEPS, "waiting"):
            # A training step takes its time from the moment that it has its batch.
            time.sleep(step_seconds)
            asked = time.perf_counter()
            next(batches)
            waited += time.perf_counter() - asked
        share = waited / (time.perf_counter() - begin)
    return {"waiting_share": share, "first_batch_seconds": first}


def _write(folder: Path, tokens: int, seed: int) -> Path:
    """A prepared folder of random documents, `tokens` of them in its training split."""
    folder.mkdir()
    rng = np.random.default_rng(seed)
    dtype = token_dtype(VOCAB_SIZE)
    lengths = np.maximum(rng.geometric(1 / MEAN_LENGTH, 2 * tokens // MEAN_LENGTH + 1), 2)
    ends = np.cumsum(lengths)
    lengths = lengths[: max(1, int(np.searchsorted(ends, tokens)))].astype(np.int32)
    splits = {}
    for split, own in (("train", lengths), ("validation", lengths[:1])):
        with ShardWriter(folder, split, dtype, SHARD_TOKENS) as writer:
            for group in np.array_split(own, max(1, int(own.sum()) // 10**7)):
                ids = rng.integers(1, VOCAB_SIZE, int(group.sum()), dtype=dtype)
                ids[np.cumsum(group) - 1] = EOD
                writer.write(ids, group, 4 * group)
        splits[split] = [shard.to_json() for shard in writer.shards]
    write_manifest(folder, splits, dtype)
    return folder


def write_manifest(folder: Path, splits: dict[str, list[dict]], dtype: np.dtype) -> None:
    """A manifest for shards that no preparation has made; `splits` are their entries."""
    path = folder / "tokenizer" / "tokenizer.json"
    path.parent.mkdir()
    path.write_text("{}\n", encoding="utf-8")
    tokenizer = {"spec": "random", "vocab_size": VOCAB_SIZE, "eod_id": EOD, "sha256": sha256(path)}
    counts = {
        split: {
            **{key: sum(s[key] for s in shards) for key in ("documents", "tokens", "bytes")},
            "shards": shards,
        }
        for split, shards in splits.items()
    }
    manifest = {
        "format_version": FORMAT_VERSION,
        "fingerprint": fingerprint(
            [s for shards in splits.values() for s in shards], tokenizer["sha256"]
        ),
        "source": {"kind": "random"},
        "tokenizer": tokenizer,
        "dtype": dtype.name,
        "unigram_loss": float(np.log(VOCAB_SIZE)),
        "sources": {"random": {split: dict(own) for split, own in counts.items()}},
        "splits": counts,
    }
    for own in manifest["sources"]["random"].values():
        del own["shards"]
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
