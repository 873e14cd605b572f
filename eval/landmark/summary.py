"""One figure of up to four panels, and its numbers, from what other commands have written.

(i) How many needles models of `eval.recall` find, by the length of the haystack. (ii) How often a
match's block is found, against x = SNR² / (2 b ln(m / k)), over all heads, block sizes b and
numbers of blocks k: measured, and as Proposition 1's law has it. By the law's first order,
2 b ln(m / k) of SNR² are needed, so one curve should hold them all. (iii) Perplexity over dense
attention's against the keys read, by selector. (iv) A token's time after a context.

Models that differ by seed alone are one series: their names end in -0, -1 and so on (cells of
`eval.recall` say it themselves), and means over them are drawn with the least and the largest. What
differs otherwise is a series of its own, named by what that is.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cat_lm.core.errors import UserError
from cat_lm.core.fields import parse_specification
from cat_lm.core.files import write_json
from cat_lm.core.outputs import PICTURES, claim_outputs, named
from cat_lm.core.readers import Versioned, check_shape, read_object
from eval.common.text_table import aligned

# Edges of x's bins, equal in its logarithm.
EDGES = tuple(2.0 ** (power / 2) for power in range(-10, 9))
_SEED = re.compile(r"-\d+$")
# Of a cell of `eval.recall`: what is the mixer's where nothing is asked, and its options' prefix.
_OF_MIXER = ("layers", "embedding_dropout", "code")
_OPTION = "the mixer's "
# What does not tell models apart, beside rate and seed: the mixer as it is asked for, whose options
# are taken as resolved, and where it is tested; a length that some seeds have is a mean over them.
_NOT_OF_MODEL = ("lr", "seed", "mixer", "test_lengths", "fixed_items")
_SHORT = {"d_model": "d", "tokens_sha256": "text"}


def summarise(
    out: Path | str,
    diagnoses: Sequence[Path],
    sweeps: Sequence[Path],
    contexts: Path | None,
    block: int | None,
    recall: Sequence[Path] = (),
) -> dict[str, Any]:
    """Write landmark.json, .png and .svg into `out`.

    Args:
        diagnoses, sweeps: records of `diagnose` and `sweep`.
        contexts: a record of `eval.speed decode --contexts`; None leaves panel (iv) out.
        block: of the sweeps, to be shown; None for the smallest that all have.
        recall: folders of `eval.recall run`, with cells of the task needle.

    Returns:
        What landmark.json holds: `needles`, `retrieval`, `perplexity` and `decoding`, each a list
        of points.

    Raises:
        UserError: a file is no such record.
    """
    from eval.common.provenance import provenance
    from eval.common.style import save_figure
    from eval.landmark.figures import summary_figure

    out = Path(out)
    cells = {path: values for folder in recall for path, values in _needle_cells(folder)}
    found = {
        "needles": needle_points(cells),
        "retrieval": retrieval_points(
            [_record(path, retrieval_points, "rows", "wanted") for path in diagnoses]
        ),
        "perplexity": sweep_points(
            [_record(path, sweep_points, "rows", "text") for path in sweeps], block
        ),
        "decoding": decoding_points(
            [_record(path, decoding_points, "contexts") for path in (contexts,) if path is not None]
        ),
    }
    claim_outputs(out, "landmark.json", named("landmark", *PICTURES))
    files = [str(path) for path in (*cells, *diagnoses, *sweeps, contexts) if path is not None]
    write_json(out / "landmark.json", {**found, "files": files, **provenance()})
    save_figure(summary_figure(found), out / "landmark")
    return found


def _record(
    path: Path, points: Callable[[list[dict[str, Any]]], object], *keys: str
) -> dict[str, Any]:
    """Read a record with these keys, of which `points` can be made. Raises UserError."""
    values = read_object(path)
    check_shape(values, Versioned, str(path), "make it again")
    missing = [key for key in keys if key not in values]
    if missing:
        raise UserError(f"{path}: has no {missing[0]!r}; it is not the record that is asked for")
    if empty := [key for key in keys if values[key] == []]:
        raise UserError(f"{path}: its {empty[0]} are empty, so that there is nothing to draw")
    try:
        points([values])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
        raise UserError(f"{path}: is not the record that is asked for ({why})") from None
    return values


def _needle_cells(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Read the finished cells of the task needle in a folder of `eval.recall`.

    Raises:
        UserError: there is none, or a file is no cell's.
    """
    found = False

    def of_file(records: list[dict[str, Any]]) -> list[Any]:
        (record,) = records
        own = record["cell"]["lr"], record["cell"]["seed"], record["validation"]["accuracy"]
        return [_setting(record), own, *_needles_by_length(records)]

    for path in sorted((folder / "cells").glob("*.json")):
        values = read_object(path)
        cell = values.get("cell")
        task = cell.get("task") if isinstance(cell, dict) else None
        if isinstance(task, str) and task.partition(":")[0] == "needle":
            found = True
            yield path, _record(path, of_file, "tests", "validation")
    if not found:
        raise UserError(
            f"--recall {folder}: its cells/ has no finished one of the task needle; make them by "
            "python -m eval.recall run --task needle"
        )


def needle_points(cells: Mapping[Path, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Means over seeds of the accuracy at each length, for models alike but for rate and seed.

    Where there are several learning rates, those of the best mean on validation rows are shown.

    Raises:
        UserError: the cells are of tasks that differ, two are of one model, rate and seed, or a
            model diverged at its best rate.
    """
    records = cells.values()
    tasks = {f"{r['cell']['task']} at length {r['cell']['seq_len']}" for r in records}
    if len(tasks) > 1:
        raise UserError(f"--recall: models of {' and of '.join(sorted(tasks))}; draw one alone")
    found = []
    for series, rates in _needle_series(cells):
        best = max(rates, key=lambda lr: _mean(r["validation"]["accuracy"] for r in rates[lr]))
        _check_numbers(series, best, rates[best])
        common = {"series": series, "lr": best}
        found += [common | point for point in _needles_by_length(rates[best])]
    return found


def _check_numbers(series: str, rate: float, records: Sequence[Mapping[str, Any]]) -> None:
    """Raise UserError where a seed diverged: a mean of the others would be a choice."""
    for record in records:
        if not all(math.isfinite(test["accuracy"]) for test in record["tests"].values()):
            raise UserError(
                f"--recall: {series} at the rate {rate:g} diverged with seed "
                f"{record['cell']['seed']}, so that there is no mean; leave the model out, or "
                "train it at another rate"
            )


def _needle_series(
    cells: Mapping[Path, Mapping[str, Any]],
) -> list[tuple[str, dict[float, list[Mapping[str, Any]]]]]:
    """Return each model's name and, by learning rate, its seeds' records. Raises UserError."""
    files: dict[tuple[str, float, int], Path] = {}
    groups: dict[str, dict[float, list[Mapping[str, Any]]]] = {}
    for path, record in cells.items():
        rate, seed = (record["cell"][name] for name in ("lr", "seed"))
        setting = json.dumps(_setting(record), sort_keys=True)
        first = files.setdefault((setting, rate, seed), path)
        if first != path:
            raise UserError(
                f"--recall: {first} and {path} are of the same model and rate, both with seed "
                f"{seed}; leave one out"
            )
        groups.setdefault(setting, {}).setdefault(rate, []).append(record)
    names = _labels([json.loads(setting) for setting in groups])
    return sorted(zip(names, groups.values(), strict=True), key=lambda series: series[0])


def _setting(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return all that decides a cell but its rate and seed, with the mixer's defaults."""
    cell, mixer = record["cell"], record["mixer"]
    asked = {name: value for name, value in cell.items() if name not in _NOT_OF_MODEL}
    resolved = {name: record[name] for name in _OF_MIXER if name in record}
    options = {_OPTION + name: value for name, value in mixer["options"].items()}
    own = {"label": mixer["label"], **asked, **resolved, **options}
    return {name: value for name, value in own.items() if value is not None}


def _labels(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name settings by their `label` and by what differs between them.

    What is the mixer's own is told between settings of one label alone.
    """
    names = dict.fromkeys(name for own in settings for name in own if name != "label")
    found = []
    for own in settings:
        alike = [other for other in settings if other["label"] == own["label"]]
        label = own["label"]
        for name in names:
            others = alike if name in _OF_MIXER or name.startswith(_OPTION) else settings
            if any(other.get(name) != own.get(name) for other in others):
                label += f", {_SHORT.get(name, name)} {_shown(own.get(name))}"
        found.append(label)
    return found


def _shown(value: Any) -> str:
    if value is None or value == []:
        return "none"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _needles_by_length(records: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield one model's means over its seeds, each of which counts once at a length."""
    from eval.recall.tasks import make_task

    by_length: dict[int, list[float]] = {}
    for record in records:
        # Further lengths may name the trained one again, whose rows are the same.
        tested = {test["seq_len"]: test["accuracy"] for test in record["tests"].values()}
        for length, accuracy in tested.items():
            by_length.setdefault(length, []).append(accuracy)
    options = parse_specification(records[0]["cell"]["task"])[1]
    for length, accuracies in sorted(by_length.items()):
        chance = make_task("needle", length, options).chance
        spread = {"accuracy": _mean(accuracies), "range": [min(accuracies), max(accuracies)]}
        yield {"length": length, "seeds": len(accuracies), **spread, "chance": chance}


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def series_of(label: str) -> str:
    """Return a model's name without the number of its seed."""
    return _SEED.sub("", label)


def retrieval_points(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Means over heads, in bins of x, for each series: measured and predicted.

    Heads are weighed by their `far` attention. Rows in which no choice is left have no x.
    """
    bins: dict[tuple[str, int], list[tuple[float, Mapping[str, Any]]]] = {}
    for record in records:
        for row in record["rows"]:
            if row["rivals"] <= row["top_k"] or row["snr_squared"] <= 0:
                continue
            x = row["snr_squared"] / (2 * row["block"] * math.log(row["rivals"] / row["top_k"]))
            place = sum(x >= edge for edge in EDGES)
            if 0 < place < len(EDGES):
                bins.setdefault((series_of(record["label"]), place), []).append((x, row))
    found = []
    for (series, _), rows in sorted(bins.items()):
        weight = math.fsum(row["far"] for _, row in rows) or 1.0
        means = {
            name: math.fsum(row["far"] * row[name] for _, row in rows) / weight
            for name in ("retrieved", "predicted")
        }
        x = math.exp(math.fsum(row["far"] * math.log(x) for x, row in rows) / weight)
        found.append({"series": series, "x": x, "heads": len(rows), **means})
    return found


def sweep_points(
    records: Sequence[Mapping[str, Any]], block: int | None = None
) -> list[dict[str, Any]]:
    """Means over seeds, at one length and one block size, for each series and selector.

    The length is the largest that all models have. Rows of another text, or with another number of
    near blocks, are a series of their own.

    Raises:
        UserError: the sweeps share no length or no such block size, or rows of one name differ.
    """
    rows = [row for record in records for row in record["rows"] if row["block"] is not None]
    if not rows:
        return []
    lengths = _common(rows, "length")
    if not lengths:
        raise UserError("--sweeps: no length is in all of them; draw those of one length alone")
    longest = max(lengths)
    rows = [row for row in rows if row["length"] == longest]
    block = _common_block(rows, block)
    groups = _sweep_groups([row for row in rows if row["block"] == block])
    places = list(dict.fromkeys(place for place, _, _ in groups))
    keys = ("label", "local", "tokens_sha256")
    settings = [dict(zip(keys, (*place[:2], place[2][:8]), strict=True)) for place in places]
    names = dict(zip(places, _labels(settings), strict=True))
    found = []
    for (place, select, top_k), own in sorted(groups.items()):
        over = [row["over_dense"] for row in own]
        found.append(
            {
                "series": names[place],
                "select": select,
                "length": longest,
                "block": block,
                "top_k": top_k,
                "local": place[1],
                "tokens_sha256": place[2],
                "share": own[0]["share"],
                "seeds": len(own),
                "over_dense": statistics.fmean(over),
                "range": [min(over), max(over)],
            }
        )
    return found


def _common_block(rows: Sequence[Mapping[str, Any]], block: int | None) -> int:
    """Return the block size that is asked for, or the least that all models have.

    Raises:
        UserError: there is none, or not all have it.
    """
    common = _common(rows, "block")
    if block is None and common:
        return min(common)
    if block not in common:
        known = ", ".join(map(str, sorted(common))) or "none"
        raise UserError(f"--block {block}: all sweeps have {known}; give one of them")
    return block


def _common(rows: Sequence[Mapping[str, Any]], key: str) -> set[int]:
    """Return the values of `key` that all models have."""
    of_models: dict[str, set[int]] = {}
    for row in rows:
        of_models.setdefault(row["label"], set()).add(row[key])
    return set.intersection(*of_models.values())


def _sweep_groups(
    rows: Sequence[Mapping[str, Any]],
) -> dict[tuple[tuple[str, int, str], str, int], list[Mapping[str, Any]]]:
    """Put seeds together: series, local and text; selector; top-k -> rows, one of each model.

    A row that several records have is taken once.

    Raises:
        UserError: rows of one name are of models that differ, or of other values.
    """
    groups: dict[tuple, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        place = series_of(row["label"]), row["local"], row["tokens_sha256"]
        of_seeds = groups.setdefault((place, row["select"], row["top_k"]), {})
        first = of_seeds.setdefault(row["label"], row)
        for name in ("model_sha256", "over_dense"):
            if first[name] != row[name]:
                raise UserError(
                    f"--sweeps: {name} of {row['label']}, {row['select']}, top-k {row['top_k']} is "
                    f"{first[name]} and {row[name]}; leave one record out (models of several "
                    "seeds have names that end in -0, -1, …)"
                )
    return {key: list(of_seeds.values()) for key, of_seeds in groups.items()}


def decoding_points(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Milliseconds a token of a layer and of the model, dense and with landmarks."""
    found = []
    for result in (result for record in records for result in record["contexts"]):
        for part in ("layer", "model"):
            values = result[part]
            for name, key in (("dense", values["dense"]), ("landmark", "landmark")):
                found.append(
                    {
                        "model": result["name"],
                        "part": part,
                        "attention": name,
                        "context": result["case"]["context"],
                        "ms": values["seconds"][key]["median"] * 1e3,
                    }
                )
    return found


def table(found: Mapping[str, Any]) -> str:
    """Show the points of the first panel and of the third."""
    needles = [
        (
            point["series"],
            str(point["length"]),
            f"{point['accuracy']:.3f}",
            f"{point['range'][0]:.3f} to {point['range'][1]:.3f}",
            str(point["seeds"]),
        )
        for point in found["needles"]
    ]
    rows = [
        (
            point["series"],
            point["select"],
            str(point["block"]),
            str(point["top_k"]),
            f"{point['share']:.1%}",
            f"{point['over_dense']:+.2%}",
            f"{point['range'][0]:+.2%} to {point['range'][1]:+.2%}",
            str(point["seeds"]),
        )
        for point in found["perplexity"]
    ]
    header = ("", "select", "block", "top-k", "keys", "over dense", "range", "seeds")
    parts = [aligned(header, rows, left=(0, 1)) if rows else "no sweeps"]
    if needles:
        header = ("", "length", "needles", "range", "seeds")
        parts.insert(0, aligned(header, needles, left=(0,)))
    return "\n\n".join(parts)
