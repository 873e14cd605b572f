"""train.init_from: a run that starts from a model's weights, as they are or upcycled."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from cat_lm.config import RunConfig, load_config
from cat_lm.core.errors import UserError
from cat_lm.pretrained.record import PROGRAM, describe_file
from tests.commands import python
from tests.runs import records, run_values, write_config

ROOT = Path(__file__).resolve().parents[2]
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def run(*command: object, code: int = 0) -> str:
    done = python(*command)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def pythia(tiny_corpus, tmp_path_factory) -> Path:
    """A GPT-NeoX model with the corpus's tokenizer and, as Pythia, a larger vocabulary."""
    import torch
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    folder = tmp_path_factory.mktemp("pythia")
    shutil.copytree(tiny_corpus / "tokenizer", folder, dirs_exist_ok=True)
    entries = json.loads((tiny_corpus / "manifest.json").read_text())["tokenizer"]["vocab_size"]
    torch.manual_seed(5)
    model = GPTNeoXForCausalLM(
        GPTNeoXConfig(**SHAPE, vocab_size=entries + 7, intermediate_size=128, hidden_act="gelu")
    )
    # Far from a fresh initialisation (whose loss is that of guessing), so that a run without these
    # weights is seen.
    for parameter in model.parameters():
        parameter.data += 0.5 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


def values(corpus: Path, folder: Path, source: Path, **model) -> dict:
    result = run_values(corpus, folder, max_steps=2, init_from=str(source))
    result["optimizer"]["warmup_steps"] = 0
    result["model"] |= {"hidden_dropout": 0.0, "conv_type": "none", **model}
    return result


def test_upcycled_model_goes_on_where_the_plain_one_is(tiny_corpus, pythia, tmp_path):
    run("-m", "cat_lm.upcycle", pythia, tmp_path / "cat", "--conv", "head", "--window", 4)
    first = {}
    for name, source, model in (
        ("plain", pythia, {}),
        ("cat", tmp_path / "cat", {"conv_type": "head", "conv_window": 4}),
    ):
        (tmp_path / name).mkdir(exist_ok=True)
        config = write_config(
            tmp_path / name, values(tiny_corpus, tmp_path / f"run-{name}", source, **model)
        )
        assert f"weights: from {source}" in run("train.py", config)
        first[name] = records(tmp_path / f"run-{name}")[0]["loss"]
    assert first["plain"] > math.log(300) + 1
    assert first["cat"] == pytest.approx(first["plain"], abs=1e-5)
    # A resumed run takes the checkpoint's weights, and needs the source no more.
    resumed = values(tiny_corpus, tmp_path / "run-plain", tmp_path / "gone")
    resumed["train"] |= {"max_steps": 3, "resume": "auto"}
    assert "weights: from" not in run("train.py", write_config(tmp_path, resumed))


def test_model_that_does_not_fit_is_refused(tiny_corpus, pythia, tmp_path):
    from cat_lm.data.opening import open_corpus
    from cat_lm.training.building import build_model, load_initial_weights, vocab_size

    corpus = open_corpus(tiny_corpus, "train")

    def error(source: Path, **model) -> str:
        config = RunConfig.model_validate(values(tiny_corpus, tmp_path / "run", source, **model))
        with pytest.raises(UserError) as raised:
            size = vocab_size(config, corpus, checkpoint=None)
            load_initial_weights(build_model(config, size), str(source))
        return str(raised.value)

    assert "no such folder" in error(tmp_path / "missing")
    assert "model.num_hidden_layers is 2 there and 3 here" in error(pythia, num_hidden_layers=3)
    message = error(pythia, conv_type="head")
    assert "model.conv_type is 'none' there and 'head' here" in message
    assert "cat_lm.upcycle" in message and "conv_window" not in message
    assert "model.rope_theta is 10000.0 there" in error(pythia, rope_theta=500.0)
    # What starts anew is the pattern's own alone.
    assert "model.conv_type is" in error(pythia, conv_type="head", **LANDMARK)
    activated = shutil.copytree(pythia, tmp_path / "activated")
    changed = json.loads((activated / "config.json").read_text()) | {"hidden_act": "relu"}
    (activated / "config.json").write_text(json.dumps(changed))
    assert "model.hidden_act is 'relu' there and 'gelu' here" in error(activated)
    other = shutil.copytree(pythia, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    first, second = list(ids)[:2]
    swapped = ids | {first: ids[second], second: ids[first]}
    swapped = tokenizer | {"model": tokenizer["model"] | {"vocab": swapped}}
    (other / "tokenizer.json").write_text(json.dumps(swapped))
    assert "its tokenizer" in error(other)
    tokenizer["added_tokens"].append(
        {"id": 9999, "content": "<new>", "special": True, "single_word": False}
        | {"lstrip": False, "rstrip": False, "normalized": False}
    )
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "its tokenizer" in error(other)


LEARNED = {"filter": "learned"}
SSM = {"filter": "ssm", "filter_state": 4}
NEW = ["core.filter", "core.sharpness"]
LANDMARK = {
    "attention": "landmark",
    "attention_options": {"block": 4, "top_k": 1, "local": 1, "filter": "learned"},
}


def test_landmarks_are_learned_for_a_dense_model_and_nothing_else(tiny_corpus, pythia, tmp_path):
    from cat_lm.pretrained.loading import load_model

    calibrated = values(tiny_corpus, tmp_path / "run", pythia, **LANDMARK)
    calibrated["train"]["landmark_loss"] = "calibrate"
    calibrated["optimizer"]["weight_decay"] = 0.0
    said = run("train.py", write_config(tmp_path, calibrated))
    assert f"weights: from {pythia}; new: core.filter, core.sharpness" in said
    first, last = (row["landmark_loss"] for row in records(tmp_path / "run")[:2])
    assert first != last
    run("-m", "cat_lm.export", tmp_path / "run", tmp_path / "model")
    folders = (tmp_path / "model", pythia)
    weights, theirs = (load_model(folder, device="cpu").state_dict() for folder in folders)
    assert all((weights.pop(name) == given).all() for name, given in theirs.items())
    box = 1 / LANDMARK["attention_options"]["block"]
    filters = [weights.pop(f"gpt_neox.layers.{n}.attention.core.filter") for n in range(2)]
    assert all((taps != box).any() and abs(taps - box).max() < 0.1 for taps in filters)
    assert all(".core.sharpness" in name for name in weights) and len(weights) == 2


@pytest.mark.parametrize(
    ("theirs", "ours", "begins"),
    [
        ({}, {"local": 2}, []),  # the default, spelled out
        ({}, {"block": 8, "top_k": 2, "sink": True}, []),
        ({}, LEARNED, NEW),
        (LEARNED, LEARNED | {"top_k": 3, "share": "layer"}, []),
        (LEARNED, LEARNED | {"block": 8}, NEW),
        (LEARNED, {}, []),
        (SSM, SSM | {"filter_state": 8}, NEW),
        (SSM, SSM | {"top_k": 2}, []),
    ],
)
def test_model_with_landmarks_goes_on_with_other_ones(theirs, ours, begins, tmp_path):
    """Options change no other weight's meaning; a filter is one for its blocks only."""
    import torch

    from cat_lm.training.building import build_model, load_initial_weights

    def built(seed: int, options: dict):
        changes = {"attention": "landmark", "attention_options": {"block": 4, "top_k": 1} | options}
        model = values(tmp_path, tmp_path / "run", tmp_path, **changes)
        model["train"] |= {"seed": seed, "landmark_loss": "guided"}
        return build_model(RunConfig.model_validate(model), 61)

    source, model = built(1, theirs), built(2, ours)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter += torch.randn_like(parameter)
    source.save_pretrained(tmp_path / "source")
    before = {name: x.clone() for name, x in model.state_dict().items()}
    assert load_initial_weights(model, str(tmp_path / "source")) == begins
    given, now = source.state_dict(), model.state_dict()
    assert all(x.equal(given[name]) for name, x in now.items() if ".core." not in name)
    own = [name for name in now if ".core." in name]
    assert all(now[name].equal((before if begins else given)[name]) for name in own)
    assert bool(own) == ("filter" in ours)


def test_files_of_an_export_are_compared_unless_told_not_to(tiny_corpus, pythia, tmp_path):
    source = shutil.copytree(pythia, tmp_path / "model")
    files = {path.name: describe_file(path) for path in Path(source).iterdir()}
    record = {"format": 1, "program": PROGRAM, "files": files, "dtype": "float32", "parameters": 1}
    record["sha256"] = files["model.safetensors"]["sha256"]
    (source / "export.json").write_text(json.dumps(record))
    config = write_config(tmp_path, values(tiny_corpus, tmp_path / "run", source))
    # A space is harmless to who reads the file; not to its checksum.
    with open(source / "tokenizer_config.json", "a", encoding="utf-8") as stream:
        stream.write(" ")
    said = run("train.py", config, code=2)
    assert "tokenizer_config.json: has " in said and "train.init_checksums=false" in said
    assert "Traceback" not in said
    assert "weights: from" in run("train.py", config, "train.init_checksums=false")


@pytest.mark.parametrize(
    ("method", "positions"),
    [
        ("yarn", {}),
        ("pi+temperature", {"model.rope_parameters": "{rope_type: linear, factor: 4}"}),
        ("temperature", {"model.rope_parameters": "null", "model.position_embedding": "none"}),
    ],
)
def test_a_longer_context_begins_as_the_scaled_model_reads_it(tmp_path, method, positions):
    """configs/long_context.yaml with the changes that its README gives, on a small model."""
    import torch

    from cat_lm.pretrained.conversion import scaled_config, scaled_fields
    from cat_lm.pretrained.loading import load_model
    from cat_lm.training.building import build_model, load_initial_weights

    def configured(**changes: str) -> RunConfig:
        shape = {f"model.{key}": value for key, value in SHAPE.items()}
        values = shape | positions | changes
        return load_config(
            ROOT / "configs/long_context.yaml", [f"{key}={value}" for key, value in values.items()]
        )

    unscaled = {"model.rope_parameters": "null", "model.attention_temperature": "1"}
    trained = build_model(configured(**unscaled | {"data.context_length": "256"}), 61)
    for parameter in trained.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    trained.save_pretrained(tmp_path)

    run = build_model(configured(), 61).eval()
    load_initial_weights(run, str(tmp_path))
    config = scaled_config(trained.config, scaled_fields(trained.config, method, 4, 256))
    scaled = load_model(tmp_path, device="cpu", config=config)
    ids = torch.randint(61, (1, 1024))
    with torch.no_grad():
        found, wanted, before = (each(ids).logits for each in (run, scaled, trained.eval()))
    assert torch.equal(found, wanted)
    assert (found - before).abs().max() > 1e-3 * before.abs().max()
    assert run.config.max_position_embeddings == config.max_position_embeddings == 1024
