"""Records as aligned tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eval.common.text_table import aligned
from eval.speed.choices import models


def table(record: dict[str, Any]) -> str:
    """Return a record's table."""
    tables = {"conv": _conv_table, "train": _train_table, "decode": _decode_table}
    if "contexts" in record:
        return _contexts_table(record)
    return tables[record["benchmark"]](record)


def _conv_table(record: dict[str, Any]) -> str:
    """For each case: milliseconds, share of the copy bandwidth, and times as fast as conv1d."""
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
            lines.append(aligned(header, [_conv_cells(row) for row in timed]))
        for row in result["kernels"]:
            if row["refused"]:
                lines.append(f"refused: {row['kernel']}: {row['refused']}")
        lines += _absent(result)
    return "\n".join(lines)


def _conv_cells(row: dict[str, Any]) -> list[str]:
    cells = [row["kernel"]]
    for direction in ("forward", "forward_backward"):
        timed = row[direction]
        faster = timed["times_as_fast_as_conv1d"]
        cells += [
            _ms(timed["seconds"]["median"], 3),
            "-".join(_ms(value, 3) for value in timed["seconds"]["range"]),
            f"{timed['of_copy_bandwidth']:.0%}",
            f"{faster:.2f}" if faster else "",
            _ends(timed["times_as_fast_range"]),
        ]
    return cells


def _train_table(record: dict[str, Any]) -> str:
    """Tokens a second, relative speeds, MFU and memory of each model."""
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
        for name in ("plain", "pythia"):
            median = row[f"relative_to_{name}"]
            ends = row["relative_range" if name == "plain" else "relative_to_pythia_range"]
            ratios += ["" if median is None else f"{median:.3f}", _ends(ends, digits=3)]
        mfu = "unknown" if row["mfu"] is None else f"{row['mfu']:.1%}"
        memory = f"{row['peak_memory_bytes'] / 2**20:.0f}"
        speed = (f"{row['tokens_per_second']:.0f}", f"{slow}-{fast}")
        rows.append((row["model"], *speed, *ratios, mfu, memory))
    return "\n".join([title, aligned(header, rows), *_absent(record)])


def _decode_table(record: dict[str, Any]) -> str:
    """Tokens a second with and without the cache, by model and prompt."""
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
    return "\n".join([title, aligned(header, rows), how])


def _contexts_table(record: dict[str, Any]) -> str:
    """Milliseconds a token after each context, dense and with landmark attention."""
    first = record["contexts"][0]["case"]
    options = ", ".join(f"{name} {value}" for name, value in first["landmark"].items())
    timed = ("dense ms", "landmark ms", "times as fast")
    header = ("", "context", *(f"layer {name}" for name in timed))
    header += ("dense MiB", "landmark MiB", *(f"model {name}" for name in timed))
    rows = []
    for result in record["contexts"]:
        layer, model = (_contexts_cells(result[part]) for part in ("layer", "model"))
        read = [f"{result['layer_bytes'][n] / 2**20:.1f}" for n in ("dense", "landmark")]
        about = (models()[result["name"]].label, f"{result['case']['context']:,}")
        rows.append((*about, *layer, *read, *model))
    title = f"{_size(first['size'])}; {_where(record)}"
    return "\n".join([title, f"keys and values are random; {options}", aligned(header, rows)])


def _contexts_cells(part: dict[str, Any]) -> list[str]:
    ratio = part["times_as_fast"]
    return [
        *(_ms(part["seconds"][name]["median"]) for name in ("dense", "landmark")),
        f"{ratio['median']:.1f} ({_ends(ratio['range'], digits=1)})",
    ]


def _ms(seconds: float, digits: int = 2) -> str:
    return f"{seconds * 1e3:.{digits}f}"


def _rate(values: dict[str, Any]) -> str:
    return f"{values['median']:.2f} ({_ends(values['range'])})"


def _ends(values: Sequence[float] | None, digits: int = 2) -> str:
    """Show the least and the largest; nothing where there is nothing to compare."""
    return "" if values is None else "-".join(f"{value:.{digits}f}" for value in values)


def _absent(found: dict[str, Any]) -> list[str]:
    return [f"absent: {name}: {reason}" for name, reason in found["absent"].items()]


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
