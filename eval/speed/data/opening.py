"""Time the opening of a large corpus and resuming at its middle, and the memory it takes.

The corpus is simulated: a manifest as large as the real one, and for every shard an index and a
data file of the right size that are sparse, so that 600 billion tokens take a few megabytes of
disk. Opening reads the manifest and a header of each shard; resuming makes the loader and the
batch of the middle step. A fresh process does it, with no imports but the loader's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cat_lm.errors import UserError
from eval.speed.progress import say

SHARD_TOKENS = 500_000_000  # the preparation's default
MEAN_LENGTH = 1000  # tokens in a document: SlimPajama's are about as long
OPENINGS = 3
CHILD = "from eval.speed.data.opening import child; child()"


def open_speed(
    sizes: Sequence[int], global_batch_size: int, context_length: int, scratch: Path
) -> dict[str, Any]:
    """Opens a corpus of each size `OPENINGS` times; the median opening counts."""
    rows = []
    for tokens in sizes:
        say(f"opening {tokens / 1e9:.3g}B tokens")
        folder = scratch / f"sparse-{tokens}"
        shards = _write_sparse(folder, tokens)
        command = [sys.executable, "-c", CHILD, str(folder)]
        command += [str(global_batch_size), str(context_length)]
        found = [_child(command) for _ in range(OPENINGS)]
        middle = sorted(found, key=lambda one: one["resume_seconds"])[len(found) // 2]
        rows.append({"tokens": tokens, "shards": shards, **middle, "all": found})
    return {
        "mean_document_tokens": MEAN_LENGTH,
        "global_batch_size": global_batch_size,
        "context_length": context_length,
        "corpora": rows,
    }


def _child(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"opening ended with {done.returncode}: {last}")
    return json.loads(done.stdout)


def _write_sparse(folder: Path, tokens: int) -> int:
    """A prepared folder of so many tokens, all of them zeros that lie nowhere; returns shards."""
    import numpy as np

    from cat_lm.data.shards import CODES, HEADER, MAGIC, VERSION, index_bytes
    from eval.speed.data.load import write_manifest

    folder.mkdir()
    dtype = np.dtype("<u2")
    splits: dict[str, list[dict]] = {}
    for split, size in (("train", tokens), ("validation", min(tokens, 10**6))):
        splits[split] = []
        for number in range(-(-size // SHARD_TOKENS)):
            own = min(SHARD_TOKENS, size - number * SHARD_TOKENS)
            documents = max(1, own // MEAN_LENGTH)
            name = f"{split}-{number:05d}"
            header = HEADER.pack(MAGIC, VERSION, CODES[dtype], documents, documents + 1)
            for suffix, content, length in (
                (".idx", header, index_bytes(documents)),
                (".bin", b"", own * dtype.itemsize),
            ):
                with open(folder / (name + suffix), "wb") as stream:
                    stream.write(content)
                    stream.truncate(length)
            digests = dict.fromkeys(("bin_sha256", "idx_sha256"), "0" * 64)
            counts = {"documents": documents, "tokens": own, "bytes": 4 * own}
            splits[split].append({"name": name, **counts, **digests})
    write_manifest(folder, splits, dtype)
    return len(splits["train"])


def _open(folder: str, global_batch_size: int, context_length: int) -> dict[str, Any]:
    """Open and resume in the fresh process."""
    import time

    from cat_lm.data import TrainLoader
    from cat_lm.data.opening import open_corpus

    imported = _resident("VmRSS")
    start = time.perf_counter()
    corpus = open_corpus(folder, "train")
    opened = time.perf_counter() - start
    loader = TrainLoader(corpus, context_length, global_batch_size, seed=0, mask_documents=True)
    middle = corpus.num_tokens // (2 * global_batch_size * context_length)
    loader.batch(middle)
    return {
        "open_seconds": opened,
        "resume_seconds": time.perf_counter() - start,
        "middle_step": middle,
        "peak_bytes": _resident("VmHWM"),
        "added_bytes": _resident("VmHWM") - imported,
    }


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise UserError(f"/proc/self/status has no {field}: memory cannot be measured on this system")


def child() -> None:
    """The fresh process: prints what it found for the folder, G and T of its arguments."""
    print(json.dumps(_open(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
