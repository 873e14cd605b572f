"""Studies of language models: what is trained, on what text, and what is compared.

A question's differences are fixed in its declaration, before anything is run.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cat_lm.core.errors import UserError
from eval.common.library_text import LIBRARY
from eval.lab.cell import finished
from eval.lab.contrasts import Contrast
from eval.lab.frame import Line, Record
from eval.lab.places import Place, Run
from eval.lab.study import Rows, Study, StudyOptions, Table, is_finite
from eval.language.cell import NONE, PAPER, YARN, Cell
from eval.language.models import NOPE, ROOT, configuration, in_order, label
from eval.language.recalled import BINS, LAST, RARE, RECALL, REST

Pair = tuple[str, str]
TRAINED, SCALED = "as trained", "scaled"
# Method of eval.length_sweep -> column of a report.
COLUMNS = {NONE: TRAINED, YARN: "YaRN", "pi+temperature": SCALED, "temperature": SCALED}
RECALLED, ATTENTION = "recall", "attention"  # Report rows beside those of texts.
SHARPNESS = {"entropy": "entropy / ln t", "largest_logit": "largest logit"}
# Models of equal size have as many parameters as the reference, within this tolerance.
REFERENCE, TOLERANCE = "pythia", 0.02


@dataclass(frozen=True)
class Scale:
    """The size of a study.

    Attributes:
        recipe: the recipe of configs/study/models.yaml.
        vocabulary: the vocabulary of the tokenizer that is trained on the library.
        tokens, documents: of training, and those scored of each text; None: the question's.
    """

    recipe: str
    vocabulary: int
    rates: tuple[float, ...]
    seeds: int
    tokens: int | None = None
    documents: int | None = None


SCALES = {
    "smoke": Scale("cpu", 2048, (3e-3,), 2, 8_192, 4),
    "cpu": Scale("cpu", 2048, (1e-3, 3e-3, 1e-2), 6),
    "gpu": Scale("gpu", 8192, (3e-4, 1e-3, 3e-3), 6, 10_485_760, 80),
}


@dataclass(frozen=True)
class Question:
    """List what is trained and compared to answer a question.

    Attributes:
        contrasts: (model, minus): one's loss minus the other's.
        documents, tokens: scored of each text, and of training, at cpu scale.
        factors: lengths at which models are read, of the training length.
        interactions: pairs of differences, the second of which is taken from the first.
        beyond: methods by which losses are compared at the longest length too; models without
            rotary positions are read as trained where it is YaRN.
        methods: by which models are read beyond the trained length, in addition to `beyond`.
        growth: whether a model's loss at the longest length is compared with its own at the
            trained one.
        recall, attention: whether recall of rare pairs, and the entropy of attention and its
            largest logit, are measured and compared.
        is_equal: whether models of another size than Pythia's are refused.
        trials: runs at each rate, whose mean chooses.
        tokenizer: the tokenizer of the library's text; None: one that is trained on it.
    """

    contrasts: tuple[Pair, ...]
    documents: int
    tokens: int = 512_000
    factors: tuple[float, ...] = (0.5, 1, 2, 4, 8)
    interactions: tuple[tuple[Pair, Pair], ...] = ()
    beyond: tuple[str, ...] = ()
    methods: str = NONE
    growth: bool = False
    recall: bool = False
    attention: bool = False
    is_equal: bool = False
    trials: int = 1
    tokenizer: str | None = None

    @property
    def models(self) -> tuple[str, ...]:
        """Return all models that are compared."""
        return in_order(model for pair in self.contrasts for model in pair)


def both(model: str) -> Pair:
    """Return the names of a model with RoPE and of the same without positions."""
    return model, model + NOPE


def pairs(*contrasts: tuple[Pair, Pair]) -> tuple[Pair, ...]:
    """Return each contrast with rotary positions, then each without."""
    return tuple((a[side], b[side]) for side in (0, 1) for a, b in contrasts)


def by_position(*contrasts: tuple[Pair, Pair]) -> tuple[tuple[Pair, Pair], ...]:
    """Return pairs of contrasts: with RoPE, and the same without positions."""
    return tuple(((a[0], b[0]), (a[1], b[1])) for a, b in contrasts)


def plan_places(question: Question, asked: StudyOptions) -> list[Place]:
    """Return a place for each model.

    Raises:
        UserError: a model is not the question's, or a text or a size does not fit.
    """
    scale, more = SCALES[asked.scale], asked.more
    for model in asked.models:
        if model not in question.models:
            raise UserError(f"--models {model}: choose among {', '.join(question.models)}")
    tokens = more.get("tokens") or scale.tokens or question.tokens
    documents = more.get("documents") or scale.documents or question.documents
    data = texts(tuple(more.get("data", ())), asked.scale, scale.vocabulary, question.tokenizer)
    found = []
    for model in in_order(asked.models or question.models):
        config = configuration(model, scale.recipe, data[0][0], tokens)
        lengths = tuple(int(factor * config.data.context_length) for factor in question.factors)
        facts = config.architecture.summary(config.model).facts
        methods = PAPER if question.methods == PAPER else NONE
        if YARN in question.beyond and facts.get("position_embedding") == "rope":
            methods = f"{NONE},{YARN}"
        cell = Cell(
            model,
            scale.recipe,
            data,
            config.optimizer.lr,
            tokens=tokens,
            lengths=lengths,
            methods=methods,
            documents=documents,
            skip=config.validation.max_tokens or 0,
            recall=question.recall,
            attention=question.attention,
        )
        run, rates = Run("text", "", label(model), cell), more.get("rates", scale.rates)
        found.append(Place(run, rates, asked.seeds or scale.seeds, question.trials))
    _check_texts(data, documents, max(lengths), cell.skip)
    return found


@functools.cache
def texts(
    folders: tuple[str, ...],
    name: str,
    vocabulary: int,
    tokenizer: str | None = None,
    held_out: float = 0.6,
) -> tuple[Pair, ...]:
    """Return (folder, fingerprint) of each text; without folders the standard library is prepared.

    Args:
        name: of the library's folder; held_out: its validation fraction.

    Raises UserError for folders of equal names, and for texts of another tokenizer.
    """
    from cat_lm.data.manifest import read_manifest

    if not folders:
        # With 0.6 held out it has some 300 files that are long enough, without codec tables.
        folders = (str(ROOT / f"data/python-stdlib-{'bytes' if tokenizer else name}"),)
        words = [*LIBRARY, "--validation-fraction", f"{held_out:g}", "--out", folders[0]]
        words += ["--tokenizer", tokenizer or f"train:sentencepiece:{vocabulary}"]
        call = [sys.executable, "-m", "data_prep.prepare", *words]
        if code := subprocess.run(call, cwd=ROOT, stdout=sys.stderr).returncode:
            raise SystemExit(code)
    found: dict[Path, str] = {}
    for folder in folders:
        manifest, path = read_manifest(folder), Path(folder).resolve()
        if manifest["tokenizer"]["sha256"] != read_manifest(folders[0])["tokenizer"]["sha256"]:
            raise UserError(
                f"--data {folder}: was prepared with another tokenizer than {folders[0]}; prepare "
                f"it with --tokenizer {folders[0]}/tokenizer"
            )
        if path.name in {other.name for other in found}:
            raise UserError(f"--data {folder}: there is another folder of this name")
        found[path] = manifest["fingerprint"]
    return tuple((str(path), fingerprint) for path, fingerprint in found.items())


@functools.cache
def _check_texts(data: tuple[Pair, ...], documents: int, length: int, skip: int) -> None:
    """Check that every text has enough held-out documents beyond those that tune rates."""
    import numpy as np

    from cat_lm.data.opening import open_verified
    from eval.length_sweep.token_stream import first_document

    for number, (folder, _) in enumerate(data):
        corpus = open_verified(folder, "validation")
        tokens = corpus.tokens(0, corpus.num_tokens)
        tokens = tokens[first_document(tokens, corpus.eod_id, 0 if number else skip) :]
        ends = np.flatnonzero(tokens == corpus.eod_id) + 1
        there = int((np.diff(ends, prepend=0) >= length).sum())
        if there < documents:
            behind = "" if number else f" behind the first {skip:,} tokens, which choose rates"
            raise UserError(
                f"--data {folder}: holds out {there} documents of {length} tokens or more{behind}, "
                f"{documents} are scored; hold out more text, or give --documents"
            )


def _check_sizes(cells: Sequence[Cell]) -> None:
    """Check that models have the reference's number of parameters, with the data's vocabulary."""
    from cat_lm.data.manifest import read_manifest
    from cat_lm.training.estimate import num_parameters

    vocabulary = read_manifest(cells[0].texts[0][0])["tokenizer"]["vocab_size"]
    wanted = num_parameters(dataclasses.replace(cells[0], model=REFERENCE).config, vocabulary)
    for cell in cells:
        count = num_parameters(cell.config, vocabulary)
        if abs(off := count / wanted - 1) > TOLERANCE:
            raise UserError(
                f"{cell.model}: has {count:,} parameters with a vocabulary of {vocabulary:,}, "
                f"{off:+.1%} of {REFERENCE}'s {wanted:,}; models may differ by {TOLERANCE:.0%}: "
                "leave it out of --models, or take data of another vocabulary"
            )


def check(question: Question, cells: Sequence[Cell], out: Path) -> None:
    """Check that the models support the lengths, and have one size if the question requires it.

    Runs that are finished must be trained in one precision and scored on the same tokens.
    """
    models = {cell.model: cell for cell in cells}
    for model, cell in models.items():
        longest = max(cell.lengths, default=cell.seq_len)
        for problem in cell.config.architecture.problems(cell.config.model, longest):
            raise UserError(f"{model} is to be read up to {longest} tokens: {problem}")
    if question.is_equal:
        _check_sizes(list(models.values()))
    first: dict[str, tuple[str, str]] = {}
    for cell in cells:
        if (record := finished(out, cell)) is None:
            continue
        found = {"precision": record["precision"]}
        found |= {f"tokens of {row['text']}": row["tokens_sha256"] for row in record["rows"]}
        for what, value in found.items():
            other, model = first.setdefault(what, (value, cell.model))
            if value != other:
                raise UserError(
                    f"--out {out}: {cell.model} and {model} have another {what} ({value[:12]}, "
                    f"{other[:12]}) and are not compared; give another folder"
                )


def measured_values(run: Run, record: Record) -> dict[tuple[str, str, int], dict[str, Any]]:
    """Return losses by text, way of reading and length; recall and sharpness of attention."""
    cell = run.cell
    if record["diverged"]:
        texts = [Path(folder).name for folder, _ in cell.texts]
        return {(text, TRAINED, n): {"value": math.nan} for text in texts for n in cell.lengths}
    found = {
        (row["text"], COLUMNS[row["method"]], row["length"]): {
            "value": row["loss"],
            "documents": row["documents"],
        }
        for row in record["rows"]
        if row["method"] == NONE or row["length"] > cell.seq_len  # Shorter texts are not scaled.
    }
    if slices := record.get("recall"):
        rare = slices[RECALL]
        also = {name: slices[name]["loss"] for name in (*BINS, LAST, REST)}
        found[RECALLED, TRAINED, cell.seq_len] = {
            "value": rare["loss"],
            "documents": rare["documents"],
            **also,
        }
    for name, column in SHARPNESS.items():
        if "attention" in record:
            found[ATTENTION, column, cell.seq_len] = {"value": record["attention"][name]}
    return found


def contrasts(question: Question, lines: Sequence[Line]) -> list[Contrast]:
    """Return a question's contrasts over all texts, lengths and methods as one family."""
    pairs = [(f"{label(a)} - {label(b)}", (a,), (b,)) for a, b in question.contrasts]
    # (a - b) - (c - d) is (a + d) - (c + b): sums of two models' losses, paired alike.
    gains = [
        (f"({label(a)} - {label(b)}) - ({label(c)} - {label(d)})", (a, d), (c, b))
        for (a, b), (c, d) in question.interactions
    ]
    found = []
    for row in dict.fromkeys(line["row"] for line in lines):
        at = {(x["column"], x["x"], x["line"]): x for x in lines if x["row"] == row}
        lengths = sorted({x for _, x, _ in at})
        if row == ATTENTION:
            for column in SHARPNESS.values():
                found += _compare_models(question, at, (row, column, lengths[0]), pairs, ATTENTION)
        elif row == RECALLED:
            found += _compare_models(question, at, (row, TRAINED, lengths[0]), pairs)
        else:
            trained, longest = int(lengths[-1] / max(question.factors)), lengths[-1]
            found += _compare_models(question, at, (row, TRAINED, trained), pairs + gains)
            for method in question.beyond:
                place = (row, COLUMNS[method], longest)
                found += _compare_models(question, at, place, pairs + gains)
                found += _compare_lengths(question, at, place, trained) if question.growth else []
    return found


At = dict[tuple[str, int, str], Line]


def _compare_models(
    question: Question,
    at: At,
    place: tuple[str, str, int],
    sides: Sequence[tuple[str, tuple[str, ...], tuple[str, ...]]],
    family: str = "",
) -> Iterator[Contrast]:
    """Yield contrasts of models at a place; models without another method count as trained."""
    _, column, x = place
    for name, *both_sides in sides:
        plus, minus = ([_read(at, column, x, model) for model in side] for side in both_sides)
        if None not in plus + minus and _is_other(question, column, plus + minus):
            yield Contrast(*place, name, tuple(plus), tuple(minus), family)


def _compare_lengths(
    question: Question, at: At, place: tuple[str, str, int], trained: int
) -> Iterator[Contrast]:
    """Yield contrasts of each model at a place with itself at the training length."""
    _, column, x = place
    for model in question.models:
        one, other = _read(at, column, x, model), _read(at, TRAINED, trained, model)
        if one and other and _is_other(question, column, [one]):
            yield Contrast(*place, f"{label(model)} - itself at {trained:,}", (one,), (other,))


def _read(at: At, column: str, x: int, model: str) -> Line | None:
    return at.get((column, x, label(model))) or at.get((TRAINED, x, label(model)))


def _is_other(question: Question, column: str, lines: Sequence[Line]) -> bool:
    """Return True if the column differs from how the models were trained."""
    return len(question.beyond) == 1 or any(line["column"] == column for line in lines)


def collect_extra(rows: Rows) -> dict[str, Any]:
    """Return the fields of a record besides its losses."""
    cell, scored = rows[0][0].cell, next((one["rows"] for _, one in rows if one["rows"]), [])
    models: dict[str, Any] = {}
    for run, one in rows:
        if run.line not in models or one["rows"]:  # A diverged run has no export.
            models[run.line] = one["facts"]
    found = {
        "training_length": cell.seq_len,
        "training_tokens": cell.config.total_steps * cell.config.tokens_per_step,
        "precision": rows[0][1]["precision"],
        "documents": {row["text"]: sum(map(bool, row["documents"]["tokens"])) for row in scored},
        "scored_tokens": {row["text"]: sum(row["documents"]["tokens"]) for row in scored},
        "models": models,
    }
    for slices in [one["recall"] for _, one in rows if "recall" in one][:1]:
        found["counts"] = {
            name: [one["counts"], sum(one["documents"]["tokens"])] for name, one in slices.items()
        }
    return found


def tables(record: Record) -> list[Table]:
    """Return tables of the models, their costs and tuning, and the count models' losses."""
    about, lines = record["extra"], {line["line"]: line for line in record["lines"]}
    scored = "; ".join(
        f"{about['scored_tokens'][text]:,} tokens of {count} documents of {text}"
        for text, count in about["documents"].items()
    )
    choosing = about.get("tuning_tokens", about["training_tokens"])
    text = (
        f"{about['training_tokens']:,} training tokens at context length "
        f"{about['training_length']}, in {about['precision']}; scored are {scored}, the same ones "
        "for every model and length. Every seed decides the weights and the order of the data, "
        f"which is the same for all models. Validation losses are of other seeds, on {choosing:,} "
        "tokens; all other numbers are conditional on the rates that they chose. Attention has "
        "rotary positions where a name does not say NoPE."
    )
    tried = sorted({rate for line in lines.values() for rate in line["tried"]}, key=float)
    facts = list(next(iter(about["models"].values())))
    header = ["model", *facts, "rate", *(f"validation loss at {rate}" for rate in tried)]
    rows = [
        [name, *("n/a" if model[key] is None else f"{model[key]:,}" for key in facts)]
        + [f"{lines[name]['lr']:g}"]
        + [_loss(lines[name]["tried"].get(rate, "")) for rate in tried]
        for name, model in about["models"].items()
    ]
    found = [Table("Models", text, header, rows)]
    if counts := about.get("counts"):
        text = (
            "Bigram counts of the training split, with the unigram counts as a prior; they cannot "
            "recall. Columns: pairs seen earlier in the window, by how often training has them; "
            f"all of those at most {RARE} times ({RECALL}), all other tokens ({REST}), and tokens "
            f"that followed the same one the last time, too ({LAST})."
        )
        losses = ["n/a" if loss is None else f"{loss:.3f}" for loss, _ in counts.values()]
        tokens = [f"{tokens:,}" for _, tokens in counts.values()]
        rows = [["loss", *losses], ["tokens", *tokens]]
        found.append(Table("What counts alone lose", text, ["", *counts], rows))
    return found


def _loss(score: float | str | None) -> str:
    return score if isinstance(score, str) else f"{-score:.3f}" if is_finite(score) else "diverged"


def language_study(name: str, title: str, question: Question, **declared: Any) -> Study:
    """Return a study of language models: `declared` are further attributes."""
    loss = "loss, nats a token"
    return Study(
        name,
        title,
        functools.partial(plan_places, question),
        measured_values,
        measures={
            "": loss,
            RECALLED: f"{loss}, of pairs seen earlier in the window and at most {RARE} times in "
            "training",
            ATTENTION: "value",
        },
        also={
            **{
                name: f"of pairs seen earlier in the window and {name} times in training"
                for name in BINS
            },
            LAST: "of tokens that followed the same one the last time, too",
            REST: "of all others than such rare pairs",
        },
        figure="losses",
        contrasts=functools.partial(contrasts, question),
        extra=collect_extra,
        tables=tables,
        check=functools.partial(check, question),
        options=("models", "data", "tokens", "documents", "rates"),
        scales=tuple(SCALES),
        **declared,
    )
