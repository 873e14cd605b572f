"""Records as aligned tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eval.common.text_table import align_columns


def table(record: dict[str, Any]) -> str:
    """Return a record's table."""
    tables = {"conv": _conv_table, "train": _train_table, "decode": _decode_table}
    return tables[record["benchmark"]](record)


def _conv_table(record: dict[str, Any]) -> str:
    """Format for each case: milliseconds, share of the copy bandwidth, speed relative to conv1d."""
    columns = ("range", "of copy", "vs conv1d", "range")
    header = ("", "forward ms", *columns, "fwd+bwd ms", *columns)
    lines = [_where(record)]
    for result in record["cases"]:
        case, backend = result["case"], result["backend"]
        shape = [case[name] for name in ("batch", "time", "heads", "head_dim")]
        lines.append(
            f"\n{case['conv_type']}, W={case['window']}, {shape}, {case['dtype']}; a copy moves "
            f"{result['copy_bytes_per_second'] / 1e9:.1f} GB/s\n"
            f"cat_lm takes {backend['name']}, {backend['reason']}: {backend['runs']}"
        )
        timed = [row for row in result["kernels"] if not row["refused"]]
        if timed:
            lines.append(align_columns(header, [_conv_cells(row) for row in timed]))
        refused = [row for row in result["kernels"] if row["refused"]]
        lines += [f"refused: {row['kernel']}: {row['refused']}" for row in refused]
        lines += [f"absent: {name}: {reason}" for name, reason in result["absent"].items()]
    return "\n".join(lines)


def _conv_cells(row: dict[str, Any]) -> list[str]:
    cells = [row["kernel"]]
    for direction in ("forward", "forward_backward"):
        timed = row[direction]
        median, *ends = (
            f"{seconds * 1e3:.3f}"
            for seconds in (timed["seconds"]["median"], *timed["seconds"]["range"])
        )
        faster = timed["times_as_fast_as_conv1d"]
        cells += [median, "-".join(ends), f"{timed['of_copy_bandwidth']:.0%}"]
        cells += [f"{faster:.2f}" if faster else "", _ends(timed["times_as_fast_range"])]
    return cells


def _train_table(record: dict[str, Any]) -> str:
    """Format tokens per second, relative speeds, MFU and memory of each model."""
    case = record["case"]
    title = (
        f"{_size(case['size'])}, batch {case['batch_size']} x {case['context_length']}, "
        f"step: {record['step']}{', torch.compile' if case['compile'] else ''}; {_where(record)}"
    )
    header = ("", "tokens/s", "range", "of plain", "range", "of Pythia", "range", "MFU", "peak MiB")
    tokens = case["batch_size"] * case["context_length"]
    rows = []
    for row in record["results"].values():
        fast, slow = (f"{tokens / seconds:.0f}" for seconds in row["step_seconds"]["range"])
        ratios = []
        for name, ends in (("plain", "relative_range"), ("pythia", "relative_to_pythia_range")):
            median = row[f"relative_to_{name}"]
            ratios += ["" if median is None else f"{median:.3f}", _ends(row[ends], digits=3)]
        mfu = "unknown" if row["mfu"] is None else f"{row['mfu']:.1%}"
        memory = f"{row['peak_memory_bytes'] / 2**20:.0f}"
        speed = (f"{row['tokens_per_second']:.0f}", f"{slow}-{fast}")
        rows.append((row["model"], *speed, *ratios, mfu, memory))
    return f"{title}\n{align_columns(header, rows)}"


def _decode_table(record: dict[str, Any]) -> str:
    """Format tokens per second with and without the cache, by model and prompt."""
    case = record["results"][0]["case"]
    title = f"{_size(case['size'])}, batch {case['batch_size']}; {_where(record)}"
    header = ("", "prompt", "prompt s", "cached tokens/s", "of shortest", "cold")
    header += ("uncached tokens/s", "ratio")
    rows = [
        (
            row["model"],
            str(row["case"]["prompt_tokens"]),
            f"{row['prompt_seconds']['median']:.3f}",
            _rate(row["tokens_per_second_cached"]),
            _rate(row["of_shortest_prompt"]) if row["of_shortest_prompt"] else "",
            _rate(row["tokens_per_second_cold"]),
            _rate(row["tokens_per_second_uncached"]),
            f"{row['cache_speedup']:.1f}",
        )
        for row in record["results"]
    ]
    how = "of shortest: cached tokens/s in parts of those after the model's shortest prompt"
    return "\n".join([title, align_columns(header, rows), how])


def _rate(values: dict[str, Any]) -> str:
    return f"{values['median']:.2f} ({_ends(values['range'])})"


def _ends(values: Sequence[float] | None, digits: int = 2) -> str:
    """Show the least and the largest; nothing where there is nothing to compare."""
    return "" if values is None else "-".join(f"{value:.{digits}f}" for value in values)


def _size(size: dict[str, Any]) -> str:
    return (
        f"{size['layers']}x{size['hidden_size']}, {size['heads']} heads, vocabulary "
        f"{size['vocab_size']}, W={size['window']}, {size['dtype']}, {size['attention']}"
    )


def _where(record: dict[str, Any]) -> str:
    device = record["device"]
    name = device["name"] if device["type"] == "cuda" else record["machine"]
    return (
        f"{name}, {device['threads']} threads, {record['repeats']} repeats; ranges within this "
        "process"
    )
