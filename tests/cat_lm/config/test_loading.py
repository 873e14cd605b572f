"""RunConfig: typed YAML, bases, overrides, all errors at once."""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel

from cat_lm.config import RunConfig, changed_values, known_keys, load_config, loading
from cat_lm.core import readers
from cat_lm.core.errors import UserError
from cat_lm.training.estimate import num_parameters
from tests.conftest import REPOSITORY
from tests.runs import run_values, write_config

QUICKSTART = REPOSITORY / "configs/quickstart.yaml"
PRETRAIN = sorted((REPOSITORY / "configs/pretrain").glob("*.yaml"))
ROWS = [path for path in PRETRAIN if "base: base_370m.yaml" in path.read_text(encoding="utf-8")]
YARN = "rope_type: yarn, factor: 2, original_max_position_embeddings: 32"


def error_of(path, *overrides) -> str:
    with pytest.raises(UserError) as raised:
        load_config(path, overrides)
    return str(raised.value)


# Overrides, and words of the one line that refuses them.
WRONG = [
    ("seed=1", "section.key=value"),
    ("train.seed", "section.key=value"),
    ("train.a.b=1", "section.key=value"),
    ("optimizer=3", "section.key=value"),
    ("train.seed=[1", "not valid YAML"),
    ("optimizer.lrate=1", "unknown key; the nearest known one is optimizer.lr"),
    ("model.context_length=5", "unknown key; the nearest known one is data.context_length"),
    ("trian.seed=1", "trian: unknown key; the nearest known one is train"),
    ("train.seed=true", "whole number"),
    ("train.seed=1.5", "train.seed"),
    ("train.seed=1e30", "train.seed='1e30': must be from 0"),
    ("train.max_tokens=1M", "exclude each other"),
    ("train.max_steps=null", "one of max_tokens and max_steps"),
    ("train.max_steps=1e400", "must be from 1 to 1,000,000,000"),
    ("train.micro_batch_size=5", "must divide"),
    ("train.zero_stage=4", "train.zero_stage"),
    ("train.compile=true; train.zero_stage=3", "does not go with"),
    ("train.conv_backend=cuda", "train.conv_backend='cuda'"),
    ("train.output_dir=", "is no path"),
    ("train.output_dir=s3://bucket/run", "is an address"),
    ("model.rotary_pct=0.3", "even number"),
    ("model.num_attention_heads=3", "multiple of"),
    ("model.num_hidden_layers=1e30", "must be from 1 to 1,024"),
    ("model.rope_theta=1.0e-320", "must be from 1 to"),
    ("model.conv_streams=qq", "q, k and v"),
    ("model.conv_mixing=maps", "needs conv_type=multihead"),
    ("model.canon=ABCD", "must be none or some of A, C and D, each once, as in ACD; B is"),
    ("model.conv_window=22; data.context_length=21", "is beyond data.context_length=21"),
    ("model.rope_parameters={rope_type: [1]}", "model.rope_parameters.rope_type=[1]"),
    ("optimizer.lr=.inf", "optimizer.lr=inf: must be from 0 to 1,000"),
    ("optimizer.lr=0", "must be greater than 0"),
    ("optimizer.lr=true", "must be a number, not true or false"),
    ("optimizer.min_lr=1", "above optimizer.lr"),
    ("optimizer.betas=[0.9,1.0]", "betas"),
    ("optimizer.schedule=wsd", "decay_tokens and decay_steps"),
    ("optimizer.decay_steps=5", "only 'wsd'"),
    ("optimizer.warmup_steps=100000", "has only"),
    ("data.path=null", "data: one of path and mixture is needed"),
    ("data.path=", "data.path='': is no path"),
    ("data.mixture={}", "data.mixture={}"),
    ("data.mixture={a: 1}", "path and mixture exclude each other"),
    ("data.mixture={a: 1, a: 2}", "key 'a' stands twice"),
    ("data.cache_dir=hf://datasets/x", "is an address"),
]


@pytest.mark.parametrize(("overrides", "said"), WRONG)
def test_wrong_value_raises_user_error(overrides, said):
    assert said in error_of(QUICKSTART, *overrides.split("; "))


@pytest.mark.parametrize("weight", ["0", "-1", ".nan", ".inf", "much"])
def test_weight_of_a_mixture_is_within_its_range(weight):
    line = error_of(QUICKSTART, "data.path=null", f"data.mixture={{a: {weight}}}")
    assert "data.mixture.a=" in line and "\n" not in line


def test_all_errors_are_told_at_once():
    overrides = ("optimizer.lrr=1", "train.seed=-1", "model.rotary_pct=2", "train.max_steps=x")
    message = error_of(QUICKSTART, *overrides)
    assert len(message.splitlines()) == 5
    for part in ("optimizer.lrr", "train.seed=-1", "model.rotary_pct=2", "train.max_steps='x'"):
        assert part in message


KEYS = [(section, key) for section, known in known_keys({}).items() for key in known]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=400)
VALUES = SCALARS | st.lists(SCALARS) | st.dictionaries(st.text(max_size=9), SCALARS)
TEXTS = st.sampled_from(
    ("", " ", "1e30", "-.inf", "1.0e-320", "!!timestamp abc", "[" * 400, "../x")
)


def check_taken_or_refused(path: Path, *overrides: str) -> None:
    """What is taken has no number that ends in infinities and reads back; else short lines."""
    try:
        found = load_config(path, overrides)
    except UserError as error:
        lines = [line for line in str(error).split("\n") if line]
        assert len(lines) <= 22
        assert all(len(line) < 400 and line.isprintable() for line in lines), lines
    else:
        assert all(abs(number) <= 1e18 for number in all_numbers(found))
        assert RunConfig.model_validate(found.model_dump(mode="json")) == found


def all_numbers(value: Any) -> list[float]:
    if isinstance(value, BaseModel):
        value = [getattr(value, name) for name in type(value).model_fields]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [number for part in value for number in all_numbers(part)]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return [value] if is_number else []


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return write_config(tmp_path_factory.mktemp("config"), {})


@given(place=st.sampled_from(KEYS), value=VALUES, text=st.text(max_size=400) | TEXTS)
@example(place=("model", "hidden_size"), value=10**30, text="9" * 400)
@example(place=("train", "output_dir"), value="/proc/x", text="\U0001f600\x01\x85")
def test_any_value_of_any_key_is_taken_or_refused_in_short_lines(file, place, value, text):
    section, key = place
    values = run_values("data", "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "read_yaml", lambda path, what: copy.deepcopy(values))
        check_taken_or_refused(file, f"{section}.{key}={text}")
        values[section][key] = value
        check_taken_or_refused(file)


@pytest.mark.parametrize("section", RunConfig.model_fields)
def test_section_that_is_none_is_refused(section, file):
    for odd in (None, [], 3, "a" * 300, [[1]]):
        file.write_text(yaml.safe_dump({**run_values("data", "run"), section: odd}))
        assert len(error_of(file).split("\n")) < 20


def test_overrides_come_last_and_are_typed():
    overrides = ["optimizer.lr=3e-4", "train.seed=7", "model.conv_streams=v", "train.seed=0.57M"]
    config = load_config(QUICKSTART, overrides)
    assert config.optimizer.lr == 3e-4 and config.train.seed == 570_000
    assert config.model.conv_streams == "v"
    written = f'train.seed="{2**60 + 1}"'
    assert load_config(QUICKSTART, [written]).train.seed == 2**60 + 1
    free = ["model.conv_type=none", "model.conv_window=21", "data.context_length=16"]
    assert load_config(QUICKSTART, free).model.conv_window == 21


@pytest.mark.parametrize(("text", "steps"), [("4096", 1), ("1M", 244), ("1_000_000", 244)])
def test_budget_in_tokens_gives_steps(text, steps):
    overrides = ["train.max_steps=null", f"train.max_tokens={text}", "optimizer.warmup_steps=0"]
    overrides += ["train.global_batch_size=16", "data.context_length=256"]
    assert load_config(QUICKSTART, overrides).total_steps == steps


def test_paths_are_taken_as_they_are():
    overrides = ["data.path=/a #1: b/data", "train.output_dir=2024", "train.resume=/x/y: z"]
    config = load_config(QUICKSTART, [*overrides, "train.init_from=a #1: b", "data.cache_dir=null"])
    assert config.data.path == "/a #1: b/data" and config.train.output_dir == "2024"
    assert config.train.resume == "/x/y: z" and config.train.init_from == "a #1: b"
    assert config.data.cache_dir is None


def test_mixture_takes_the_place_of_a_path_and_of_a_bases(tmp_path):
    given = ["data.path=null", "data.mixture={s3://b/web: 0.5, /data/books: 1}"]
    config = load_config(QUICKSTART, given)
    assert config.data.mixture == {"s3://b/web": 0.5, "/data/books": 1.0}
    assert config.data.folders == ["s3://b/web", "/data/books"]
    config.save(tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config
    (tmp_path / "run.yaml").write_text("base: saved.yaml\ndata: {mixture: {b: 3}}\n")
    assert load_config(tmp_path / "run.yaml").data.mixture == {"b": 3}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("model: [", "not valid YAML"),
        ("model: 3", "must be a section"),
        ("1: {a: 2}", "key '1' is no text"),
        ("[1, 2]", "holds a list, [1, 2]; must hold sections"),
        ("base: ''", "must be a file name"),
        ("base: .", "is a folder, not a file"),
        ("base: 3", "must be a file name"),
        ("base: missing.yaml", "missing.yaml: no such file or folder"),
        ("base: run.yaml", "leads back"),
        ("model: {}", "data: is missing"),
        ("model: {}", "model.hidden_size: is missing"),
    ],
)
def test_wrong_file_raises_user_error(tmp_path, text, said):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert said in error_of(path)


def test_base_is_merged_by_key_and_can_be_replaced(tmp_path, monkeypatch):
    values = yaml.safe_load(QUICKSTART.read_text())
    for name, heads in (("small", 1), ("large", 8)):
        values["model"]["num_attention_heads"] = heads
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(values))
    (tmp_path / "models").mkdir()
    run = tmp_path / "models" / "run.yaml"
    run.write_text("base: ../small.yaml\nmodel: {conv_type: none}\n")
    monkeypatch.chdir(tmp_path)
    model = load_config(run).model
    assert (model.num_attention_heads, model.conv_type) == (1, "none")
    # Names what the user sees from the working directory, wherever it stands among the others.
    model = load_config(run, ["base=large.yaml", "model.conv_type=head"]).model
    assert (model.num_attention_heads, model.conv_type) == (8, "head")
    assert load_config(run, ["base=large.yaml", "base=small.yaml"]) == load_config(run)
    for override, said in (
        ("base=missing.yaml", "missing.yaml: no such file"),
        ("base=", 'base="": must be a file name'),
        ("base=models/run.yaml", "leads back to the file itself"),
        ("base", 'override "base": must have the form section.key=value'),
    ):
        assert said in error_of(run, override)
    # Of a file that stands by itself there is no base to replace.
    assert "has no base: to replace" in error_of(tmp_path / "small.yaml", "base=large.yaml")


def test_changed_values_are_named_by_their_keys():
    a = load_config(QUICKSTART).model_dump(mode="json")
    b = load_config(QUICKSTART, ["train.seed=1", "optimizer.lr=1"]).model_dump(mode="json")
    assert changed_values(a, b) == {"optimizer.lr": (2e-3, 1.0), "train.seed": (0, 1)}


def test_file_of_somebodys_own_is_not_replaced(tmp_path):
    """`train.py RUN/config.yaml train.output_dir=RUN` is a natural thing to do."""
    own, config = tmp_path / "config.yaml", load_config(QUICKSTART)
    own.write_text("# mine\ntrain:\n  earlier_key: 1\n")
    with pytest.raises(UserError, match="is no configuration that training wrote, and would be"):
        config.save(own)
    assert own.read_text().startswith("# mine\n")
    # What a run has written is replaced.
    own.write_text("train:\n  earlier_key: 1\n")
    config.save(own)
    assert load_config(own) == config and os.listdir(tmp_path) == ["config.yaml"]


def test_batches_are_divided_among_ranks():
    config = load_config(QUICKSTART, ["train.global_batch_size=16", "train.micro_batch_size=2"])
    assert config.accumulation_steps(2) == 4
    with pytest.raises(UserError, match="2 x 3 = 6"):
        config.accumulation_steps(3)
    for stage, clip in ((0, 0.0), (1, 1.0), (2, 1.0), (3, 1.0)):  # stage 0 is clipped by the engine
        train = config.train.model_copy(update={"zero_stage": stage})
        given = config.model_copy(update={"train": train}).with_precision("bf16").deepspeed(4)
        assert given["train_batch_size"] == 16 and given["gradient_accumulation_steps"] == 2
        assert given["bf16"]["enabled"] == (stage > 0) and given["gradient_clipping"] == clip


def test_paper_rows_follow_the_recipe():
    for row in ROWS:
        config = load_config(row)
        assert config.tokens_per_step == 524_288 and config.total_steps == 28_610
        assert config.steps_of("warmup") == 954
        assert (config.optimizer.lr, config.optimizer.min_lr) == (3e-4, 3e-5)
        assert config.optimizer.weight_decay == 0.01 and config.optimizer.grad_clip == 1.0
        assert config.model.vocab_size == 32_000 and config.data.context_length == 2048
        assert row.stem in config.train.output_dir


def test_paper_rows_are_what_their_names_say():
    """With the parameters that filters add to 24 layers of 16 heads: 21 taps each."""
    head, multihead = 24 * 16 * 21, 24 * 16 * 16 * 21
    kinds = {
        "pythia": (None, None, "embeddings", 0),
        "cat": ("head", "qkv", "embeddings", 3 * head),
        "cat_v": ("head", "v", "embeddings", head),
        "cat_ssm": ("head", "qkv", "embeddings", 3 * 24 * 16 * 34),
        "mh_cat": ("multihead", "qkv", "embeddings", 3 * multihead),
        "mh_cat_v": ("multihead", "v", "embeddings", multihead),
        "mh_maps": ("multihead", "qkv", "maps", 3 * multihead),
        "mh_maps_v": ("multihead", "v", "maps", multihead),
    }
    expected, found = {}, {}
    for name, (*convolution, added) in kinds.items():
        rope = name if name == "pythia" else f"{name}_rope"
        for row, position in ((rope, "rope"), (f"{name}_nope", "none")):
            expected[row] = ((*convolution, position), 367_847_424 + added)
    for row in ROWS:
        config = load_config(row)
        model = config.model
        if model.architecture == "llama" or model.canon != "none":
            continue  # tests/cat_lm/architectures/test_families.py
        plain = model.conv_type == "none"
        convolution = (None, None) if plain else (model.conv_type, model.conv_streams)
        kind = (*convolution, model.conv_mixing, model.position_embedding)
        found[row.stem] = (kind, num_parameters(config, 0))
        assert plain or model.conv_window == 21
    assert found == expected


@pytest.mark.parametrize("family", ["mamba", "mamba2", "gla", "delta_net", "gated_deltanet"])
def test_taps_beyond_the_rows_are_named_in_every_family(family):
    overrides = ["data.path=x", "data.context_length=3"]
    overrides += ["model.use_short_conv=true"] if family == "gla" else []
    line = error_of(QUICKSTART.parent / "pretrain" / f"{family}.yaml", *overrides)
    assert re.search(r"model.conv_(kernel|size)=4: is beyond data.context_length=3", line)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["position_embedding=none", "rope_parameters={rope_type: linear, factor: 2}"],
            "rope_parameters.rope_type='linear' with position_embedding='none': there are no posit",
        ),
        (
            ["position_embedding=none", "temperature_scope=rotary"],
            "temperature_scope='rotary' with position_embedding='none': nothing is rotated",
        ),
        (
            ["attention_temperature=0.5", f"rope_parameters={{{YARN}}}"],
            "attention_temperature=0.5 and rope_parameters.attention_factor=1.06931",
        ),
        (
            ["rope_parameters={rope_theta: 500.0}"],
            "rope_parameters.rope_theta=500.0: give it as rope_theta, which is 10000.0",
        ),
        (
            ["rope_parameters={partial_rotary_factor: 0.5}"],
            "rope_parameters.partial_rotary_factor=0.5: give it as rotary_pct, which is 0.25",
        ),
    ],
    ids=str,
)
def test_rotary_positions_that_contradict_each_other_are_refused(overrides, said):
    """Before the run begins, and in the words of the model's own configuration."""
    line = error_of(QUICKSTART, *(f"model.{text}" for text in overrides))
    assert f": model.{said}" in line and "\n" not in line
    text = "\n".join(text.replace("=", ": ", 1) for text in overrides)
    run = load_config(QUICKSTART)
    fields = run.architecture.fields(run.model, 512, 64) | readers.parse_yaml(text, "overrides")
    with pytest.raises(ValueError, match=re.escape(said)):
        run.architecture.config_class()(**fields)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("{rope_theta: 500.0}", {"rope_theta": 500.0}),
        ("{rope_theta: null, rope_type: null}", {}),
        (f"{{{YARN}, attention_factor: null}}", readers.parse_yaml(f"{{{YARN}}}", "yarn")),
    ],
)
@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
def test_rotary_positions_that_agree_are_built(family, given, kept, tmp_path):
    """A base given twice alike, as resolved configurations have it, and keys without a value."""
    more = [f"model.architecture={family}", f"model.rope_parameters={given}"]
    run = load_config(QUICKSTART, [*more, "model.rope_theta=500"])
    assert run.model.rope_parameters == kept
    run.save(tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == run
    built = run.architecture.config_class()(**run.architecture.fields(run.model, 512, 64))
    assert built.rope_parameters["rope_theta"] == 500
    assert built.rope_parameters["rope_type"] == kept.get("rope_type", "default")
