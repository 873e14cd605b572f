"""The plan: models, questions, options, and the settings of a folder."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cat_lm.core.errors import UserError
from cat_lm.core.files import write_json
from cat_lm.training.estimate import num_parameters
from eval.small_study.arguments import parse_arguments, study_of
from eval.small_study.collect import _comparisons
from eval.small_study.execute import (
    commands,
)
from eval.small_study.plan import CONFIGS, ROOT, SIZES, Study, claim
from eval.small_study.questions import MODELS, QUESTIONS
from eval.small_study.tables import comparison_columns, comparison_lines
from tests.unit.imitated_study import LENGTHS

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
DECAYED = ("las_l", "las", "las_l_filter")
NINE = QUESTIONS["variants"].models
F, OTHER = {"": "f" * 64}, {"": "e" * 64}  # fingerprints of data


@pytest.mark.parametrize("size", SIZES)
def test_models_differ_only_in_what_they_are(size):
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
        assert abs(num_parameters(config, SIZES[size].vocabulary) / pythia - 1) < 0.02
        assert config.model.conv_type == conv_type
        assert config.model.position_embedding == positions
        mixing = "maps" if model.startswith("mh_maps") else "embeddings"
        assert config.model.conv_mixing == mixing
        if conv_type != "none":
            assert (config.model.conv_streams, config.model.conv_window) == (streams, window)
        assert config.model.hidden_size == base["model"]["hidden_size"]
        found.append(own["train"]["output_dir"])
    assert len(set(found)) == len(DEFINITION)


def test_questions_compare_models_that_differ_as_they_say():
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


def test_losses_are_compared_as_positions_were_trained_and_as_they_are_best_read(tmp_path):
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
    assert streams.columns() == [(128, "none"), (512, "none")]
    pair = Study(SIZES["cpu"], ("cat_v_nope", "nope"), (0,), tmp_path, tmp_path, question="streams")
    assert pair.comparisons() == 2, "models without positions are read as they are"
    maps = Study(SIZES["cpu"], models, (0,), tmp_path, tmp_path, question="maps")
    assert maps.columns() == [(128, "none")]
    assert {maps.methods_of(job) for job in maps.jobs()} == {"none"}, "nothing scaled is asked"
    assert maps.cells() == 3
    shown = Study(SIZES["cpu"], models, (0,), tmp_path, tmp_path, question="canon")
    assert {shown.methods_of(job) for job in shown.jobs()} == {"paper"}


def test_what_a_model_loses_is_against_itself_at_the_trained_length(tmp_path):
    models = ("pythia", "nope")
    study = Study(SIZES["cpu"], models, (0, 1), tmp_path, tmp_path, question="length")
    losses = {
        "pythia": {(128, "none"): 4.0, (4096, "none"): 5.0, (4096, "yarn"): 4.25},
        "nope": {(128, "none"): 4.5, (4096, "none"): 4.625},
    }
    swept = {
        job: [
            {"length": length, "method": method, "loss": loss * (1 + (job.seed - 0.5) / 2**10)}
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


def test_the_readme_has_the_questions():
    text = (ROOT / "eval/small_study/README.md").read_text(encoding="utf-8")
    table = text.split("<!-- questions -->\n")[1].split("<!-- /questions -->")[0]
    lines = [
        f"| `{name}` | {asked.text} | {len(asked.models)} | "
        f"{len(asked.contrasts) + len(asked.interactions)} |"
        for name, asked in QUESTIONS.items()
    ]
    assert table.splitlines()[2:] == lines


def test_jobs_are_seed_by_seed_and_their_commands_are_a_person_s(tmp_path):
    study = Study(SIZES["cpu"], NINE, (0, 1, 2), tmp_path / "out", tmp_path / "data")
    jobs = study.jobs()
    assert len({job.folder for job in jobs}) == 27
    assert [job.seed for job in jobs[:10]] == [0] * 9 + [1]
    found = commands(study, jobs[9])
    assert found["train"][:2] == ["train.py", "configs/study/pythia.yaml"]
    assert "base=configs/study/base_cpu.yaml" in found["train"]
    assert "train.seed=1" in found["train"] and "train.resume=auto" in found["train"]
    assert found["sweep"][found["sweep"].index("--lengths") + 1] == ",".join(map(str, LENGTHS))


def test_same_data_order_for_all_models_of_a_seed(tmp_path):
    study = Study(SIZES["cpu"], NINE, (0, 1), tmp_path / "out", tmp_path / "data")
    order = {}
    for job in study.jobs():
        config = study.config(job)
        decides = (config.data, config.train.global_batch_size, config.train.seed)
        order.setdefault(job.seed, set()).add(str(decides))
    assert [len(values) for values in order.values()] == [1, 1]
    assert order[0] != order[1]


def test_other_settings_in_the_folder_are_refused(tmp_path):
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


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("format", r"settings\.json: has no format, must be 1: another version .*; remove"),
        ("skip_tokens", r"another skip_tokens \(None, now 32768\)"),
    ],
)
def test_settings_without_a_key_are_another_study(tmp_path, key, said):
    study = Study(SIZES["cpu"], ("pythia",), (0,), tmp_path, tmp_path / "data")
    claim(study, F)
    path = tmp_path / "settings.json"
    settings = json.loads(path.read_text())
    del settings[key]
    write_json(path, settings)
    with pytest.raises(UserError, match=said):
        claim(study, F)


def test_what_rates_are_chosen_on_is_skipped_of_the_data_s_own_text(tmp_path):
    held_out = (tmp_path / "books",)
    for size, skipped in (("cpu", "32768"), ("gpu", "65536")):
        study = Study(SIZES[size], NINE, (0,), tmp_path, tmp_path / "data", held_out=held_out)
        found = commands(study, study.jobs()[0])
        sweep = found["sweep"]
        assert sweep[sweep.index("--skip-tokens") + 1] == skipped
        assert "--skip-tokens" not in found["sweep of books"]


def test_the_most_that_a_model_validates_on_is_skipped(tmp_path, monkeypatch):
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


def test_a_key_that_becomes_null_or_ceases_to_be_it_is_another_setting(tmp_path):
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


def test_tokens_in_either_case():
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
def test_bad_arguments_are_one_line(arguments, message):
    with pytest.raises(UserError, match=re.escape(message)):
        study_of(parse_arguments(arguments))


def test_a_study_is_the_same_from_any_working_folder(tmp_path, monkeypatch):
    """But for the folders that are named from there."""
    arguments = ["--rates", "1e-3,3e-3,1e-2", "--tokens", "20K"]
    from_root = study_of(parse_arguments(arguments))
    monkeypatch.chdir(tmp_path)
    study = study_of(parse_arguments([*arguments, "--out", "out"]))
    job = dataclasses.replace(study.jobs()[0], rate=0.003)
    assert study.config(job).optimizer == from_root.config(job).optimizer
    (base, *_), (named, *_) = study.overrides(job), from_root.overrides(job)
    assert base == named == "base=configs/study/base_cpu.yaml"
    assert study.out == tmp_path / "out"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "0,x"], "'x' must be a whole number"),
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
def test_bad_numbers_are_refused(arguments, message):
    with pytest.raises(UserError) as raised:
        parse_arguments(arguments)
    assert str(raised.value).startswith(f"{arguments[0]}: {message}")


def test_help_imports_nothing_heavy():
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
