"""The comparison with rivals: its rows, what it counts as recall, its restarts, its words.

Trainings, exports and sweeps are imitated, and so is what models predict but in one test.
"""

from __future__ import annotations

import functools
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from cat_lm.core.errors import UserError
from cat_lm.data.opening import open_verified
from cat_lm.pretrained.loading import load_tokenizer
from eval.length_sweep.perplexity import span_windows, token_nlls
from eval.length_sweep.token_stream import Documents, split_stream
from eval.rivals import measure, page, rows
from eval.rivals.__main__ import main
from eval.rivals.measure import HeldOut, held_out, measured
from eval.rivals.rows import QUESTION, check_rows, check_sizes, comparison_of, parse_arguments
from eval.rivals.text_recall import (
    BINS,
    LAST,
    PRIOR,
    RECALL,
    REST,
    Counts,
    count_pairs,
    overlapping,
    slices,
)
from eval.small_study.plan import TUNING_SEED, Job
from tests.unit.imitated_study import LENGTHS, Imitation, run_command

run = functools.partial(run_command, main)


def added_at_the_start(config):
    """The deviation of what the first mixer adds, in parts of that of the embeddings."""
    import torch

    from cat_lm.training.building import build_model

    model, found = build_model(config, 2048).eval(), []
    mixer = r"(gpt_neox|model|backbone)\.layers\.0\.(attention|self_attn|attn|mixer)"
    (first,) = (m for name, m in model.named_modules() if re.fullmatch(mixer, name))
    first.register_forward_hook(lambda _, __, y: found.append(y[0] if isinstance(y, tuple) else y))
    rows = torch.randint(2048, (2, 128), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(rows)
    embedded = model.get_input_embeddings().weight.detach()
    return float(found[0].std() / embedded.std())


class TestRows:
    @pytest.mark.parametrize("size", ["cpu", "gpu"])
    def test_all_have_the_same_size_and_tokens(self, size):
        study = comparison_of(parse_arguments(["--size", size]))
        check_rows(study, study.size.vocabulary)
        assert len(study.models) == 12 and study.models == QUESTION.models
        for job in study.jobs()[:12]:
            choosing = Job(job.model, TUNING_SEED, job.folder, 1e-3)
            tokens = [
                (c.total_steps * c.tokens_per_step, c.optimizer.warmup_tokens)
                for c in map(study.config, (job, choosing))
            ]
            assert tokens == [(study.tokens, study.tokens // 20)] * 2

    def test_filters_are_compared_with_the_same_model_without_them_and_rivals_with_both(self):
        filters = {("cat_rope", "pythia"), ("mh_cat_rope", "pythia"), ("kv_shift", "pythia")}
        filters |= {("tfpp_cat", "tfpp"), ("cat_rope", "kv_shift"), ("tfpp", "pythia")}
        rivals = {"tfpp_canon_abcd", "mamba", "mamba2", "gla", "delta_net", "gated_deltanet"}
        both = {pair for name in rivals for pair in ((name, "tfpp"), ("tfpp_cat", name))}
        assert len(QUESTION.contrasts) == 18 and {*QUESTION.contrasts} == filters | both
        study = comparison_of(parse_arguments(["--held-out", "a/b"]))
        assert study.seeds == (0, 1, 2, 3, 4, 5)
        # Losses at the trained length and, by YaRN, the longest of two texts; recall of one.
        assert study.columns() == [(128, "none"), (1024, "yarn")]
        assert study.comparisons() == 18 * 2 * 2 + 18
        assert study.recall_length == 128, "no positions that were never trained"
        methods = {job.model: study.methods_of(job) for job in study.jobs()}
        assert {m for m, found in methods.items() if found == "none"} == rivals - {
            "tfpp_canon_abcd"
        }
        assert {*methods.values()} == {"none", "none,yarn"}

    @pytest.mark.parametrize("size", ["cpu", "gpu"])
    def test_rows_without_attention_start_as_wide_as_the_others(self, size):
        study = comparison_of(parse_arguments(["--size", size]))
        for job in study.jobs()[: len(study.models)]:
            model = study.config(job).model
            if model.architecture in ("gpt_neox", "llama"):
                continue  # they have no other start
            rule = math.sqrt(2 / (5 * model.hidden_size))
            assert model.initializer_range == pytest.approx(rule, rel=1e-5)
            default = type(model).model_fields["initializer_range"].default
            assert default != pytest.approx(rule, rel=0.1), "the control: it is set"
            assert getattr(model, "conv_init", "uniform") == "uniform"

    def test_no_row_starts_with_a_mixer_that_does_next_to_nothing(self):
        study = comparison_of(parse_arguments([]))
        for job in study.jobs()[: len(study.models)]:
            config = study.config(job)
            assert 0.1 < added_at_the_start(config) < 20, job.model
            if job.model == "mamba":  # the control: the library's own start
                library = config.model.model_copy(update={"initializer_range": 0.02})
                assert added_at_the_start(config.model_copy(update={"model": library})) < 0.1

    def test_a_row_of_another_size_is_refused(self):
        check_sizes({"a": 1_019_000, "b": 981_000}, 1_000_000, 300)
        for count, off in ((1_030_000, "+3.0%"), (970_000, "-3.0%")):
            with pytest.raises(UserError, match=re.escape(f"{count:,} parameters")) as raised:
                check_sizes({"a": 1_000_000, "gla": count}, 1_000_000, 300)
            assert f"configs/study/gla.yaml: has {count:,}" in str(raised.value)
            assert f"with a vocabulary of 300, {off} of pythia's 1,000,000" in str(raised.value)

    def test_rows_that_read_other_tokens_are_refused(self, monkeypatch):
        study = comparison_of(parse_arguments(["--models", "gla"]))
        other = type(study).config

        def config(self, job):
            found = other(self, job)
            wider = found.train.model_copy(update={"global_batch_size": 32})
            return found.model_copy(update={"train": wider}) if job.model == "gla" else found

        monkeypatch.setattr(type(study), "config", config)
        with pytest.raises(UserError, match="equal tokens"):
            check_rows(study, 2048)

    def test_help_and_wrong_options_need_no_torch(self):
        code = (
            "import sys, runpy\n"
            "for words in (['--help'], ['--sizes', 'x']):\n"
            "    sys.argv = ['x', *words]\n"
            "    try: runpy.run_module('eval.rivals', run_name='__main__')\n"
            "    except SystemExit as e: print(e.code)\n"
            "heavy = {'torch', 'transformers', 'matplotlib'} & sys.modules.keys()\n"
            "sys.exit(str(heavy) if heavy else 0)"
        )
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        assert result.stdout.split()[-2:] == ["0", "2"]
        assert (
            result.stderr.strip().count("\n") == 0
            and "error: unrecognized arguments: --sizes" in result.stderr
        )

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--models", "gla,rwkv"], "--models rwkv: is not of the comparison, which has pythia"),
            (["--seeds", "0,1000"], "--seeds 1000: chooses the rates, and is not reported"),
        ],
    )
    def test_wrong_values_are_one_line(self, arguments, message):
        with pytest.raises(UserError, match=re.escape(message)):
            comparison_of(parse_arguments(arguments))


def brute_force(tokens, windows, counts):
    """Position -> the slices that it is in, by looking at every earlier place of its window."""
    found = {}
    for window in windows:
        for i in range(window.first, window.stop):
            earlier = [j for j in range(window.start, i) if tokens[j] == tokens[i]]
            hit = any(tokens[j + 1] == tokens[i + 1] for j in earlier)
            rare = hit and counts[i] <= 3
            number = sum(counts[i] >= edge for edge in (1, 4, 16, 64))
            last = hit and tokens[earlier[-1] + 1] == tokens[i + 1]
            found[i] = {RECALL if rare else REST, *([BINS[number]] if hit else [])}
            found[i] |= {LAST} if last else set()
    return found


class TestTextRecall:
    @pytest.mark.parametrize(("length", "stride"), [(8, 4), (5, 2), (1, 1), (64, 32), (300, 150)])
    def test_slices_are_those_of_a_brute_force(self, length, stride):
        random = np.random.default_rng(length)
        tokens = random.integers(0, 6, 161)
        counts = random.choice([0, 1, 3, 4, 15, 16, 63, 64, 900], 160)
        # Documents, and tokens between them that nobody scores.
        spans = [(0, 1), (2, 60), (61, 64), (70, 160)]
        windows = [w for span in spans for w in span_windows(*span, length, stride)]
        found = slices(tokens, windows, counts, vocabulary=6)
        expected = brute_force(tokens, windows, counts)
        for name, part in found.items():
            assert set(np.flatnonzero(part)) == {i for i, own in expected.items() if name in own}
        assert (found[RECALL].any() and found[LAST].any()) == (length > 1)
        assert found[REST].sum() + found[RECALL].sum() == sum(b - a for a, b in spans)

    def test_a_pair_before_the_window_is_no_hit(self):
        tokens = np.array([1, 2, 3, 4, 1, 2])
        whole, half = (span_windows(0, 5, length, 2) for length in (5, 4))
        zeros = np.zeros(5, np.int64)
        assert np.flatnonzero(slices(tokens, whole, zeros, 5)["0"]).tolist() == [4]
        assert not slices(tokens, half, zeros, 5)["0"].any(), "its pair is at 0, it begins at 1"

    def test_counts_of_pairs_in_parts_are_those_of_the_whole(self):
        random = np.random.default_rng(0)
        train, tokens = random.integers(0, 9, 500), random.integers(0, 10, 80)
        chunks = [train[start : start + 8] for start in range(0, 499, 7)]
        found = count_pairs(tokens, chunks, 10)
        pairs = list(zip(train[:-1].tolist(), train[1:].tolist(), strict=True))
        wanted = list(zip(tokens[:-1].tolist(), tokens[1:].tolist(), strict=True))
        assert found.pairs.tolist() == [pairs.count(pair) for pair in wanted]
        assert found.first.tolist() == [sum(a == x for x, _ in pairs) for a, _ in wanted]
        assert found.second.tolist() == [sum(b == y for _, y in pairs) for _, b in wanted]
        assert found.total == 499

    def test_parts_of_a_corpus_share_a_token(self, tiny_corpus, monkeypatch):
        monkeypatch.setattr("eval.rivals.text_recall._CHUNK", 100)
        corpus = open_verified(tiny_corpus, "train")
        parts = list(overlapping(corpus))
        assert [len(part) for part in parts[:-1]] == [101] * (len(parts) - 1)
        whole = np.concatenate([parts[0], *(part[1:] for part in parts[1:])])
        assert (whole == corpus.tokens(0, corpus.num_tokens)).all()

    def test_the_bigram_model_is_a_distribution(self):
        train = np.random.default_rng(1).integers(0, 7, 400)
        shares = []
        for token in range(7):
            counts = count_pairs(np.array([3, token]), [train], 7)
            shares.append(math.exp(-counts.bigram_nlls()[0]))
        assert sum(shares) == pytest.approx(1)
        unseen = Counts(*np.zeros((3, 1), np.int64), total=0, vocabulary=7)
        assert unseen.bigram_nlls()[0] == pytest.approx(math.log(7)), f"prior of {PRIOR} tokens"


@pytest.fixture
def everything_is_rare(monkeypatch):
    """The tests' text is of few letters, whose pairs are all frequent."""
    monkeypatch.setattr("eval.rivals.text_recall.RARE", 10**6)


@pytest.fixture(scope="module")
def text(long_corpus) -> HeldOut:
    return held_out(long_corpus, 3, 200, (16, 128), skip_tokens=0)


@pytest.mark.usefixtures("everything_is_rare")
class TestMeasure:
    def test_documents_are_those_of_the_sweep(self, text, long_corpus):
        tokenizer = load_tokenizer(long_corpus / "tokenizer")
        given = (long_corpus, tokenizer, 3 * 200, Documents(200, 200))
        found = held_out(long_corpus, 3, 200, (16,), skip_tokens=32_768)
        assert found.stream.sha256 == split_stream(*given, skip_tokens=32_768).sha256
        assert text.stream.sha256 == split_stream(*given).sha256 != found.stream.sha256
        with pytest.raises(UserError, match=r"--skip-tokens 1000000: .*; skip fewer"):
            held_out(long_corpus, 3, 200, (16,), skip_tokens=10**6)

    def test_slices_of_a_model_are_its_losses(self, text, long_corpus, tmp_path):
        from cat_lm.model.hf.configuration import CatGlaConfig
        from cat_lm.model.hf.modeling_recurrent import CatGlaForCausalLM

        shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_heads": 2}
        model = CatGlaForCausalLM(CatGlaConfig(vocab_size=257, intermediate_size=16, **shape))
        model.eval().save_pretrained(tmp_path / "model")
        found = measured(tmp_path, text, "float32")
        windows = text.windows(16)
        assert {(w.stop - w.start, w.stop - w.first) for w in windows[:3]} == {(16, 16), (16, 8)}
        nlls = token_nlls(model, text.stream.tokens, windows)
        scored = np.concatenate([nlls[start:stop] for start, stop in text.spans])
        assert len(scored) == 600
        mine = {row["slice"]: row for row in found if row["length"] == 16}
        parts = [mine[RECALL], mine[REST]]
        assert sum(part["tokens"] for part in parts) == 600
        total = sum(sum(part["document_nlls"]) for part in parts)
        assert total == pytest.approx(float(scored.sum()), rel=1e-5)
        assert sum(mine[name]["tokens"] for name in BINS) == mine[RECALL]["tokens"] > 0
        # More is seen in a longer window.
        longer = {row["slice"]: row for row in found if row["length"] == 128}
        assert longer[RECALL]["tokens"] > mine[RECALL]["tokens"]
        # What is measured is not measured again, unless the weights are others.
        (cell,) = (tmp_path / "recall").iterdir()
        before = cell.stat().st_mtime_ns
        assert measured(tmp_path, text, "float32") == found
        assert cell.stat().st_mtime_ns == before
        cell.write_text(
            cell.read_text().replace('"tokens": 600', '"tokens": 601').replace("0", "1")
        )
        with pytest.raises(UserError, match=r"recall/.*\.json: damaged: .*; delete it, and"):
            measured(tmp_path, text, "float32")

    def test_a_slice_without_tokens_and_losses_that_are_not_finite_are_none(self, text):
        nlls = np.zeros(len(text.stream.tokens) - 1, np.float32)
        nlls[text.spans[1][0]] = math.nan
        found = {row["slice"]: row for row in text.rows(16, nlls)}
        assert found[REST]["loss"] is None and found[REST]["document_nlls"] is None
        assert found[REST]["tokens"] > 0 and found[RECALL]["loss"] == 0
        empty = next(row for row in text.rows(1, nlls) if row["slice"] == RECALL)
        assert (empty["loss"], empty["tokens"]) == (None, 0)


class Rivals(Imitation):
    LOSS: ClassVar = {"tfpp": 4.0, "tfpp_cat": 3.8, "gla": 4.001}


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([2.8, 2.9], "Over all tokens they lose 3.000."),
        ([2.9, 3.05], "Over all tokens they lose 3.000."),
        ([2.9, 3.3], "they lose 3.000; less than the mean, but not than every seed, of the row."),
        ([3.1, 3.2], "they lose 3.000; less than every seed of the row."),
        ([], "Over all tokens they lose 3.000."),
    ],
)
def test_a_row_that_counts_of_pairs_beat_is_named(losses, said):
    slices = {RECALL: (6.0, 10), REST: (2.0, 30)}
    bigram = [{"slice": n, "loss": x, "tokens": count} for n, (x, count) in slices.items()]
    row = {"model": "a", "length": 128, "method": "none"}
    rows = [row | {"seed": seed, "loss": loss} for seed, loss in enumerate(losses)]
    other = row | {"seed": 0, "loss": 9.0}
    others = [other | {"length": 1024}, other | {"method": "yarn"}, other | {"loss": None}]
    summary = {
        "recall": {"bigram": bigram},
        "training_length": 128,
        "rows": [*rows, *others],
        "models": [{"model": "a", "label": "the row"}],
    }
    assert page._behind_counts(summary).endswith(said)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_residual_stream_is_told_where_precisions_differ(precision):
    note = page._main_note({"trained_with": {"precision": [precision]}})
    assert ("in bf16. Positions" in note) == (precision == "bf16")


@pytest.mark.usefixtures("everything_is_rare")
class TestComparison:
    @pytest.fixture(autouse=True)
    def imitated(self, request, monkeypatch):
        """Predictions are made up; a picture is drawn in one test only."""
        self.scored = []

        def scored(folder: Path, text: HeldOut, dtype: str) -> list[dict]:
            self.scored.append(folder.parent.name)
            model, seed = folder.parent.name.split("-seed")
            random = np.random.default_rng(0)
            nlls = Rivals.LOSS[model] + 0.01 * int(seed) + random.random(len(text.stream.tokens))
            # GLA is as good as TF++ but for what it has to recall, where seeds differ.
            nlls = nlls[:-1].astype(np.float32)
            return [
                row | ({"loss": row["loss"] + (0.5, 0.1, 0.9)[int(seed)]} if worse else {})
                for length in text.lengths
                for row in text.rows(length, nlls)
                for worse in (model == "gla" and row["slice"] == RECALL,)
            ]

        monkeypatch.setattr(measure, "_scored", scored)
        if "page" not in request.node.name:
            monkeypatch.setattr("eval.rivals.figure.rivals_figure", lambda _: None)
            monkeypatch.setattr("eval.rivals.page.page", lambda _: "")
        monkeypatch.setattr("eval.common.style.save_figure", lambda *_: None)

    @pytest.fixture
    def arguments(self, long_corpus, tmp_path) -> list[object]:
        chosen = ["--models", "tfpp,tfpp_cat,gla", "--documents", 4, "--parallel", 1]
        chosen += ["--seeds", "0,1,2"]
        return ["--data", long_corpus, "--out", tmp_path / "out", *chosen]

    def test_a_further_text_has_tables_on_the_page(
        self, arguments, long_corpus, tmp_path, monkeypatch, capsys
    ):
        other = tmp_path / "books"
        shutil.copytree(long_corpus, other)
        call = [*arguments, "--held-out", other]
        code, _, err = run(monkeypatch, capsys, Rivals(), *call)
        assert code == 0, err
        folder = tmp_path / "out"
        text = (folder / "rivals.md").read_text(encoding="utf-8")
        table = text.split("**Loss and perplexity on books**")[1].split("**")[0]
        assert "| TF++ + CAT | " in table and "| GLA | " in table
        differences = text.split("**Differences on books**")[1].split("**")[0]
        assert differences.count("| TF++ + CAT | TF++ | -0.") == 1
        assert {
            pair["comparisons"]
            for pair in json.loads((folder / "summary.json").read_text())["comparisons"]
        } == {3 * 5}
        assert "of 15 differences are carried" in text and "trained on one text" in text
        html = (folder / "rivals.html").read_text(encoding="utf-8")
        assert "<h2>Differences on books</h2>" in html

    def test_numbers_tables_and_page(self, arguments, tmp_path, monkeypatch, capsys):
        asked = []

        def read(*given):
            asked.append(given[-1])
            return held_out(*given)

        monkeypatch.setattr("eval.rivals.summary.held_out", read)
        code, out, err = run(monkeypatch, capsys, first := Rivals(), *arguments)
        assert code == 0, err
        assert "9 runs of 3 models and 9 that choose rates" in out and "about" in out
        choosing = [call for call in first.calls if "/tuning/" in call]
        assert len(choosing) == 9, "the best of three is the middle one"
        assert all(f"train.seed={TUNING_SEED} " in call for call in choosing)
        assert all("train.max_tokens=512000 " in call for call in choosing)
        reported = [c for c in first.calls if "train.py" in c and "/runs/" in c]
        assert len(reported) == 9
        assert all("train.max_tokens=512000 " in call and "lr=0.003 " in call for call in reported)
        swept = [call for call in first.calls if "length_sweep" in call]
        assert all(("--methods none " in call) == ("/gla-" in call) for call in swept)
        assert all(("--methods none,yarn " in call) == ("/tfpp" in call) for call in swept)
        folder = tmp_path / "out"
        summary = json.loads((folder / "summary.json").read_text())
        assert {pair["comparisons"] for pair in summary["comparisons"]} == {3 * 3}
        assert {(p["length"], p["method"]) for p in summary["comparisons"]} == {
            (128, "none"),
            (1024, "yarn"),
        }
        assert asked == [32_768], "what rates are chosen on is skipped in recall, too"
        recall = summary["recall"]
        assert recall["length"] == 128 and recall["training_split_tokens"] == 60_000
        verdicts = {(p["model"], p["minus"]): p["verdict"] for p in recall["comparisons"]}
        assert verdicts["tfpp_cat", "tfpp"] == "lower"
        (worse,) = [p for p in recall["comparisons"] if p["model"] == "gla"]
        assert worse["verdict"] == "unclear", "large, but seeds disagree"
        assert worse["mean"] == pytest.approx(0.501, abs=1e-3)
        cost = {model["model"]: model for model in summary["models"]}
        # Two heads of 32 x 64 in four layers, in fp32, whatever the length.
        assert set(cost["gla"]["state_bytes"].values()) == {4 * 4 * 2 * 32 * 64}
        caches = cost["tfpp"]["state_bytes"]
        assert caches == {"128": 4 * 2 * 128 * 128 * 2, "1024": 4 * 2 * 128 * 1024 * 2}
        table = (folder / "rivals.md").read_text(encoding="utf-8")
        lines = [line for line in table.splitlines() if line.startswith("| GLA | TF++ |")]
        higher = (
            "+0.001 [+0.001, +0.001] | **higher** |",
            "+0.151 [+0.151, +0.151] | **higher** |",
        )
        # Beyond the trained length TF++ is read by YaRN, GLA as it is.
        assert len(lines) == 1
        assert lines[0].startswith(f"| GLA | TF++ | {' '.join(higher)} +0.501 [")
        head = "| loss at 128 |  | loss at 1,024, RoPE by YaRN |  | recall at 128 |"
        assert head in table
        assert "| TF++ + CAT | TF++ | -0.200 [-0.200, -0.200] | **lower** |" in table
        assert "corrected for 9 comparisons" in table and "| bigram counts |" in table
        assert "7 of 9 differences are carried by their intervals" in table
        html = (folder / "rivals.html").read_text(encoding="utf-8")
        assert "<svg role=" in html and '<td class="best">lower</td>' in html
        for label in ("TF++ + CAT", "GLA", "What may be concluded"):
            assert label in html

    def test_interrupted_and_resumed_equals_straight(
        self, arguments, tmp_path, monkeypatch, capsys
    ):
        arguments += ["--seeds", "0,1"]
        assert run(monkeypatch, capsys, Rivals(), *arguments)[0] == 0
        straight = json.loads((tmp_path / "out/summary.json").read_text())
        arguments[3] = tmp_path / "other"
        # A training fails at first, and measuring is stopped after four runs.
        failing = Rivals(fails="gla-seed1 .*train|train.*gla-seed1 ")
        scored = measure._scored

        def stopped(*given):
            if len(self.scored) == 4:
                raise KeyboardInterrupt
            return scored(*given)

        self.scored.clear()
        monkeypatch.setattr(measure, "_scored", stopped)
        assert run(monkeypatch, capsys, failing, *arguments)[0] == 130
        assert not (tmp_path / "other/summary.json").exists()
        monkeypatch.setattr(measure, "_scored", scored)
        assert run(monkeypatch, capsys, failing, *arguments)[0] == 2
        partial = json.loads((tmp_path / "other/summary.json").read_text())
        assert partial["missing"] == ["gla-seed1"]
        row = re.search(r"\n\| GLA \|.*", (tmp_path / "other/rivals.md").read_text())[0]
        assert row.count("(1 of 2)") == 4, "loss, perplexity and two of recall"
        assert run(monkeypatch, capsys, last := Rivals(), *arguments)[0] == 0
        assert all("gla-seed1" in call or "/trial/" in call for call in last.calls)
        assert len(self.scored) == len(set(self.scored)) == 6
        resumed = json.loads((tmp_path / "other/summary.json").read_text())
        for key in ("rows", "cells", "comparisons", "recall"):
            assert resumed[key] == straight[key]

    def test_a_row_whose_rates_fail_is_left_out_and_the_others_are_told(
        self, arguments, tmp_path, monkeypatch, capsys
    ):
        failing = Rivals(fails="tuning/gla-lr0.01 ")
        code, _, err = run(monkeypatch, capsys, failing, *arguments, "--seeds", "0,1")
        assert code == 2 and err.splitlines()[-1].startswith("error: 1 of 13 runs failed")
        assert sum("tuning/gla-lr0.01 " in call for call in failing.calls) == 2, "once more"
        summary = json.loads((tmp_path / "out/summary.json").read_text())
        assert summary["missing"] == ["gla-seed0", "gla-seed1"]
        table = (tmp_path / "out/rivals.md").read_text()
        assert "| TF++ + CAT | 4.477 | **4.000** | 4.523 |" in table
        assert "| TF++ + CAT | TF++ | -0.200 [" in table

    def test_a_row_that_lost_a_seed_is_compared_in_nothing(
        self, arguments, tmp_path, monkeypatch, capsys
    ):
        diverging = Rivals(diverges="tfpp_cat-seed1")
        assert run(monkeypatch, capsys, diverging, *arguments)[0] == 0
        summary = json.loads((tmp_path / "out/summary.json").read_text())
        pairs = [*summary["comparisons"], *summary["recall"]["comparisons"]]
        found = {(p["verdict"], p["low"], p["n"]) for p in pairs if p["model"] == "tfpp_cat"}
        assert found == {("unclear", None, 2)}
        table = (tmp_path / "out/rivals.md").read_text()
        assert "| TF++ + CAT | TF++ | -0.200 (2 of 3) | unclear |" in table
        assert "(n of N): so many of the seeds asked for" in table

    def test_a_damaged_cell_is_one_line(self, arguments, tmp_path, monkeypatch, capsys):
        assert run(monkeypatch, capsys, Rivals(), *arguments, "--seeds", "0")[0] == 0
        (cell,) = (tmp_path / "out/runs/gla-seed0/recall").iterdir()
        cell.write_text(cell.read_text()[:-9])
        code, _, err = run(monkeypatch, capsys, Rivals(), *arguments, "--seeds", "0")
        assert (code, err.count("\n")) == (2, 1)
        assert f"error: {cell}: damaged: " in err and "delete it, and the same command" in err

    def test_rows_of_other_sizes_are_refused_before_anything_is_trained(
        self, arguments, tmp_path, monkeypatch, capsys
    ):
        monkeypatch.setattr(rows, "TOLERANCE", 1e-5)
        code, _, err = run(monkeypatch, capsys, never := Rivals(), *arguments)
        assert (code, err.count("\n")) == (2, 1) and never.calls == []
        assert "configs/study/tfpp.yaml: has 8" in err and not (tmp_path / "out").exists()

    def test_estimate_starts_nothing(self, arguments, tmp_path, monkeypatch, capsys):
        imitation = Rivals()
        code, out, _ = run(monkeypatch, capsys, imitation, *arguments, "--estimate")
        assert code == 0 and re.search(r"about \d+ (s|min|h) for all", out)
        assert all("train.max_steps=" in call for call in imitation.calls)
        assert not (tmp_path / "out/runs").exists() and LENGTHS[1] == 128

    def test_a_study_in_the_folder_is_another_one(self, arguments, tmp_path, monkeypatch, capsys):
        out = tmp_path / "out"
        out.mkdir()
        (out / "settings.json").write_text(
            '{"format": 1, "data_fingerprint": "", "question": "variants", "configs": {}}'
        )
        code, _, err = run(monkeypatch, capsys, Rivals(), *arguments)
        assert (code, err.count("\n")) == (2, 1) and "holds a study with another " in err
