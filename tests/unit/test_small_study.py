"""The small study: its plan, its statistics, its restarts, and what it writes.

Trainings are imitated here; tests/e2e/test_small_study.py runs the real commands once.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import ClassVar

import pytest
import yaml

from cat_lm.config import load_config
from cat_lm.data.opening import open_verified
from cat_lm.errors import UserError
from cat_lm.io.files import write_json
from cat_lm.io.own_files import make_marked
from cat_lm.pretrained import load_tokenizer
from cat_lm.training.checkpoint import step_folders
from eval.common.interrupts import held
from eval.length_sweep.token_stream import Documents, split_stream
from eval.small_study.__main__ import main
from eval.small_study.arguments import parse_arguments, study_of
from eval.small_study.attention import attention_of
from eval.small_study.collect import _comparisons, _sums
from eval.small_study.execute import (
    ORIGIN,
    Workers,
    commands,
    complete_run,
    last_loss,
    result_path,
    unfinished,
)
from eval.small_study.figure import study_figure
from eval.small_study.plan import CONFIGS, ROOT, SIZES, TUNING_SEED, Job, Study, claim
from eval.small_study.progress import Estimate, reading_cost
from eval.small_study.questions import MODELS, QUESTIONS
from eval.small_study.reuse import COPIES
from eval.small_study.run import prepared
from eval.small_study.tables import comparison_columns, comparison_lines
from eval.small_study.tune import known, tuned
from tests.unit.imitated_study import LENGTHS, Imitation, run_command

# model -> (conv_type, streams, window, positions) as the study's definition asks for
DEFINITION = {
    "pythia": ("none", None, None, "rope"),
    "nope": ("none", None, None, "none"),
    "cat_rope": ("head", "qkv", 21, "rope"),
    "cat_nope": ("head", "qkv", 21, "none"),
    "mh_cat_rope": ("multihead", "qkv", 21, "rope"),
    "mh_cat_nope": ("multihead", "qkv", 21, "none"),
    **dict.fromkeys(("canon_b", "canon_abcd", "tfpp_canon_abcd"), ("depthwise", "qkv", 4, "rope")),
    **dict.fromkeys(("canon_acd", "tfpp", "tfpp_canon_acd"), ("none", None, None, "rope")),
    **dict.fromkeys(
        ("cat_canon_acd", "tfpp_cat", "tfpp_cat_canon_acd"), ("head", "qkv", 21, "rope")
    ),
    "kv_shift": ("head", "kv", 2, "rope"),
    **dict.fromkeys(("qk_l2", "qk_rms"), ("none", None, None, "rope")),
    **{
        f"{name}_{norm}": ("head", streams, 21, "rope")
        for name, streams in (("cat_k", "k"), ("cat_qk", "qk"), ("cat", "qkv"))
        for norm in ("l2", "rms", "rms_before")
    },
    "cat_l1": ("head", "qkv", 21, "rope"),
    **{
        f"cat_qk_r{rank}{suffix}": ("head", "qk", 21, positions)
        for rank in (2, 4)
        for suffix, positions in (("", "rope"), ("_nope", "none"))
    },
    "mta_kernel_nope": ("none", None, None, "none"),
    **{
        f"{name}{suffix}": ("head", "qkv", 21, positions)
        for name in ("cat_ssm", "cat_exp")
        for suffix, positions in (("", "rope"), ("_nope", "none"))
    },
    **dict.fromkeys(("mta", "mta_kernel"), ("none", None, None, "rope")),
    **{
        f"{name}{suffix}": (*streams, positions)
        for name, streams in (
            *dict.fromkeys(("las_vanilla", "las_l", "las_s", "las"), ("none", None, None)).items(),
            *dict.fromkeys(("las_filter", "las_l_filter"), ("head", "v", 5)).items(),
        )
        for suffix, positions in (("", "rope"), ("_nope", "none"))
    },
    **{
        f"cat_{streams}{suffix}": ("head", streams, 21, positions)
        for suffix, positions in (("", "rope"), ("_nope", "none"))
        for streams in ("v", "k", "qk", "kv", "qv")
    },
    **{
        f"{name}{suffix}": (kind, streams, window, positions)
        for suffix, positions in (("", "rope"), ("_nope", "none"))
        for name, kind, streams, window in (
            ("mh_cat_v", "multihead", "v", 21),
            ("mh_maps", "multihead", "qkv", 21),
            ("mh_maps_v", "multihead", "v", 21),
            ("cat_w4", "head", "qkv", 4),
            ("cat_w128", "head", "qkv", 128),
        )
    },
}
# Families without convolutions of q, k and v: tests/unit/test_rivals.py looks at them.
RIVALS = {"mamba", "mamba2", "gla", "delta_net", "gated_deltanet"}


class Shifted(Imitation):
    """Has a model of another question."""

    LOSS: ClassVar = Imitation.LOSS | {"kv_shift": 3.9}


def last_loss_of(run: Path) -> float:
    """Give a loss that the imitation of no training has, with the same best rate."""
    return 3 + abs(math.log10(load_config(run / "config.yaml").optimizer.lr / 3e-3))


DECAYED = ("las_l", "las", "las_l_filter")
NINE = QUESTIONS["variants"].models
F, OTHER = {"": "f" * 64}, {"": "e" * 64}  # fingerprints of data


class TestPlan:
    @pytest.mark.parametrize("size", SIZES)
    def test_models_differ_only_in_what_they_are(self, size):
        assert MODELS.keys() == DEFINITION.keys() | RIVALS
        base = yaml.safe_load((ROOT / CONFIGS / f"recipe_{size}.yaml").read_text())
        base_length = base["data"]["context_length"]
        found = []
        for model, (conv_type, streams, window, positions) in DEFINITION.items():
            own = yaml.safe_load((ROOT / CONFIGS / f"{model}.yaml").read_text())
            starts = {"tfpp": "tfpp_", "las": "bytes_"}
            family = "".join(base for start, base in starts.items() if model.startswith(start))
            assert own.keys() == {"base", "model", "train"}
            assert own["base"] == f"base_{family}cpu.yaml"
            assert own["train"].keys() == {"output_dir"}
            assert own["model"].keys() <= {
                *("conv_type", "conv_streams", "conv_window", "position_embedding"),
                *("conv_mixing", "conv_init", "canon", "conv_norm", "qk_norm", "qk_norm_place"),
                *("conv_filter", "conv_state"),
                *("conv_rank", "attention", "attention_options", "attn_implementation"),
                *("score_transform", "score_options", "value_transform", "value_options"),
            }
            study = Study(SIZES[size], (model,), (0,), Path(f"x/{model}"), Path("data"))
            config = study.config(study.jobs()[0])
            assert config.model.canon == ("ACD" if "_a" in model else "none")
            norm = re.search("_(l2|rms)", model)
            assert config.model.qk_norm == (norm[1] if norm else "none")
            assert (config.model.qk_norm_place == "before") == model.endswith("_before")
            assert (config.model.conv_norm == "l1") == model.endswith("_l1")
            rank = re.search("_r([24])(_nope)?$", model)
            assert config.model.conv_rank == (int(rank[1]) if rank else 1)
            long = {"cat_ssm": ("ssm", 16), "cat_exp": ("exponential", 1)}
            filters = long.get(model.removesuffix("_nope"), ("taps", 0))
            assert (config.model.conv_filter, config.model.conv_state) == filters
            assert (config.model.attention == "multi_token") == model.startswith("mta")
            las = model.removesuffix("_nope")
            assert (config.model.score_transform != "none") == (las in DECAYED)
            assert (config.model.value_transform != "none") == (las in ("las_s", "las"))
            assert config.data.context_length == (512 if "las" in model else base_length)
            if "abcd" in model:
                assert config.model.conv_init == "residual"
            # A Canon layer has more than a filter for each head.
            pythia = 1_317_632 if size == "cpu" else 33_608_704
            assert abs(config.num_parameters(SIZES[size].vocabulary) / pythia - 1) < 0.02
            assert config.model.conv_type == conv_type
            assert config.model.position_embedding == positions
            mixing = "maps" if model.startswith("mh_maps") else "embeddings"
            assert config.model.conv_mixing == mixing
            if conv_type != "none":
                assert (config.model.conv_streams, config.model.conv_window) == (streams, window)
            assert config.model.hidden_size == base["model"]["hidden_size"]
            found.append(own["train"]["output_dir"])
        assert len(set(found)) == len(DEFINITION)

    def test_questions_compare_models_that_differ_as_they_say(self):
        assert list(QUESTIONS) == [
            "variants",
            "streams",
            "maps",
            "length",
            "canon",
            "qk_norm",
            "rank",
            "filters",
            "las",
        ]
        sizes = {name: len(question.models) for name, question in QUESTIONS.items()}
        first = {"variants": 9, "streams": 14, "maps": 10, "length": 10}
        assert sizes == {**first, "canon": 12, "qk_norm": 16, "rank": 11, "filters": 10, "las": 12}
        for question in QUESTIONS.values():
            assert len(set(question.contrasts)) == len(question.contrasts)
            assert set(question.models) <= MODELS.keys()
        for name in ("streams", "maps", "canon", "qk_norm", "rank", "las"):
            for a, b in QUESTIONS[name].contrasts:
                assert DEFINITION[a][3] == DEFINITION[b][3], "the same positions"
        # Of the two questions on positions, a difference is of positions or of the rest.
        for name, count in (("length", 5), ("filters", 3)):
            other = [
                (a, b) for a, b in QUESTIONS[name].contrasts if DEFINITION[a][3] != DEFINITION[b][3]
            ]
            assert len(other) == count
            for a, b in other:
                assert DEFINITION[a][:3] == DEFINITION[b][:3] and DEFINITION[a][3] == "none"
            assert QUESTIONS[name].beyond == ("none", "yarn")
        assert QUESTIONS["length"].factors[-1] == 32
        ((with_rope, without),) = QUESTIONS["length"].interactions
        assert [DEFINITION[x][3] for x in (*with_rope, *without)] == ["rope"] * 2 + ["none"] * 2

    def test_losses_are_compared_as_positions_were_trained_and_as_they_are_best_read(
        self, tmp_path
    ):
        models = ("pythia", "nope")
        study = Study(SIZES["cpu"], models, (0,), tmp_path, tmp_path, question="length")
        assert study.columns() == [(128, "none"), (4096, "none"), (4096, "yarn")]
        # One difference, at three places; what each model loses at the longest, twice for RoPE.
        assert study.comparisons() == 3 + 3
        assert study.places() == [
            (("nope", "pythia"), 128, "none"),
            (("nope", "pythia"), 4096, "none"),
            (("pythia",), 4096, "none"),
            (("nope",), 4096, "none"),
            (("nope", "pythia"), 4096, "yarn"),
            (("pythia",), 4096, "yarn"),
        ]
        pair = ("cat_nope", "nope")
        nope = Study(SIZES["cpu"], pair, (0,), tmp_path, tmp_path, question="length")
        assert {method for _, _, method in nope.places()} == {"none"}, "nothing to scale"
        assert [study.methods_of(job) for job in study.jobs()] == ["none,yarn", "none"]
        assert study.cells() == 6 + 5
        streams = Study(SIZES["cpu"], models, (0,), tmp_path, tmp_path, question="streams")
        assert streams.columns() == [(128, "none"), (1024, "yarn")]
        pair = Study(
            SIZES["cpu"], ("cat_v_nope", "nope"), (0,), tmp_path, tmp_path, question="streams"
        )
        assert pair.comparisons() == 2, "models without positions are read as they are"
        maps = Study(SIZES["cpu"], models, (0,), tmp_path, tmp_path, question="maps")
        assert maps.columns() == [(128, "none")]
        assert {maps.methods_of(job) for job in maps.jobs()} == {"paper"}

    def test_what_a_model_loses_is_against_itself_at_the_trained_length(self, tmp_path):
        models = ("pythia", "nope")
        study = Study(SIZES["cpu"], models, (0, 1), tmp_path, tmp_path, question="length")
        losses = {
            "pythia": {(128, "none"): 4.0, (4096, "none"): 5.0, (4096, "yarn"): 4.25},
            "nope": {(128, "none"): 4.5, (4096, "none"): 4.625},
        }
        swept = {
            job: [
                {"length": length, "method": method, "loss": loss + job.seed}
                for (length, method), loss in losses[job.model].items()
            ]
            for job in study.jobs()
        }
        found = _comparisons(study, swept)
        alone = {(p["model"], p["method"]): p for p in found if p["model"] == p["minus"]}
        means = {place: pair["mean"] for place, pair in alone.items()}
        assert means == {("pythia", "none"): 1, ("nope", "none"): 0.125, ("pythia", "yarn"): 0.25}
        assert {pair["comparisons"] for pair in found} == {6}
        summary = {"training_length": 128, "seeds": [0, 1]}
        summary["models"] = [{"model": name, "label": MODELS[name]} for name in models]
        columns = comparison_columns(summary, {"comparisons": found})
        lines = comparison_lines(summary, columns)[1]
        assert [line[:3] for line in lines[1:]] == [
            ["Pythia (RoPE)", "itself at 128", ""],
            ["no convolution, NoPE", "itself at 128", ""],
        ]
        assert lines[1][4].startswith("+1.000 [") and lines[1][6].startswith("+0.250 [")
        assert lines[2][6] == "", "nothing to scale"

    def test_the_readme_has_the_questions(self):
        text = (ROOT / "eval/small_study/README.md").read_text(encoding="utf-8")
        table = text.split("<!-- questions -->\n")[1].split("<!-- /questions -->")[0]
        lines = [
            f"| `{name}` | {asked.text} | {len(asked.models)} | "
            f"{len(asked.contrasts) + len(asked.interactions)} |"
            for name, asked in QUESTIONS.items()
        ]
        assert table.splitlines()[2:] == lines

    def test_jobs_are_seed_by_seed_and_their_commands_are_a_person_s(self, tmp_path):
        study = Study(SIZES["cpu"], NINE, (0, 1, 2), tmp_path / "out", tmp_path / "data")
        jobs = study.jobs()
        assert len({job.folder for job in jobs}) == 27
        assert [job.seed for job in jobs[:10]] == [0] * 9 + [1]
        found = commands(study, jobs[9])
        assert found["train"][:2] == ["train.py", "configs/study/pythia.yaml"]
        assert "base=configs/study/base_cpu.yaml" in found["train"]
        assert "train.seed=1" in found["train"] and "train.resume=auto" in found["train"]
        assert found["sweep"][found["sweep"].index("--lengths") + 1] == ",".join(map(str, LENGTHS))

    def test_same_data_order_for_all_models_of_a_seed(self, tmp_path):
        study = Study(SIZES["cpu"], NINE, (0, 1), tmp_path / "out", tmp_path / "data")
        order = {}
        for job in study.jobs():
            config = study.config(job)
            decides = (config.data, config.train.global_batch_size, config.train.seed)
            order.setdefault(job.seed, set()).add(str(decides))
        assert [len(values) for values in order.values()] == [1, 1]
        assert order[0] != order[1]

    def test_other_settings_in_the_folder_are_refused(self, tmp_path):
        study = Study(SIZES["cpu"], ("pythia",), (0,), tmp_path, tmp_path / "data")
        claim(study, F)
        claim(study, F)
        # More seeds or models are no other study.
        claim(Study(SIZES["cpu"], ("cat_rope",), (0, 1), tmp_path, tmp_path / "data"), F)
        with pytest.raises(UserError, match="another data_fingerprint"):
            claim(study, OTHER)
        other = Study(SIZES["cpu"], ("pythia",), (0,), tmp_path, tmp_path / "data", tokens=8192)
        with pytest.raises(UserError, match=r"another configs\..*max_tokens \(716800, now 8192\)"):
            claim(other, F)

    def test_a_study_from_before_questions_is_not_continued(self, tmp_path):
        study = Study(SIZES["cpu"], ("pythia",), (0,), tmp_path, tmp_path / "data")
        claim(study, F)
        path = tmp_path / "settings.json"
        settings = json.loads(path.read_text())
        for key in ("question", "contrasts", "held_out"):
            del settings[key]
        write_json(path, settings | {"sweep_tokens": 65_536})
        with pytest.raises(UserError, match=r"another sweep_tokens \(65536, now 153600\)"):
            claim(study, F)

    def test_a_study_from_before_anything_was_skipped_is_not_continued(self, tmp_path):
        study = Study(SIZES["cpu"], ("pythia",), (0,), tmp_path, tmp_path / "data")
        claim(study, F)
        path = tmp_path / "settings.json"
        settings = json.loads(path.read_text())
        assert settings.pop("skip_tokens") == 32_768, "what training validates on"
        write_json(path, settings)
        with pytest.raises(UserError, match=r"another skip_tokens \(0, now 32768\)"):
            claim(study, F)

    def test_what_rates_are_chosen_on_is_skipped_of_the_data_s_own_text(self, tmp_path):
        held_out = (tmp_path / "books",)
        for size, skipped in (("cpu", "32768"), ("gpu", "65536")):
            study = Study(SIZES[size], NINE, (0,), tmp_path, tmp_path / "data", held_out=held_out)
            found = commands(study, study.jobs()[0])
            sweep = found["sweep"]
            assert sweep[sweep.index("--skip-tokens") + 1] == skipped
            assert "--skip-tokens" not in found["sweep of books"]

    def test_the_most_that_a_model_validates_on_is_skipped(self, tmp_path, monkeypatch):
        own = Study.config

        def config(self, job):
            found = own(self, job)
            most = {"pythia": 40_000, "canon_b": None}.get(job.model, 32_768)
            section = found.validation.model_copy(update={"max_tokens": most})
            return found.model_copy(update={"validation": section})

        monkeypatch.setattr(Study, "config", config)
        # Also where the model itself is not among those that are run.
        study = Study(SIZES["cpu"], ("cat_k",), (0,), tmp_path, tmp_path, question="streams")
        assert "canon_b" not in study.asked.models and study.skip_tokens == 40_000
        study = Study(SIZES["cpu"], ("cat_rope",), (0,), tmp_path, tmp_path)
        with pytest.raises(UserError, match=r"study/canon_b\.yaml: has no validation\.max_tokens"):
            _ = study.skip_tokens

    def test_a_key_that_becomes_null_or_ceases_to_be_it_is_another_setting(self, tmp_path):
        study = Study(SIZES["cpu"], ("pythia",), (0,), tmp_path, tmp_path / "data")
        claim(study, F)
        path = tmp_path / "settings.json"
        settings = json.loads(path.read_text())
        optimizer = settings["configs"]["cat_k"]["optimizer"]
        assert optimizer["warmup_tokens"] is None and optimizer["warmup_steps"] is not None
        for key, value in (("warmup_tokens", 7), ("warmup_steps", None)):
            changed = json.loads(json.dumps(settings))
            changed["configs"]["cat_k"]["optimizer"][key] = value
            write_json(path, changed)
            with pytest.raises(UserError, match=rf"another configs\.cat_k\.optimizer\.{key}"):
                claim(study, F)
            # What an earlier version did not know is no other setting.
            del changed["configs"]["cat_k"]["optimizer"][key]
            write_json(path, changed)
            claim(study, F)

    def test_tokens_in_either_case(self):
        found = [study_of(parse_arguments(["--tokens", n])).tokens for n in ("20K", "20k", "1e6")]
        assert found == [20_000, 20_000, 1_000_000]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (
                ["--models", "pythia,cats"],
                "--models cats: is not of --question variants, which has pythia",
            ),
            (
                ["--question", "rank", "--size", "gpu"],
                "mta is to be read up to 2048 tokens; attention=multi_token: reads rows of at most "
                "512 tokens, not of 2048",
            ),
        ],
    )
    def test_bad_arguments_are_one_line(self, arguments, message):
        with pytest.raises(UserError, match=re.escape(message)):
            study_of(parse_arguments(arguments))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--seeds", "0,x"], "'x' must be a whole number; give a list such as 0,1,2"),
            (["--seeds", "1,1"], "'1,1' names a number twice"),
            (["--parallel", "0"], "'0' must be from 1 to 4,096"),
            (["--tokens", "many"], "'many' must be a whole number such as"),
            (["--tokens", "1e30"], "'1e30' must be from 1 to"),
            (["--rates", "1e-3,x,1e-2"], "'x' must be a number; give a list such as 1e-3"),
            (["--rates", "1e-3,0,1e-2"], "'0' must be greater than 0; give a list"),
            (["--rates", "1e-3,1e-2"], "'1e-3,1e-2' must be three or more different rates"),
            (["--held-out", "a/x,b/x"], "'a/x,b/x' must be folders of different names"),
            (["--documents", "1"], "'1' must be from 2 to"),
        ],
    )
    def test_bad_numbers_are_refused(self, arguments, message):
        with pytest.raises(UserError) as raised:
            parse_arguments(arguments)
        assert str(raised.value).startswith(f"{arguments[0]}: {message}")

    def test_help_imports_nothing_heavy(self):
        code = (
            "import sys, runpy; sys.argv = ['x', '--help']\n"
            "try: runpy.run_module('eval.small_study', run_name='__main__')\n"
            "except SystemExit as e: code = e.code\n"
            "heavy = {'torch', 'transformers', 'matplotlib'} & sys.modules.keys()\n"
            "sys.exit(f'{code} {heavy}' if code or heavy else 0)"
        )
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        assert "--size" in result.stdout


run_study = functools.partial(run_command, main)


class TestStudy:
    @pytest.fixture(autouse=True)
    def undrawn(self, request, monkeypatch):
        """Pictures take longer than the rest of a test; one test looks for them."""
        if request.node.name != "test_results":
            monkeypatch.setattr("eval.report.write.report", lambda *_: None)
            monkeypatch.setattr("eval.small_study.figure.study_figure", lambda _: None)
            monkeypatch.setattr("eval.common.style.save_figure", lambda *_: None)

    @pytest.fixture
    def arguments(self, long_corpus, tmp_path) -> list[object]:
        models = "pythia,cat_rope,canon_b"
        chosen = ["--models", models, "--documents", 4]
        return ["--data", long_corpus, "--out", tmp_path / "out", *chosen]

    def test_results(self, arguments, tmp_path, monkeypatch, capsys):
        code, out, err = run_study(monkeypatch, capsys, Imitation(), *arguments, "--parallel", 2)
        assert code == 0, err
        assert "9 runs of 3 models" in out and "about" in out and "[9/9]" in out
        folder = tmp_path / "out"
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["missing"] == [] and len(summary["rows"]) == 9 * 10
        assert summary["training_tokens"] == 716_800, "as configured"
        verdicts = {
            (pair["model"], pair["minus"]): pair["verdict"]
            for pair in summary["comparisons"]
            if pair["length"] == 128
        }
        assert verdicts == {
            ("cat_rope", "pythia"): "lower",
            ("canon_b", "pythia"): "unclear",
            ("canon_b", "cat_rope"): "higher",
        }
        by_document = [pair["document_error"] for pair in summary["comparisons"]]
        # Of 8 documents, ± 0.02 in turn: sqrt(8/7 * 8 * 0.02^2) / 8; 3 pairs, 2 lengths.
        assert by_document[:2] == pytest.approx([0, 0.02 / math.sqrt(7)], abs=1e-9)
        assert {pair["comparisons"] for pair in summary["comparisons"]} == {6}
        table = (folder / "small_study.md").read_text(encoding="utf-8")
        row = next(line for line in table.splitlines() if line.startswith("| CAT, RoPE | 1,000"))
        short, trained = (
            sum(math.exp(loss + 0.01 * seed) for seed in range(3)) / 3 for loss in (3.7, 3.8)
        )
        assert f"3.810 ± 0.010 | {short:.2f} ± 0.41 | {trained:.2f} ± " in row
        pair = "| CAT, RoPE | Pythia (RoPE) | -0.200 [-0.200, -0.200] | **lower** | -0.200"
        assert pair in table and "corrected for 6 comparisons" in table
        assert "| CAT, RoPE | pi+temperature |" in table
        with open(folder / "small_study.csv", encoding="utf-8") as file:
            assert len(list(csv.DictReader(file))) == 3 * 2 * 5
        for name in ("small_study.png", "small_study.svg", "report/index.html"):
            assert (folder / name).stat().st_size > 5000

    def test_differences_of_differences_and_attention(
        self, arguments, tmp_path, monkeypatch, capsys
    ):
        class Normed(Imitation):
            LOSS: ClassVar = {"pythia": 4.0, "qk_l2": 3.99, "cat_rope": 3.8, "cat_l2": 3.7}

        measured = []

        def imitated(study: Study, job: Job) -> dict[str, object]:
            measured.append(job.name)
            entropy = 0.5 + 0.1 * job.seed - 0.1 * (job.model == "cat_rope")
            layer = {"entropy": entropy, "largest_logit": 7.0}
            return layer | {"layers": [layer]}

        monkeypatch.setattr("eval.small_study.attention._measured", imitated)
        chosen = ["--question", "qk_norm", "--models", ",".join(Normed.LOSS), "--seeds", "0,1"]
        arguments = [*arguments[:4], *arguments[6:], *chosen, "--parallel", 1]
        assert run_study(monkeypatch, capsys, Normed(), *arguments)[0] == 0
        assert len(measured) == 8
        folder = tmp_path / "out"
        summary = json.loads((folder / "summary.json").read_text())
        pairs = {(p["model"], p["minus"]): p for p in summary["comparisons"] if p["length"] == 128}
        assert len(pairs) == 4 and {p["comparisons"] for p in pairs.values()} == {4}
        difference = pairs["cat_l2 − qk_l2", "cat_rope − pythia"]
        assert difference["mean"] == pytest.approx(-0.09) and difference["verdict"] == "lower"
        table = (folder / "small_study.md").read_text(encoding="utf-8")
        label = "| CAT, l2 norm after − Pythia, l2 norm of q and k | CAT, RoPE − Pythia (RoPE) |"
        assert f"{label} -0.090 [" in table
        assert "| CAT, RoPE | 0.450 ± 0.071 | 7.0 ± 0.0 |" in table
        # Of attention, too: a filter sharpens it here, within a norm it does not.
        sharper = {(p["model"], p["minus"]): p for p in summary["attention_comparisons"][:3]}
        assert {p["of"] for p in sharper.values()} == {"entropy"}
        assert {p["comparisons"] for p in sharper.values()} == {6}
        assert sharper["cat_rope", "pythia"]["mean"] == pytest.approx(-0.1)
        assert sharper["cat_rope", "pythia"]["verdict"] == "lower"
        assert sharper["cat_l2", "qk_l2"]["verdict"] == "unclear"
        assert "| CAT, RoPE | Pythia (RoPE) | -0.100 [-0.100, -0.100] | **lower** | +0" in table
        # Weights that were measured are not measured again.
        job = Job("cat_l2", 1, folder / "runs/cat_l2-seed1")
        study = Study(SIZES["cpu"], ("cat_l2",), (1,), folder, tmp_path, question="qk_norm")
        assert attention_of(study, job)["entropy"] == 0.6 and len(measured) == 8
        (job.folder / "attention.json").write_text('{"model_sha256": "x"}')
        with pytest.raises(UserError, match=r"attention\.json: .*entropy"):
            attention_of(study, job)

    def test_rates_are_chosen_on_a_seed_that_is_not_reported(
        self, arguments, tmp_path, monkeypatch, capsys
    ):
        arguments = [*arguments, "--seeds", "0,1", "--rates", "1e-3,1e-2,3e-3", "--parallel", 1]
        code, out, err = run_study(monkeypatch, capsys, first := Imitation(), *arguments)
        assert code == 0, err
        assert "6 runs of 3 models and 9 that choose rates" in out
        calls = [call for call in first.calls if "train.py" in call and "max_steps" not in call]
        assert len(calls) == 15
        tuning, reported = calls[:9], calls[9:]
        assert all(f"train.seed={TUNING_SEED}" in call for call in tuning)
        assert all("train.max_tokens=358400 " in f"{call} " for call in tuning), "half of them"
        assert not any("max_tokens" in call for call in reported), "as configured"
        assert all("lr=0.003 optimizer.min_lr=0.0003 " in f"{call} " for call in reported)
        assert not any("tuning" in call for call in first.calls if "train.py" not in call)
        summary = json.loads((tmp_path / "out/summary.json").read_text())
        assert {row["seed"] for row in summary["rows"]} == {0, 1}
        chosen = summary["models"][0]["tuned"]
        assert (chosen["edge"], list(chosen["losses"])) == ("", ["0.001", "0.003", "0.01"])
        table = (tmp_path / "out/small_study.md").read_text(encoding="utf-8")
        assert "| validation loss at rate | 0.001 | 0.003 | 0.01 |" in table
        assert "| Pythia (RoPE) | 4.477 | **4.000** | 4.523 |" in table
        assert "numbers are conditional on the rates chosen" in table
        # Begun again, nothing is left; without rates it is another study.
        assert run_study(monkeypatch, capsys, again := Imitation(), *arguments)[0] == 0
        assert again.calls == []
        code, _, err = run_study(monkeypatch, capsys, Imitation(), *arguments[:-4])
        assert code == 2 and ".optimizer.lr ([0.001, 0.003, 0.01], now 0.003)" in err
        code, _, err = run_study(monkeypatch, capsys, Imitation(), *arguments, "--seeds", "1000")
        assert code == 2 and "--seeds 1000: chooses the rates" in err

    @pytest.mark.parametrize(
        ("best", "tried", "edge"),
        [
            (1.5e-2, [0.001, 0.003, 0.01, 0.0333], ""),
            (1.0, [0.001, 0.003, 0.01, 0.0333, 0.111], ">="),
            (1e-5, [0.000111, 0.000333, 0.001, 0.003, 0.01], "<="),
        ],
    )
    def test_a_best_rate_at_the_edge_is_widened_and_marked(
        self, tmp_path, monkeypatch, best, tried, edge
    ):
        imitation = Imitation()
        monkeypatch.setattr(Imitation, "best_rate", best)
        monkeypatch.setattr(Workers, "process", lambda *args: imitation(*args))
        rates = (1e-3, 3e-3, 1e-2)
        study = Study(SIZES["cpu"], ("pythia",), (0,), tmp_path, tmp_path, rates=rates)
        workers = Workers(study, 1, 1)
        run = lambda jobs: [complete_run(workers, job) for job in unfinished(jobs)]  # noqa: E731
        found = tuned(study, run)["pythia"]
        assert (list(found.losses), found.edge) == (tried, edge)
        assert found.rate == {"": 0.01, ">=": tried[-1], "<=": tried[0]}[edge]
        assert len(imitation.calls) == len(tried), "each is trained once"

    def test_a_rate_that_diverges_is_not_chosen(self, tmp_path, monkeypatch):
        imitation = Imitation(diverges="lr0.003")
        monkeypatch.setattr(Workers, "process", lambda *args: imitation(*args))
        rates = (1e-3, 3e-3, 1e-2)
        study = Study(SIZES["cpu"], ("pythia",), (0,), tmp_path, tmp_path, rates=rates)
        workers = Workers(study, 1, 1)
        found = tuned(study, lambda jobs: [complete_run(workers, j) for j in unfinished(jobs)])
        assert found["pythia"].losses[3e-3] == math.inf and found["pythia"].rate != 3e-3

    def test_a_training_that_ends_in_no_number_is_not_credited_with_an_earlier_one(self, tmp_path):
        job = Job("pythia", TUNING_SEED, tmp_path, 1e-2)
        lines = [{"step": 1, "tokens": 8, "loss": 5.0}]
        values = {"val_perplexity": None, "val_bits_per_byte": None}
        lines += [{"step": n, "tokens": 8, "val_loss": x, **values} for n, x in ((1, 3.0), (2, 2))]
        path = tmp_path / "metrics.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert last_loss(job) == 2
        lines.append({"step": 3, "tokens": 9, "val_loss": None, **values})
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert last_loss(job) is None
        path.write_text(json.dumps(lines[0]) + "\n")
        assert last_loss(job) is None, "never validated"

    def test_a_widened_run_that_is_gone_is_made_again(
        self, arguments, tmp_path, monkeypatch, capsys
    ):
        monkeypatch.setattr(Imitation, "best_rate", 1.5e-2)
        arguments = [*arguments, "--seeds", "0", "--rates", "1e-3,3e-3,1e-2"]
        code, out, err = run_study(monkeypatch, capsys, Imitation(), *arguments)
        assert code == 0, err
        assert re.search("for all, up to .* more where best rates are at the end", out)
        gone = tmp_path / "out/tuning/pythia-lr0.0333/study.json"
        gone.unlink()
        code, out, err = run_study(monkeypatch, capsys, again := Imitation(), *arguments)
        assert code == 0, err
        assert "3 runs of 3 models and 12 that choose rates" in out and "1 to do" in out
        assert sum("/tuning/pythia-lr0.0333" in call for call in again.calls) == 1
        assert gone.is_file()

    def test_the_runs_that_choose_rates_are_known_as_far_as_those_before_them_are_done(
        self, tmp_path, monkeypatch
    ):
        monkeypatch.setattr(Imitation, "best_rate", 1.0)
        imitation = Imitation()
        monkeypatch.setattr(Workers, "process", lambda *args: imitation(*args))
        rates = (1e-3, 3e-3, 1e-2)
        study = Study(SIZES["cpu"], ("pythia", "canon_b"), (0,), tmp_path, tmp_path, rates=rates)
        assert known(dataclasses.replace(study, rates=())) == ([], [])
        jobs, more = known(study)
        assert len(jobs) == 6 and more == ["pythia"] * 2 + ["canon_b"] * 2
        for job in study.tuning_jobs()[:3]:
            complete_run(Workers(study, 1, 1), job)
        jobs, more = known(study)
        assert [job.rate for job in jobs[:4]] == [1e-3, 3e-3, 1e-2, 0.0333]
        assert len(jobs) == 7 and more == ["pythia"] + ["canon_b"] * 2
        tuned(study, lambda jobs: [complete_run(Workers(study, 1, 1), j) for j in unfinished(jobs)])
        jobs, more = known(study)
        assert (len(jobs), more) == (10, []) and not unfinished(jobs)

    def test_models_whose_rates_fail_do_not_hold_the_others_up(
        self, arguments, tmp_path, monkeypatch, capsys
    ):
        monkeypatch.setattr(Imitation, "best_rate", 1.5e-2)
        arguments = [*arguments, "--seeds", "0,1", "--rates", "1e-3,3e-3,1e-2"]
        failing = Imitation(fails="tuning/canon_b-lr0.003 ")
        code, _, err = run_study(monkeypatch, capsys, failing, *arguments)
        # Nine runs at the rates given, two at one beyond them, two models and two seeds.
        assert code == 2 and "1 of 15 runs failed, the others are kept" in err
        tries = sum("tuning/canon_b-lr0.003 " in call for call in failing.calls)
        assert tries == 2, "not again where other models' lists are widened"
        summary = json.loads((tmp_path / "out/summary.json").read_text())
        assert summary["missing"] == ["canon_b-seed0", "canon_b-seed1"]
        assert [model["seeds"] for model in summary["models"]] == [[0, 1], [0, 1], []]
        table = (tmp_path / "out/small_study.md").read_text(encoding="utf-8")
        assert "Not finished: canon_b-seed0, canon_b-seed1." in table
        assert run_study(monkeypatch, capsys, Imitation(), *arguments)[0] == 0

    def test_texts_beside_each_other(
        self, arguments, long_corpus, tmp_path, monkeypatch, capsys, tiny_corpus
    ):
        other = tmp_path / "books"
        shutil.copytree(long_corpus, other)
        seeds = ("--seeds", "0,1", "--held-out", other)
        code, _, err = run_study(monkeypatch, capsys, both := Imitation(), *arguments, *seeds)
        assert code == 0, err
        sweeps = [call for call in both.calls if "length_sweep" in call]
        assert len(sweeps) == 12 and sum(f"--data {other} " in call for call in sweeps) == 6
        for call in sweeps:
            assert "--max-document-tokens 1024 --max-tokens 4096 " in call
            assert ("--skip-tokens 32768 " in call) == (f"--data {other} " not in call)
        summary = json.loads((tmp_path / "out/summary.json").read_text())
        assert list(summary["held_out"]) == ["books"]
        assert len(summary["held_out"]["books"]["rows"]) == len(summary["rows"]) == 60
        assert {pair["comparisons"] for pair in summary["comparisons"]} == {12}
        table = (tmp_path / "out/small_study.md").read_text(encoding="utf-8")
        assert f"Text of {other} (4,096 tokens of 9 documents" in table
        few = ("--held-out", tiny_corpus)
        code, _, err = run_study(monkeypatch, capsys, Imitation(), *arguments, *few)
        assert code == 2 and "holds out 0 documents of 1024 tokens or more, 4 are scored" in err

    def test_failures_are_kept_apart_and_tried_again(self, arguments, monkeypatch, capsys):
        arguments = [*arguments, "--seeds", "0,1"]
        imitation = Imitation(fails="length_sweep.*cat_rope-seed1")
        code, _, err = run_study(monkeypatch, capsys, imitation, *arguments)
        assert code == 2
        log = arguments[3] / "runs/cat_rope-seed1/study.log"
        line = f"cat_rope-seed1: sweep ended with code 1, see {log}: ValueError: no such thing\n"
        assert line in err
        assert "1 of 6 runs failed, the others are kept" in err
        assert sum("length_sweep" in c and "cat_rope-seed1" in c for c in imitation.calls) == 2
        # What there is is told.
        table = (arguments[3] / "small_study.md").read_text(encoding="utf-8")
        assert "Not finished: cat_rope-seed1." in table and "3.800 (1 of 2)" in table
        pair = "| CAT, RoPE | Pythia (RoPE) | -0.200 (1 of 2) | one seed |"
        assert pair in table
        again = Imitation()
        code, out, err = run_study(monkeypatch, capsys, again, *arguments)
        assert code == 0, err
        assert "6 runs of 3 models" in out and "1 to do" in out
        trained = [call for call in again.calls if "max_steps" not in call and "train.py" in call]
        assert len(trained) == 1 and "cat_rope-seed1" in trained[0]
        assert run_study(monkeypatch, capsys, third := Imitation(), *arguments)[0] == 0
        assert third.calls == [], "nothing is left to do"

    def test_nothing_is_written_where_all_failed(self, arguments, tmp_path, monkeypatch, capsys):
        failing = Imitation(fails="-m cat_lm.export")
        code, _, err = run_study(monkeypatch, capsys, failing, *arguments, "--seeds", "0")
        assert code == 2 and "3 of 3 runs failed" in err.splitlines()[-1]
        assert not (tmp_path / "out/summary.json").exists()

    def test_a_failed_run_is_tried_once_more(self, arguments, monkeypatch, capsys):
        class Recovers(Imitation):
            def __call__(self, workers, given, log):
                if any("export" in call and "canon_b-seed0" in call for call in self.calls):
                    self.fails = ""
                return super().__call__(workers, given, log)

        imitation = Recovers(fails="export .*canon_b-seed0")
        code, out, err = run_study(monkeypatch, capsys, imitation, *arguments, "--seeds", "0")
        assert code == 0 and "canon_b-seed0: export ended with code 1" in err
        assert "once more: canon_b-seed0" in out
        assert "export" in imitation.calls[-2] and "canon_b-seed0" in imitation.calls[-1]

    def test_divergence_is_a_result(self, arguments, tmp_path, monkeypatch, capsys):
        code, out, err = run_study(
            monkeypatch, capsys, Imitation(diverges="cat_rope-seed0"), *arguments, "--seeds", "0,1"
        )
        assert code == 0, err
        assert "cat_rope-seed0: diverged" in out
        table = (tmp_path / "out/small_study.md").read_text(encoding="utf-8")
        assert "diverged in cat_rope-seed0" in table and "the seeds that are left are no" in table
        # The other seed is shown, and carries nothing, whichever side it is on.
        assert "| CAT, RoPE | Pythia (RoPE) | -0.200 (1 of 2) | unclear |" in table
        assert "| depthwise W=4, RoPE | CAT, RoPE | +0.201 (1 of 2) | unclear |" in table
        assert "| 3.810 (1 of 2) |" in table and "| 4.005 ± 0.007 |" in table
        summary = json.loads((tmp_path / "out/summary.json").read_text())
        others = [p for p in summary["comparisons"] if "cat_rope" not in (p["model"], p["minus"])]
        assert others and all(p["low"] is not None and p["lost"] == 0 for p in others)

    def test_a_loss_that_is_not_finite_leaves_no_word(
        self, arguments, tmp_path, monkeypatch, capsys
    ):
        assert run_study(monkeypatch, capsys, Imitation(), *arguments)[0] == 0
        path = tmp_path / "out/runs/canon_b-seed2/eval/length_sweep.json"
        values = json.loads(path.read_text())
        for row in values["rows"]:
            if row["length"] == 1024:
                row |= {"loss": None, "perplexity": None, "document_nlls": None}
        write_json(path, values)
        assert run_study(monkeypatch, capsys, Imitation(), *arguments)[0] == 0
        summary = json.loads((tmp_path / "out/summary.json").read_text())
        words = {
            (p["model"], p["minus"], p["length"]): (p["verdict"], p["n"], p["low"] is None)
            for p in summary["comparisons"]
        }
        assert words["canon_b", "cat_rope", 128] == ("higher", 3, False)
        assert words["canon_b", "cat_rope", 1024] == ("unclear", 2, True)
        assert words["cat_rope", "pythia", 1024] == ("lower", 3, False)

    def test_a_lost_seed_of_a_sum_is_lost(self):
        full, lost = {"loss": 1.0, "document_nlls": [2.0]}, {"loss": None}
        assert _sums({0: full, 1: full, 2: lost}, {0: full, 1: lost}) == {
            0: {"loss": 2.0, "document_nlls": [4.0]},
            1: lost,
            2: lost,
        }
        assert _sums({0: full}, {}) == {}, "not finished yet"

    def test_runs_of_two_precisions_are_not_compared(
        self, arguments, tmp_path, monkeypatch, capsys
    ):
        assert run_study(monkeypatch, capsys, Imitation(), *arguments, "--seeds", "0")[0] == 0
        monkeypatch.setattr(Imitation, "precision", "bf16")
        again = Imitation()
        code, _, err = run_study(monkeypatch, capsys, again, *arguments, "--seeds", "0,1")
        assert (code, err.count("\n")) == (2, 1)
        assert "pythia-seed0 is trained in fp32, a trial of pythia in bf16, which are not" in err
        assert all("max_steps" in call for call in again.calls), "before anything is trained"
        # Where it came about all the same, two runs are named; also by files of before.
        for keep in (True, False):
            cell = tmp_path / "out/runs/cat_rope-seed0/study.json"
            values = {"diverged": False, "seconds": 1.0}
            cell.write_text(json.dumps(values | ({"precision": "bf16"} if keep else {})))
            config = cell.with_name("config.yaml")
            config.write_text(config.read_text().replace("precision: fp32", "precision: bf16"))
            code, _, err = run_study(monkeypatch, capsys, Imitation(), *arguments, "--seeds", "0")
            assert (code, err.count("\n")) == (2, 1)
            assert "pythia-seed0 is trained in fp32, cat_rope-seed0 in bf16" in err

    def test_runs_of_two_commits_are_told(self, arguments, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr("eval.small_study.execute.commit", lambda: "a" * 40)
        assert run_study(monkeypatch, capsys, Imitation(), *arguments, "--seeds", "0")[0] == 0
        table = tmp_path / "out/small_study.md"
        assert "commit" not in table.read_text()
        monkeypatch.setattr("eval.small_study.execute.commit", lambda: "b" * 40)
        assert run_study(monkeypatch, capsys, Imitation(), *arguments, "--seeds", "0,1")[0] == 0
        said = f"by code of different commits: {'a' * 12}, {'b' * 12}."
        assert said in table.read_text()
        summary = json.loads((tmp_path / "out/summary.json").read_text())
        assert summary["trained_with"]["commit"] == ["a" * 40, "b" * 40]
        assert summary["trained_with"]["precision"] == ["fp32"]
        # A record of before says nothing of it, and is read.
        cell = tmp_path / "out/runs/pythia-seed0/study.json"
        cell.write_text('{"diverged": false, "seconds": 2.0}')
        assert run_study(monkeypatch, capsys, Imitation(), *arguments, "--seeds", "0")[0] == 0
        assert f"different commits: unknown, {'a' * 12}." in table.read_text()

    @pytest.fixture
    def earlier(self, long_corpus, tmp_path, monkeypatch, capsys) -> Path:
        """Return a finished study of two models with rates chosen, each run with its checkpoint."""
        monkeypatch.setattr("eval.small_study.reuse._precision", lambda _: "fp32")
        monkeypatch.setattr("cat_lm.training.checkpoint.complete_checkpoints", step_folders)
        monkeypatch.setattr("eval.small_study.execute.commit", lambda: "a" * 40)
        out = tmp_path / "earlier"
        call = ["--data", long_corpus, "--out", out, "--models", "pythia,cat_rope"]
        call += ["--documents", 4, "--seeds", "0,1,2,3,4,5,6", "--rates", "1e-3,3e-3,1e-2"]
        assert run_study(monkeypatch, capsys, Imitation(), *call)[0] == 0
        for folder in (*out.glob("runs/*"), *out.glob("tuning/*")):
            steps = load_config(folder / "config.yaml").total_steps
            (folder / f"checkpoints/step-{steps:08d}").mkdir(parents=True)
            with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
                last = {"val_loss": last_loss_of(folder), "val_perplexity": 2.0}
                last |= {"step": steps, "tokens": 1, "val_bits_per_byte": 1.0}
                file.write(json.dumps(last) + "\n")
        monkeypatch.setattr("eval.small_study.execute.commit", lambda: "b" * 40)
        return out

    @pytest.fixture
    def reusing(self, arguments, earlier) -> list[object]:
        """Return the call of another question, with one model more."""
        call = [*arguments[:4], "--question", "canon", "--models", "pythia,cat_rope,kv_shift"]
        return [*call, "--documents", 4, "--rates", "1e-3,3e-3,1e-2", "--reuse", earlier]

    def test_trainings_of_another_question_are_taken_over(
        self, reusing, earlier, tmp_path, monkeypatch, capsys
    ):
        (tmp_path / "out/runs/cat_rope-seed0").mkdir(parents=True)  # begun here: goes on here
        make_marked(cut := tmp_path / "out/runs/pythia-seed0.copy", COPIES)
        (cut / "pythia-seed0").mkdir()
        (cut / "pythia-seed0/config.yaml").write_text("cut short")
        code, out, err = run_study(monkeypatch, capsys, imitation := Shifted(), *reusing)
        assert code == 0, err
        # Three seeds and three rates of two models, but for the run that was begun.
        assert "\n11 trainings of other studies are taken over" in out
        folder = tmp_path / "out"
        runs = (*folder.glob("runs/*"), *folder.glob("tuning/*"))
        found = {run.name: (run / ORIGIN).is_file() for run in runs}
        assert found == {
            **{f"{m}-lr{r}": True for m in ("pythia", "cat_rope") for r in (1e-3, 3e-3, 0.01)},
            **{f"kv_shift-lr{rate}": False for rate in (1e-3, 3e-3, 0.01)},
            **{f"pythia-seed{seed}": True for seed in range(3)},
            **{f"cat_rope-seed{seed}": seed > 0 for seed in range(3)},
            **{f"kv_shift-seed{seed}": False for seed in range(3)},
        }
        for run in runs:
            own = last_loss(Job("", 0, run)) == last_loss_of(run)
            assert own == found[run.name], "of the training there, or made here"
        assert sum("eval.length_sweep" in one for one in imitation.calls) == 9, "measured here"
        cell = json.loads((folder / "runs/pythia-seed0/study.json").read_text())
        assert (cell["reused"], cell["commit"]) == (str(earlier), "a" * 40)
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["trained_with"]["reused"] == [str(earlier), None]
        said = f"Trainings that are the same there were taken over from {earlier}."
        assert said in (folder / "small_study.md").read_text()
        assert run_study(monkeypatch, capsys, again := Shifted(), *reusing)[0] == 0
        assert again.calls == []
        # From there, a third study names where they were trained.
        third = [*reusing[:2], "--out", tmp_path / "third", *reusing[4:-1], folder]
        assert run_study(monkeypatch, capsys, Shifted(), *third)[0] == 0
        cell = json.loads((tmp_path / "third/runs/pythia-seed0/study.json").read_text())
        assert (cell["reused"], cell["commit"]) == (str(earlier), "a" * 40)

    def test_where_a_training_is_from_outlives_a_failed_sweep(
        self, reusing, earlier, tmp_path, monkeypatch, capsys
    ):
        failing = Shifted(fails="eval.length_sweep .*pythia-seed0")
        assert run_study(monkeypatch, capsys, failing, *reusing)[0] == 2
        code, _, err = run_study(monkeypatch, capsys, Shifted(), *reusing)
        assert code == 0, err
        cell = json.loads((tmp_path / "out/runs/pythia-seed0/study.json").read_text())
        assert (cell["reused"], cell["commit"]) == (str(earlier), "a" * 40)

    def test_a_copy_that_fails_is_one_line(self, reusing, tmp_path, monkeypatch, capsys):
        def full(*_: object, **__: object) -> None:
            raise shutil.Error([("a", "b", "No space left on device")])

        monkeypatch.setattr("shutil.copytree", full)
        code, _, err = run_study(monkeypatch, capsys, Shifted(), *reusing)
        assert code == 2 and "Traceback" not in err
        assert "error: pythia-lr0.001: copying it from another study: not all of it" in err
        assert not (tmp_path / "out/tuning/pythia-lr0.001").exists()

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (["--tokens", "1M"], "has no finished training that is asked for here"),
            (["--rates", "1e-4,2e-4,4e-4"], "has no finished training that is asked for here"),
            (["--models", "canon_b"], "has no finished training that is asked for here"),
            (["--out", "earlier"], "is the study's own folder"),
            (["--reuse", "nowhere"], "nowhere: is no folder of a study, having no settings.json"),
        ],
    )
    def test_a_study_that_has_nothing_of_it_is_refused(
        self, arguments, earlier, tmp_path, monkeypatch, capsys, change, said
    ):
        option, value = change
        value = tmp_path / value if option in ("--out", "--reuse") else value
        call = [*arguments, "--seeds", "7", "--rates", "1e-3,3e-3,1e-2", "--reuse", earlier]
        if option == "--out":
            call += ["--models", "pythia,cat_rope"]
        code, _, err = run_study(monkeypatch, capsys, Imitation(), *call, option, value)
        assert code == 2 and said in err and err.count("\n") == 1
        assert not (tmp_path / "out/settings.json").exists()

    def test_a_training_that_is_not_the_same_is_made_again(
        self, arguments, earlier, tmp_path, monkeypatch, capsys
    ):
        def change(run: str, old: str, new: str) -> None:
            path = earlier / "runs" / run / "config.yaml"
            text = path.read_text()
            assert old in text
            path.write_text(text.replace(old, new))

        change("pythia-seed0", "lr: 0.003", "lr: 0.004")
        change("pythia-seed1", "seed: 1", "seed: 3")
        change("pythia-seed2", "precision: fp32", "precision: bf16")
        change("pythia-seed3", "min_lr: 0.0003", "min_lr: 0.0")
        shutil.rmtree(earlier / "runs/pythia-seed4/checkpoints")
        (earlier / "runs/pythia-seed5/study.json").write_text('{"diverged": true, "seconds": 2.0}')
        call = [*arguments, "--seeds", "0,1,2,3,4,5,6", "--rates", "1e-3,3e-3,1e-2"]
        call += ["--reuse", earlier]
        assert run_study(monkeypatch, capsys, Imitation(), *call)[0] == 0
        runs = tmp_path / "out/runs"
        assert [(runs / f"cat_rope-seed{n}" / ORIGIN).is_file() for n in range(7)] == [True] * 7
        assert [(runs / f"pythia-seed{n}" / ORIGIN).is_file() for n in range(6)] == [False] * 6
        assert (runs / "pythia-seed6" / ORIGIN).is_file()

    def test_the_last_run_has_no_more_threads_than_the_first(
        self, arguments, tmp_path, monkeypatch, capsys
    ):
        monkeypatch.setattr("os.sched_getaffinity", lambda _: {*range(4)})
        arguments = [*arguments, "--seeds", "0"]
        assert run_study(monkeypatch, capsys, Imitation(), *arguments)[0] == 0
        (tmp_path / "out/runs/pythia-seed0/study.json").unlink()
        code, out, _ = run_study(monkeypatch, capsys, Imitation(), *arguments)
        assert code == 0 and "1 to do" in out and "4 at a time, 1 threads each" in out
        trained = json.loads((tmp_path / "out/summary.json").read_text())["trained_with"]
        assert (trained["threads"], trained["parallel"]) == ([1], [4])
        # Two at a time is another speed, which the page says.
        (tmp_path / "out/runs/pythia-seed0/study.json").unlink()
        assert run_study(monkeypatch, capsys, Imitation(), *arguments, "--parallel", 2)[0] == 0
        table = (tmp_path / "out/small_study.md").read_text()
        assert "Runs had different numbers of threads (2, 1)" in table

    def test_reading_far_costs_attention_more(self, tmp_path):
        def cost(model: str, question: str = "variants") -> float:
            study = Study(SIZES["cpu"], (model,), (0,), tmp_path, tmp_path, question=question)
            return reading_cost(study, study.config(study.jobs()[0]))

        assert cost("pythia", "length") > cost("pythia") > 1.1
        # A recurrence reads every token at the same cost.
        assert cost("gated_deltanet") == pytest.approx(1.0)
        for model in MODELS:
            assert 1 - 1e-9 <= cost(model) < 8

    def test_an_estimate_divides_by_the_runs_that_there_are(self, tmp_path):
        jobs = Study(SIZES["cpu"], ("pythia",), (0, 1, 2), tmp_path, tmp_path).jobs()
        estimate = Estimate({"pythia": 60.0}, {"pythia": 20.0}, {"pythia": 10.0})
        assert "about 60 s for all" in estimate.text(jobs[:1], 4)
        assert "about 90 s for all" in estimate.text(jobs, 2)
        assert "about 90 s for all, up to 20 s more" in estimate.text(jobs, 2, ["pythia"] * 2)

    def test_an_estimate_leaves_out_trainings_that_are_taken_over(self, tmp_path):
        study = Study(SIZES["cpu"], ("pythia",), (0, 1, 2), tmp_path, tmp_path, rates=(1e-3, 3e-3))
        jobs, (one, other) = study.jobs(), study.tuning_jobs()
        estimate = Estimate(
            {"pythia": 60.0}, {"pythia": 20.0}, {"pythia": 10.0}, frozenset({jobs[0], one})
        )
        assert [*map(estimate.of, (*jobs, one, other))] == [10, 60, 60, 0, 20]
        # What was foreseen to be trained at another rate than was chosen is trained here.
        assert estimate.seconds_of(jobs[0], False) == 60

    def test_estimate_starts_nothing(self, arguments, tmp_path, monkeypatch, capsys):
        imitation = Imitation()
        code, out, _ = run_study(monkeypatch, capsys, imitation, *arguments, "--estimate")
        assert code == 0 and re.search(r"about \d+ (s|min|h)", out)
        assert all("train.max_steps=" in call for call in imitation.calls)
        assert not (tmp_path / "out/runs").exists()

    def test_estimate_of_a_finished_study_changes_nothing(
        self, arguments, tmp_path, monkeypatch, capsys
    ):
        arguments = [*arguments, "--seeds", "0"]
        assert run_study(monkeypatch, capsys, Imitation(), *arguments)[0] == 0
        files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
        before = {path: path.stat().st_mtime_ns for path in files if path.name != ".lock"}
        code, out, _ = run_study(
            monkeypatch, capsys, third := Imitation(), *arguments, "--estimate"
        )
        assert code == 0 and "0 to do" in out and third.calls == []
        assert {path: path.stat().st_mtime_ns for path in before} == before
        more = ("--tokens", "8K", "--estimate")
        code, _, err = run_study(monkeypatch, capsys, Imitation(), *arguments, *more)
        assert code == 2 and "holds a study with another configs." in err

    def test_the_log_of_a_failed_trial_stays_and_is_named(
        self, arguments, tmp_path, monkeypatch, capsys
    ):
        failing = Imitation(fails="max_steps.*canon_b|canon_b.*max_steps")
        code, _, err = run_study(monkeypatch, capsys, failing, *arguments)
        log = tmp_path / "out/trial/canon_b.log"
        assert code == 2 and f"see {log}: ValueError: no such thing" in err.splitlines()[-1]
        assert log.is_file()
        assert run_study(monkeypatch, capsys, failing, *arguments)[0] == 2
        assert log.is_file(), "that of the next call, which failed too"
        assert run_study(monkeypatch, capsys, Imitation(), *arguments)[0] == 0
        assert not log.parent.exists()

    def test_a_folder_of_trials_that_is_not_ours_is_kept(
        self, arguments, tmp_path, monkeypatch, capsys
    ):
        thesis = tmp_path / "out/trial/thesis.tex"
        thesis.parent.mkdir(parents=True)
        thesis.write_text("years of work")
        code, _, err = run_study(monkeypatch, capsys, Imitation(), *arguments)
        assert code == 2 and f"{thesis.parent}: stands where temporary files go" in err
        assert thesis.read_text() == "years of work"

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("settings.json", "[]", "settings.json: holds [], must be an object; remove"),
            ("settings.json", '{"configs": []}', "holds a study with another configs"),
            ("settings.json", '{"configs": {"pythia": 3}}', "holds a study with another configs"),
            ("runs/pythia-seed0/study.json", "{", "study.json: damaged: is not JSON"),
            (
                "runs/pythia-seed0/study.json",
                "{}",
                "damaged: has no diverged; delete it",
            ),
            ("runs/pythia-seed0/study.json", '{"diverged": 1}', "diverged is 1: should be"),
            ("runs/pythia-seed0/metrics.jsonl", b"\xff\n", "metrics.jsonl: is not UTF-8"),
            ("runs/pythia-seed0/eval/length_sweep.json", '{"rows": [3]}', "row 1: holds 3: should"),
        ],
    )
    def test_damaged_records_are_one_line(
        self, arguments, tmp_path, monkeypatch, capsys, name, content, message
    ):
        arguments = [*arguments, "--seeds", "0"]
        assert run_study(monkeypatch, capsys, Imitation(), *arguments)[0] == 0
        content = content if isinstance(content, bytes) else content.encode()
        (tmp_path / "out" / name).write_bytes(content)
        code, _, err = run_study(monkeypatch, capsys, Imitation(), *arguments)
        assert (code, err.count("\n")) == (2, 1) and message in err

    def test_a_sweep_of_other_weights_is_no_result(self, arguments, tmp_path, monkeypatch, capsys):
        arguments = [*arguments, "--seeds", "0"]
        assert run_study(monkeypatch, capsys, Imitation(), *arguments)[0] == 0
        write_json(
            tmp_path / "out/runs/pythia-seed0/model/config.json",
            {"model_type": "gpt_neox", "another": "export"},
        )
        code, _, err = run_study(monkeypatch, capsys, Imitation(), *arguments)
        assert code == 2 and "length_sweep.json: is of other weights than the export's" in err

    def test_runs_scored_on_other_tokens_are_not_compared(
        self, arguments, tmp_path, monkeypatch, capsys
    ):
        run_study(monkeypatch, capsys, Imitation(), *arguments, "--seeds", "0")
        path = tmp_path / "out/runs/pythia-seed0/eval/length_sweep.json"
        path.write_text(path.read_text().replace("a" * 64, "b" * 64))
        code, _, err = run_study(monkeypatch, capsys, Imitation(), *arguments, "--seeds", "0")
        assert code == 2 and "scored on different tokens" in err

    def test_too_few_held_out_documents(self, arguments, monkeypatch, capsys):
        code, _, err = run_study(monkeypatch, capsys, Imitation(), *arguments, "--documents", 99)
        assert code == 2 and err.count("\n") == 1
        assert "documents of 1024 tokens or more behind the first 32,768 tokens, which" in err
        assert "99 are scored" in err

    def test_documents_are_counted_as_the_sweep_scores_them(
        self, arguments, long_corpus, tmp_path, monkeypatch, capsys
    ):
        tokenizer = load_tokenizer(long_corpus / "tokenizer")
        given = (long_corpus, tokenizer, None, Documents(1024, 1024))
        there = split_stream(*given, skip_tokens=32_768).num_documents
        assert 4 < there < split_stream(*given).num_documents - 20
        few = ("--documents", there + 1, "--estimate")
        code, _, err = run_study(monkeypatch, capsys, Imitation(), *arguments, *few)
        assert code == 2 and f"holds out {there} documents of 1024 tokens or more" in err
        enough = ("--documents", there, "--estimate")
        assert run_study(monkeypatch, capsys, Imitation(), *arguments, *enough)[0] == 0

    def test_attention_is_measured_behind_what_is_skipped(self, long_corpus, tmp_path, monkeypatch):
        import cat_lm.pretrained
        from eval.small_study import attention

        found = []
        monkeypatch.setattr(cat_lm.pretrained, "load_model", lambda folder: None)
        monkeypatch.setattr(
            attention, "attention_statistics", lambda model, rows: found.append(rows) or {}
        )
        study = Study(SIZES["cpu"], ("qk_l2",), (0,), tmp_path, long_corpus, question="qk_norm")
        attention._measured(study, study.jobs()[0])
        corpus = open_verified(long_corpus, "validation")
        assert found[0].shape == (64, 128)
        wanted = corpus.tokens(32_768, 32_768 + 64 * 128)
        assert found[0].flatten().tolist() == wanted.tolist()

    def test_the_library_is_prepared_without_codec_tables(
        self, long_corpus, tmp_path, monkeypatch, capsys
    ):
        called = []

        def imitated(call, **options):
            called.append(call)
            if len(called) == 1:
                shutil.copytree(long_corpus, tmp_path / "library")
            return subprocess.CompletedProcess(call, 0)

        monkeypatch.setattr("eval.small_study.run.subprocess.run", imitated)
        study = Study(SIZES["cpu"], ("pythia",), (0,), tmp_path, tmp_path / "library", documents=4)
        prepared(study, own=False)
        (call,) = called
        assert call[call.index("--source") + 1] == "python-stdlib"
        assert call[call.index("--exclude") + 1] == "encodings/*"
        # What is there from before, with the tables, is not taken for it.
        with pytest.raises(UserError, match=r"library: was not prepared with --exclude 'enc") as no:
            prepared(study, own=False)
        assert "\n" not in str(no.value) and len(called) == 1
        prepared(study, own=True)
        assert len(called) == 1
        path = tmp_path / "library/manifest.json"
        manifest = json.loads(path.read_text())
        manifest["arguments"]["exclude"] = ["encodings/*"]
        path.write_text(json.dumps(manifest))
        prepared(study, own=False)
        assert len(called) == 2, "the preparation itself says that there is nothing to do"

    def test_a_missing_folder_is_named_before_any_text_is_prepared(
        self, tmp_path, monkeypatch, capsys
    ):
        monkeypatch.setattr("eval.small_study.run.subprocess.run", None)
        for option in ("--held-out", "--data"):
            arguments = ["--out", tmp_path / "out", option, tmp_path / "nowhere"]
            code, _, err = run_study(monkeypatch, capsys, Imitation(), *arguments)
            assert code == 2 and err.count("\n") == 1 and "nowhere: no such folder" in err

    def test_another_tokenizer_is_refused_before_training(
        self, arguments, long_corpus, tmp_path, monkeypatch, capsys
    ):
        other = tmp_path / "other"
        shutil.copytree(long_corpus, other)
        manifest = json.loads((other / "manifest.json").read_text())
        manifest["tokenizer"]["sha256"] = "0" * 64
        (other / "manifest.json").write_text(json.dumps(manifest))
        code, _, err = run_study(monkeypatch, capsys, Imitation(), *arguments, "--held-out", other)
        assert code == 2 and err.count("\n") == 1
        assert f"--held-out {other}: was prepared with another tokenizer" in err


class TestWorkers:
    def test_stopped_processes_are_told_and_waited_for(self, tmp_path):
        study = Study(SIZES["cpu"], ("pythia",), (0, 1, 2), tmp_path, tmp_path)
        workers = Workers(study, parallel=2, threads=1)
        saved = tmp_path / "saved"
        saves = (
            "import pathlib, signal, sys, time\n"
            "def stop(*_):\n"
            f"    open({str(saved)!r}, 'a').write('x'); sys.exit(75)\n"
            "signal.signal(signal.SIGTERM, stop)\n"
            "pathlib.Path(sys.argv[1]).touch(); time.sleep(60)\n"
        )

        def task(workers: Workers, job: Job) -> int:
            return workers.process(["-c", saves, str(tmp_path / job.name)], tmp_path / "log")

        def interrupt() -> None:
            while not all((tmp_path / job.name).exists() for job in study.jobs()[:2]):
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=interrupt).start()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            workers.run(study.jobs(), task, lambda *_: None)
        assert time.monotonic() - begin < 30
        assert saved.read_text() == "xx", "both were told once; the third was not begun"

    def test_trainings_that_outlive_a_killed_call_keep_others_out(self, tmp_path):
        study = Study(SIZES["cpu"], ("pythia",), (0,), tmp_path / "out", tmp_path)
        # A call that dies by kill -9 while its process, a session of its own, goes on.
        call = (
            "import os, sys, threading, time; from pathlib import Path\n"
            "from eval.common.interrupts import held\n"
            "from eval.small_study.execute import Workers\n"
            "from eval.small_study.plan import SIZES, Study\n"
            f"study = Study(SIZES['cpu'], ('pythia',), (0,), Path({str(study.out)!r}), Path())\n"
            "code = 'import os, pathlib, sys, time; '\n"
            "code += 'pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(60)'\n"
            f"pid = {str(tmp_path / 'pid')!r}\n"
            "with held(study.out) as lock:\n"
            "    workers = Workers(study, 1, 1, lock)\n"
            "    begin = lambda: workers.process(['-c', code, pid], study.out / 'log')\n"
            "    threading.Thread(target=begin, daemon=True).start()\n"
            "    while not (os.path.exists(pid) and open(pid).read()): time.sleep(0.02)\n"
            "    os.kill(os.getpid(), 9)\n"
        )
        assert subprocess.run([sys.executable, "-c", call], cwd=ROOT).returncode == -9
        orphan = int((tmp_path / "pid").read_text())
        try:
            with pytest.raises(UserError, match="left behind"), held(study.out):
                pass
        finally:
            os.kill(orphan, signal.SIGKILL)
        for _ in range(500):
            try:
                with held(study.out):
                    return
            except UserError:
                time.sleep(0.02)
        pytest.fail("the lock outlives the processes")

    def test_one_thread_each_and_the_log_has_command_and_output(self, tmp_path):
        study = Study(SIZES["cpu"], ("pythia",), (0,), tmp_path, tmp_path)
        log = tmp_path / "deep/log"
        code = "import os; print(os.environ['OMP_NUM_THREADS'], os.getcwd())"
        assert Workers(study, 1, 3).process(["-c", code], log) == 0
        text = log.read_text()
        assert text.startswith("$ python -c ") and f"3 {ROOT}" in text

    def test_result_is_written_last(self, tmp_path, monkeypatch):
        study = Study(SIZES["cpu"], ("pythia",), (0,), tmp_path / "out", tmp_path)
        job = study.jobs()[0]
        seen = []
        imitation = Imitation()

        def process(workers: Workers, arguments: list[str], log: Path) -> int:
            seen.append(result_path(job).exists())
            return imitation(workers, arguments, log)

        monkeypatch.setattr(Workers, "process", process)
        assert unfinished([job]) == [job]
        complete_run(Workers(study, 1, 1), job)
        assert seen == [False] * 3 and unfinished([job]) == []


@pytest.mark.parametrize("record, method", [("filters", "yarn"), ("small_study", "pi+temperature")])
def test_the_panel_beside_positions_as_trained_is_of_what_was_swept(record, method):
    """Of models without positions as they are, where those with are read by YaRN."""
    summary = json.loads((ROOT / f"eval/records/{record}_cpu.json").read_text())
    scaled = study_figure(summary).axes[2]
    for line, model in zip(scaled.get_lines(), summary["models"], strict=False):
        rope = model["position_embedding"] == "rope"
        read = method if rope else "temperature" if method != "yarn" else "none"
        expected = statistics.fmean(
            row["perplexity"]
            for row in summary["rows"]
            if (row["model"], row["length"], row["method"]) == (model["model"], 1024, read)
        )
        assert line.get_label() == model["label"] and line.get_ydata()[-1] == expected
