"""RunConfig: typed YAML, bases, overrides, all errors at once."""

from pathlib import Path

import pytest
import yaml

from cat_lm.config import changed_values, load_config
from cat_lm.core.errors import UserError
from cat_lm.training.estimate import num_parameters

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "configs/quickstart.yaml"
PRETRAIN = sorted((ROOT / "configs/pretrain").glob("*.yaml"))
ROWS = [path for path in PRETRAIN if "base: base_370m.yaml" in path.read_text(encoding="utf-8")]


def error_of(path, *overrides) -> str:
    with pytest.raises(UserError) as raised:
        load_config(path, overrides)
    return str(raised.value)


def test_overrides_come_last_and_are_typed():
    config = load_config(QUICKSTART, ["optimizer.lr=3e-4", "train.seed=7", "model.conv_streams=v"])
    assert config.optimizer.lr == 3e-4 and config.train.seed == 7
    assert config.model.conv_streams == "v"


@pytest.mark.parametrize(
    ("text", "steps"), [("4096", 1), ("1M", 244), ("0.5M", 122), ("1e6", 244), ("1_000_000", 244)]
)
def test_counts_as_people_write_them(text, steps):
    overrides = ["train.max_steps=null", f"train.max_tokens={text}", "optimizer.warmup_steps=0"]
    config = load_config(QUICKSTART, overrides)
    changed = config.model_copy(
        update={
            "train": config.train.model_copy(update={"global_batch_size": 16}),
            "data": config.data.model_copy(update={"context_length": 256}),
        }
    )
    assert changed.total_steps == steps


def test_unknown_key_names_the_nearest_known_one():
    assert "optimizer.lr" in error_of(QUICKSTART, "optimizer.lrate=1")
    message = error_of(QUICKSTART, "model.context_length=5")
    assert "model.context_length: unknown key" in message and "data.context_length" in message
    assert "train" in error_of(QUICKSTART, "trian.seed=1")


def test_all_errors_at_once():
    message = error_of(
        QUICKSTART, "optimizer.lrr=1", "train.seed=-1", "model.rotary_pct=2", "train.max_steps=x"
    )
    assert len(message.splitlines()) == 5
    for part in ("optimizer.lrr", "train.seed=-1", "model.rotary_pct=2", "train.max_steps='x'"):
        assert part in message


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("seed=1", "section.key=value"),
        ("train.seed", "section.key=value"),
        ("train.a.b=1", "section.key=value"),
        ("train.seed=[1", "not valid YAML"),
        ("train.seed=true", "whole number"),
        ("train.seed=1.5", "train.seed"),
        ("train.max_tokens=1M", "exclude each other"),
        ("train.max_steps=null", "one of max_tokens and max_steps"),
        ("train.micro_batch_size=5", "must divide"),
        ("train.zero_stage=4", "train.zero_stage"),
        ("train.max_steps=1e400", "must be from 1 to 1,000,000,000"),
        ("model.rotary_pct=0.3", "even number"),
        ("train.compile=true", "does not go with"),
        ("model.num_attention_heads=3", "multiple of"),
        ("model.conv_streams=qx", "q, k and v"),
        ("model.conv_streams=qq", "q, k and v"),
        ("model.conv_mixing=maps", "needs conv_type=multihead"),
        ("model.canon=ABCD", "must be none or some of A, C and D, each once, as in ACD; B is"),
        ("train.conv_backend=cuda", "train.conv_backend='cuda'"),
        ("optimizer.min_lr=1", "above optimizer.lr"),
        ("optimizer.betas=[0.9,1.0]", "betas"),
        ("optimizer.schedule=wsd", "decay_tokens and decay_steps"),
        ("optimizer.decay_steps=5", "only 'wsd'"),
        ("optimizer.warmup_steps=100000", "has only"),
        ("optimizer=3", "section.key=value"),
        ("data.path=null", "data: one of path and mixture is needed"),
        ("data.mixture={a: 1}", "path and mixture exclude each other"),
        ("data.mixture={}", "data.mixture={}"),
        ("data.mixture=a", "data.mixture='a'"),
        ("data.mixture={a: 0}", "data.mixture.a=0: must be from 1e-09 to 1e+18"),
        ("data.mixture={a: -1, b: 1}", "data.mixture.a=-1"),
        ("data.mixture={a: .nan}", "data.mixture.a=nan"),
        ("data.mixture={a: .inf}", "data.mixture.a=inf"),
        ("data.mixture={a: much}", "data.mixture.a='much'"),
        ("data.mixture={a: 1, a: 2}", "key 'a' stands twice"),
        ("data.packing=worst_fit", "data.packing='worst_fit'"),
    ],
)
def test_wrong_values(override, part):
    more = ["train.zero_stage=3"] if "compile" in override else []
    assert part in error_of(QUICKSTART, override, *more)


def test_paths_are_taken_as_they_are():
    overrides = ["data.path=/a #1: b/data", "train.output_dir=2024", "train.resume=/x/y: z"]
    config = load_config(QUICKSTART, overrides)
    assert config.data.path == "/a #1: b/data" and config.train.output_dir == "2024"
    assert config.train.resume == "/x/y: z"
    optional = load_config(QUICKSTART, ["train.init_from=a #1: b", "data.cache_dir=null"])
    assert optional.train.init_from == "a #1: b" and optional.data.cache_dir is None


def test_a_mixture_in_place_of_a_path(tmp_path):
    given = ["data.path=null", "data.mixture={s3://b/web: 0.5, /data/books: 1}"]
    config = load_config(QUICKSTART, given)
    assert config.data.mixture == {"s3://b/web": 0.5, "/data/books": 1.0}
    assert config.data.folders == ["s3://b/web", "/data/books"]
    config.save(tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml").data == config.data
    assert load_config(QUICKSTART, ["data.path=x"]).data.folders == ["x"]
    assert (
        len(error_of(QUICKSTART, "data.path=null", "data.mixture={a: 0, b: -1}").split("\n")) == 3
    )


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "is empty"),
        ("model: [", "not valid YAML"),
        ("model: 3", "must be a section"),
        ("1: {a: 2}", "key '1' is no text"),
        ("[1, 2]", "holds a list, [1, 2]; must hold sections"),
        ("3", "holds 3; must hold sections"),
        ("base: ''", "must be a file name"),
        ("base: .", "is a folder, not a file"),
        ("model: {hidden_size: 1}\nmodel: {}", "stands twice"),
        ("base: 3", "must be a file name"),
        ("base: missing.yaml", "missing.yaml: no such file or folder"),
        ("base: run.yaml", "leads back"),
    ],
)
def test_wrong_files(tmp_path, text, part):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert part in error_of(path)


def test_missing_file_and_missing_keys(tmp_path):
    assert "none.yaml: no such file or folder" in error_of(tmp_path / "none.yaml")
    path = tmp_path / "run.yaml"
    path.write_text("model: {}\n")
    message = error_of(path)
    assert "data: is missing" in message and "model.hidden_size: is missing" in message


def test_base_is_merged_by_key(tmp_path):
    base = yaml.safe_load(QUICKSTART.read_text())
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    (tmp_path / "run.yaml").write_text("base: base.yaml\nmodel: {conv_type: none}\n")
    config = load_config(tmp_path / "run.yaml")
    assert config.model.conv_type == "none"
    assert config.model.hidden_size == base["model"]["hidden_size"]


def test_an_override_puts_another_base_in_its_place(tmp_path, monkeypatch):
    values = yaml.safe_load(QUICKSTART.read_text())
    for name, heads in (("small", 1), ("large", 8)):
        values["model"]["num_attention_heads"] = heads
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(values))
    (tmp_path / "models").mkdir()
    run = tmp_path / "models" / "run.yaml"
    run.write_text("base: ../small.yaml\nmodel: {conv_type: none}\n")
    monkeypatch.chdir(tmp_path)
    assert load_config(run).model.num_attention_heads == 1
    # Names what the user sees from the working directory, wherever it stands among the others.
    model = load_config(run, ["base=large.yaml", "model.conv_type=head"]).model
    assert (model.num_attention_heads, model.conv_type) == (8, "head")
    assert load_config(run, ["base=large.yaml", "base=small.yaml"]) == load_config(run)


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("base=missing.yaml", "missing.yaml: no such file"),
        ("base=", 'base="": must be a file name'),
        ("base=run.yaml", "leads back to the file itself"),
        ("base", 'override "base": must have the form section.key=value'),
    ],
)
def test_a_base_that_cannot_take_the_place(tmp_path, monkeypatch, override, part):
    (tmp_path / "base.yaml").write_text(QUICKSTART.read_text())
    (tmp_path / "run.yaml").write_text("base: base.yaml\n")
    monkeypatch.chdir(tmp_path)
    assert part in error_of(tmp_path / "run.yaml", override)
    # Of a file that stands alone there is no base to replace.
    if override != "base":
        assert "has no base: to replace" in error_of(tmp_path / "base.yaml", override)


def test_a_mixture_takes_the_place_of_the_bases(tmp_path):
    base = yaml.safe_load(QUICKSTART.read_text())
    base["data"] |= {"path": None, "mixture": {"a": 1, "b": 2}}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    (tmp_path / "run.yaml").write_text("base: base.yaml\ndata: {mixture: {b: 3}}\n")
    assert load_config(tmp_path / "run.yaml").data.mixture == {"b": 3}


def test_resolved_config_reads_back(tmp_path):
    config = load_config(QUICKSTART)
    config.save(tmp_path / "resolved.yaml")
    assert load_config(tmp_path / "resolved.yaml") == config


def test_changed_values():
    a = load_config(QUICKSTART).model_dump(mode="json")
    b = load_config(QUICKSTART, ["train.seed=1", "optimizer.lr=1"]).model_dump(mode="json")
    assert changed_values(a, b) == {"optimizer.lr": (2e-3, 1.0), "train.seed": (0, 1)}


def test_paper_rows_follow_the_recipe():
    for row in ROWS:
        config = load_config(row)
        assert config.tokens_per_step == 524_288
        assert config.total_steps == 28_610
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
    expected = {}
    for name, (*convolution, added) in kinds.items():
        rope = name if name == "pythia" else f"{name}_rope"
        for row, position in ((rope, "rope"), (f"{name}_nope", "none")):
            expected[row] = ((*convolution, position), 367_847_424 + added)
    found = {}
    for row in ROWS:
        config = load_config(row)
        if config.model.architecture == "llama" or config.model.canon != "none":
            continue  # test_families.py
        model = config.model
        plain = model.conv_type == "none"
        convolution = (None, None) if plain else (model.conv_type, model.conv_streams)
        kind = (*convolution, model.conv_mixing, model.position_embedding)
        found[row.stem] = (kind, num_parameters(config, 0))
        assert plain or model.conv_window == 21
    assert found == expected


def test_batch_arithmetic_and_deepspeed_config():
    config = load_config(QUICKSTART, ["train.global_batch_size=16", "train.micro_batch_size=2"])
    assert config.accumulation_steps(2) == 4
    with pytest.raises(UserError, match="2 x 3 = 6"):
        config.accumulation_steps(3)
    derived = config.with_precision("bf16").deepspeed(world_size=4)
    assert derived["train_batch_size"] == 16 and derived["gradient_accumulation_steps"] == 2
    assert derived["bf16"]["enabled"] and derived["data_types"]["grad_accum_dtype"] == "fp32"


def test_a_configuration_of_ones_own_in_the_runs_folder_is_refused(tmp_path):
    """`train.py RUN/config.yaml train.output_dir=RUN` is a natural thing to do."""
    own = tmp_path / "config.yaml"
    own.write_text("# mine\ntrain:\n  earlier_key: 1\n")
    config = load_config(ROOT / "configs" / "quickstart.yaml")
    with pytest.raises(UserError, match="is no configuration that training wrote, and would be"):
        config.save(own)
    assert own.read_text().startswith("# mine\n")
    # What a run has written is replaced.
    own.write_text("train:\n  earlier_key: 1\n")
    config.save(own)
    assert load_config(own) == config and list(tmp_path.iterdir()) == [own]
