"""Which block size and how many blocks a trained model tolerates, by its heads' products.

Of a query t and a head, with blocks of b keys, the match is the key that gets most of the weight
among those of candidate blocks, and z_t = (q·k_match − mean q·k) / sd q·k over the others. With m
other candidate blocks, Proposition 1 gives how often the landmark of the match's block is among the
k highest, if the other products are independent normals:

    predicted = E_t P(z_t²; b, m, k),      `eval.recall.theory.landmark.retrieval`

What happens is measured on the same queries: `retrieved`, how often the match's block is chosen,
and `caught`, the part of dense attention's weight on candidate blocks that the chosen ones have;
`most` is that of the k best. `clumping` is b Var(q·K̄) / Var(q·k) of the blocks without the match,
1 where keys of a block are independent, as the law has it. Landmarks are means (`box`). Means over
heads are weighed by `far`, the part of all attention that candidate blocks get: a head that reads
what is near needs no choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cat_lm.core.errors import UserError
from cat_lm.core.files import write_json, write_text
from cat_lm.core.outputs import PICTURES, claim_outputs, result_files
from cat_lm.pretrained.loading import model_config, model_folder, model_label
from eval.common.models import folder_sha256
from eval.common.precision import evaluation_device
from eval.common.text_table import align_columns
from eval.landmark.options import Questions
from eval.length_sweep.cells import Subject
from eval.length_sweep.options import Options
from eval.length_sweep.text import sweep_streams

if TYPE_CHECKING:
    from torch import Tensor

    from eval.landmark.choosers import Streams

OF_BLOCK = ("snr_squared", "far", "clumping", "rivals", "queries")
OF_CHOICE = ("predicted", "retrieved", "caught", "most")
# The boundaries of bins, equally wide in the logarithm.
EDGES = tuple(2.0 ** (power / 2) for power in range(-10, 9))
COLUMNS = ("layer", "head", "block", "top_k", *OF_BLOCK, *OF_CHOICE)


def diagnose(
    model: Path | str,
    questions: Questions,
    out: Path | str,
    *,
    text: Path | str | None = None,
    data: Path | str | None = None,
    device: str = "auto",
) -> dict[str, Any]:
    """Measure a model, and write diagnosis.json, .csv and a picture into `out`.

    Args:
        text, data: a text file, or prepared data; exactly one of them.

    Returns:
        What diagnosis.json holds: `rows` with the keys COLUMNS, `means` over heads for each block
        size and number of blocks, and `bears`, for each number the largest block that has what is
        wanted, as predicted, and as measured.

    Raises:
        UserError: bad input.
    """
    import torch

    from cat_lm.sparsify import dense_model
    from eval.landmark.choosers import add_choosers

    target, folder = evaluation_device(device), model_folder(model)
    # The last query has at least one key of its own block.
    questions.check(questions.length - 1, f"at --length {questions.length}")
    label, sha256 = model_label(folder), folder_sha256(folder)
    subject = Subject(folder, label, model_config(folder), None, ("none",), sha256)
    budget = questions.windows * questions.length
    asked = Options(text=text, data=data, lengths=(questions.length,), max_tokens=budget)
    stream = sweep_streams([subject], asked)[0]
    claim_outputs(out, "diagnosis.json", result_files("diagnosis", ".csv", *PICTURES))
    built = dense_model(folder).to(target)
    choosers = add_choosers(built)
    tokens = torch.from_numpy(stream.tokens[: stream.scored // questions.length * questions.length])
    found: list[Found] = [{} for _ in choosers]
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for window in tokens.view(-1, questions.length).to(target):
            drawn = torch.randperm(questions.length, generator=generator)[: questions.queries]
            for chooser, of_layer in zip(choosers, found, strict=True):
                chooser.watch = lambda streams, f=of_layer, d=drawn: add_window(
                    f, streams, d, questions
                )
            built.base_model(window[None], use_cache=False)
    rows = [
        {"layer": layer, **row}
        for layer, of_layer in enumerate(found)
        for row in head_rows(of_layer, questions)
    ]
    return _write(Path(out), rows, questions, subject, stream.source)


# For each block size, arrays [heads, queries] window by window: see `measured_heads`.
Found = dict[int, list[dict[str, np.ndarray]]]


def add_window(found: Found, streams: Streams, drawn: Tensor, questions: Questions) -> None:
    """Add a layer's measurements on the queries `drawn` of one window [1, H, T, D]."""
    for block in questions.blocks:
        # At least two candidate blocks are needed, one of them without the match.
        able = drawn[drawn // block - questions.local + 1 >= 2]
        if len(able):
            found.setdefault(block, []).append(measured_heads(streams, able, block, questions))


def head_rows(found: Found, questions: Questions) -> list[dict[str, Any]]:
    """Return a row for each head of a layer, block size and number of blocks.

    Raises:
        UserError: no query has blocks to choose from.
    """
    from eval.recall.theory.landmark import retrieval

    rows = []
    for block in questions.blocks:
        if block not in found:
            raise UserError(
                f"--queries {questions.queries}: none of those drawn has two blocks of {block} to "
                "choose from; give more of them, or more --windows"
            )
        own = {
            name: np.concatenate([x[name] for x in found[block]], axis=1)
            for name in found[block][0]
        }
        predicted = {k: retrieval(own["z"] ** 2, block, own["rivals"], k) for k in questions.top_k}
        weight = own["far"].sum(axis=1).clip(min=1e-30)
        for head in range(len(own["z"])):
            shared = {"head": head, "block": block, "queries": own["z"].shape[1]}
            shared["snr_squared"] = float(own["z"][head].mean() ** 2)
            shared |= {key: float(own[key][head].mean()) for key in ("far", "clumping", "rivals")}
            for k in questions.top_k:
                chosen = {"top_k": k, "predicted": float(predicted[k][head].mean())}
                chosen["retrieved"] = float(own[f"retrieved {k}"][head].mean())
                for name in ("caught", "most"):
                    chosen[name] = float(own[f"{name} {k}"][head].sum() / weight[head])
                rows.append(shared | chosen)
    return rows


def measured_heads(
    streams: Streams, drawn: Tensor, block: int, questions: Questions
) -> dict[str, np.ndarray]:
    """Measure the products of queries with a choice, by blocks of one size, [H, queries]."""
    import torch

    from cat_lm.ops.landmark.attend import for_heads
    from cat_lm.ops.landmark.keys import block_weights, landmark_keys
    from cat_lm.ops.landmark.layout import sequence_blocks
    from cat_lm.ops.landmark.select import candidates_of, landmark_scores
    from cat_lm.ops.landmark.teaching import block_mass

    query, key = streams.query, streams.key
    layout = sequence_blocks(query.shape[2], block, None, None, query.device)
    drawn = drawn.to(query.device)
    own, query = layout.of_queries(drawn), query[:, :, drawn]
    candidates = candidates_of(own, questions.local)  # [1, 1, R, n]
    logits = (query @ for_heads(key, query.shape[1]).mT).float()[0]  # [H, R, T]
    count = candidates.shape[3]
    products = logits[..., : count * block].unflatten(2, (count, block))
    seen = candidates[0][..., None].expand_as(products)
    highest = products.masked_fill(~seen, -math.inf).flatten(2).max(dim=2)
    match = highest.indices // block  # [H, R]
    size = seen.sum(dim=(2, 3)) - 1  # candidate keys beside the match [H, R]
    mean = ((products * seen).sum(dim=(2, 3)) - highest.values) / size
    centred = (products - mean[..., None, None]) * seen
    above = highest.values - mean
    variance = (centred.square().sum(dim=(2, 3)) - above.square()).clamp(min=1e-30) / size
    others = torch.arange(count, device=match.device) != match[..., None]
    between = (centred.mean(dim=3).square() * others).sum(dim=2) / (candidates[0].sum(dim=2) - 1)
    landmarks = landmark_keys(key, block_weights("box", block).to(key.device), layout, False)
    scores = landmark_scores(query, landmarks)[0].masked_fill(~candidates[0], -math.inf)
    mass = block_mass(query, key, own, questions.local, streams.scaling)[0]
    ranks = (scores > scores.gather(2, match[..., None])).sum(dim=2)
    values = {
        "z": above / variance.sqrt(),
        "rivals": candidates[0].sum(dim=2).expand_as(mean) - 1.0,
        "far": mass.sum(dim=2),
        "clumping": between * block / variance,
    }
    for k in questions.top_k:
        chosen = scores.topk(min(k, count), dim=2).indices
        values[f"retrieved {k}"] = (ranks < k).float()
        values[f"caught {k}"] = mass.gather(2, chosen).sum(dim=2)
        values[f"most {k}"] = mass.topk(min(k, count), dim=2).values.sum(dim=2)
    return {name: value.double().cpu().numpy() for name, value in values.items()}


def means_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return weighted means over heads for each block size and number of blocks."""
    found = []
    for block, k in dict.fromkeys((row["block"], row["top_k"]) for row in rows):
        own = [row for row in rows if (row["block"], row["top_k"]) == (block, k)]
        far = math.fsum(row["far"] for row in own) / len(own)
        means = _weighed(own, ("snr_squared", "clumping", *OF_CHOICE))
        found.append({"block": block, "top_k": k, "far": far, **means})
    return found


def _weighed(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, float]:
    total = math.fsum(row["far"] for row in rows) or 1.0
    return {name: math.fsum(row["far"] * row[name] for row in rows) / total for name in names}


def tolerated_sizes(means: Sequence[dict[str, Any]], wanted: float) -> list[dict[str, Any]]:
    """Return, for each number of blocks, the largest block size with the wanted quality; None
    without one.
    """
    found = []
    for k in sorted({row["top_k"] for row in means}):
        own = [row for row in means if row["top_k"] == k]
        sizes = {
            name: max((row["block"] for row in own if row[name] >= wanted), default=None)
            for name in ("predicted", "retrieved", "caught")
        }
        found.append({"top_k": k, **sizes})
    return found


def retrieval_points(rows: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Return means over heads in bins of x = SNR² / (2 b ln(m / k)): as measured and predicted.

    By the law's first order 2 b ln(m / k) of SNR² are needed, so that one curve should hold all
    heads, block sizes b and numbers of blocks k. Heads are weighed by their `far` attention; rows
    in which no choice is left have no x.
    """
    bins: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        if row["rivals"] > row["top_k"] and row["snr_squared"] > 0:
            x = row["snr_squared"] / (2 * row["block"] * math.log(row["rivals"] / row["top_k"]))
            bins.setdefault(sum(x >= edge for edge in EDGES), []).append(row | {"x": math.log(x)})
    found = []
    for place, own in sorted(bins.items()):
        if 0 < place < len(EDGES):
            means = _weighed(own, ("x", "retrieved", "predicted"))
            found.append(means | {"x": math.exp(means["x"]), "heads": len(own)})
    return found


def _write(
    out: Path, rows: list[dict[str, Any]], questions: Questions, subject: Subject, source: str
) -> dict[str, Any]:
    import pandas as pd

    from eval.common.provenance import provenance
    from eval.common.style import save_figure
    from eval.landmark.figures import retrieval_figure

    means = means_of(rows)
    record = {
        "format": 1,
        "text": source,
        "label": subject.label,
        "model_sha256": subject.sha256,
        **{name: getattr(questions, name) for name in ("length", "local", "wanted")},
        "rows": rows,
        "means": means,
        "bears": tolerated_sizes(means, questions.wanted),
        **provenance(),
    }
    write_json(out / "diagnosis.json", record)
    write_text(out / "diagnosis.csv", pd.DataFrame(rows, columns=COLUMNS).to_csv(index=False))
    save_figure(retrieval_figure({subject.label: retrieval_points(rows)}), out / "diagnosis")
    return record


def table(record: dict[str, Any]) -> str:
    """Format the means over heads, and the block sizes that the model tolerates."""
    header = ("block", "top-k", "SNR²", "clumping", *OF_CHOICE)
    lines = [
        [str(row["block"]), str(row["top_k"])]
        + [f"{row[name]:.1f}" for name in ("snr_squared", "clumping")]
        + [f"{row[name]:.1%}" for name in OF_CHOICE]
        for row in record["means"]
    ]
    wanted, length = record["wanted"], record["length"]
    said = [
        f"the largest block of which top-k {row['top_k']} keep {wanted:.0%} at {length} tokens: "
        f"{row['predicted'] or 'none'} as predicted, {row['retrieved'] or 'none'} as retrieved, "
        f"{row['caught'] or 'none'} by the weight caught"
        for row in record["bears"]
    ]
    return "\n".join([align_columns(header, lines, left=()), *said])
