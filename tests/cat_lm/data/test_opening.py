"""open_data: whatever the configuration names, or one clear line."""

import json

import pytest

from cat_lm.config import RunConfig
from cat_lm.core.errors import UserError
from cat_lm.core.files import sha256
from cat_lm.data import corpus as corpus_module
from cat_lm.data.corpus import Mixture
from cat_lm.data.opening import open_data
from tests.prepared_data import random_documents, write_prepared
from tests.runs import run_values


@pytest.fixture
def folder(tmp_path):
    return write_prepared(tmp_path / "data", random_documents(90, 40), vocab_size=5000)


def config_of(folder, model=(), **data):
    values = run_values(folder, "unused")
    values["data"] |= data
    values["model"] |= dict(model)
    return RunConfig.model_validate(values)


def test_more_shards_than_files_may_be_open_are_refused(folder, monkeypatch):
    """Else the map of some shard fails, in the middle of a run."""
    monkeypatch.setattr("resource.getrlimit", lambda kind: (257, 257))
    monkeypatch.setattr("resource.setrlimit", lambda kind, limits: None)
    with pytest.raises(UserError, match=r"only 257 files may be open; raise the hard limit"):
        open_data(config_of(folder))


def test_manifest_of_other_shards_is_refused(folder):
    """A shard and its checksum are another's, the fingerprint is not."""
    tokens = folder / "train-00000.bin"
    tokens.write_bytes(bytes(reversed(tokens.read_bytes())))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["splits"]["train"]["shards"][0]["bin_sha256"] = sha256(tokens)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="fingerprint does not belong to its shards"):
        open_data(config_of(folder))


def test_a_mixture_with_packing_and_masks(folder, tmp_path):
    other = write_prepared(tmp_path / "b", random_documents(50, 40, seed=1), vocab_size=5000)
    mixture = {str(folder): 3, str(other): 1}
    options = {"path": None, "mixture": mixture, "packing": "best_fit", "mask_documents": True}
    corpus, held_out, loader = open_data(config_of(folder, **options))
    assert isinstance(corpus, Mixture) and isinstance(held_out, Mixture)
    assert {p.name: n for p, n in zip(corpus.parts, corpus.counts, strict=True)} == {
        str(folder): 7500,
        str(other): 2500,
    }
    assert set(loader.batch(0)) == {"input_ids", "labels", "document_ids"}
    assert (folder / "packing").is_dir() and (other / "packing").is_dir()


def test_a_vocabulary_that_is_too_small(folder):
    with pytest.raises(UserError, match=r"model.vocab_size=4999: the tokenizer of .*data has 5000"):
        open_data(config_of(folder, {"vocab_size": 4999}))
    open_data(config_of(folder, {"vocab_size": 5000}))


@pytest.mark.parametrize("split", ["train", "validation"])
def test_masking_needs_ends_that_a_stream_shows(tmp_path, split):
    """Without EOD nothing would be masked, and nothing would say so."""
    documents = {"train": random_documents(90, 40), "validation": [[4, 5, 0]]}
    documents[split] = [[*range(1, 50)]] * 9
    folder = write_prepared(tmp_path / "data", documents["train"], documents["validation"])
    for packing in ("stream", "best_fit"):
        with pytest.raises(UserError, match=rf"mask_documents=true: the {split} documents of"):
            open_data(config_of(folder, mask_documents=True, packing=packing))
    open_data(config_of(folder))


@pytest.mark.parametrize("options", [{}, {"packing": "best_fit", "mask_documents": True}])
def test_shards_that_another_process_looked_at_are_opened_where_they_are_read(
    tmp_path, monkeypatch, options
):
    data = write_prepared(tmp_path / "data", random_documents(90, 40), shard_tokens=100)
    config, opened, real = config_of(data, **options), [], corpus_module.Shard
    usual = open_data(config)[2]
    monkeypatch.setattr(corpus_module, "Shard", lambda path: opened.append(path) or real(path))
    corpus, _, loader = open_data(config, look=False)
    assert len(opened) <= 2, "the last ones' ends, where documents are masked"
    for step in range(3):
        found, expected = loader.batch(step), usual.batch(step)
        assert all((found[name] == expected[name]).all() for name in expected)
    assert len(opened) > 2 and len(corpus.shards) > 10
    assert len(opened) == len(set(opened))
    (data / f"{corpus.shards[0].name}.bin").unlink()
    unlooked = open_data(config, look=False)[0]
    with pytest.raises(UserError, match="no such file, but the shard needs it"):
        unlooked.tokens(0, 10)
    with pytest.raises(UserError, match="no such file, but the shard needs it"):
        open_data(config)
