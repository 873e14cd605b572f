"""Model folders that were damaged, changed, or made to do harm: one line, and nothing is run."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cat_lm import generate
from cat_lm.core.errors import UserError
from cat_lm.export import export_checkpoint, export_model
from cat_lm.pretrained.loading import load_model, load_tokenizer
from cat_lm.upcycle import Convolution, upcycle
from tests.finished_runs import checkpoint, tiny_model

FILTER = "gpt_neox.layers.0.attention.convolution.q_filter"


@pytest.fixture(scope="module")
def exported(tmp_path_factory, tiny_corpus) -> Path:
    tokenizer = load_tokenizer(tiny_corpus / "tokenizer")
    folder = tmp_path_factory.mktemp("exported")
    return export_model(tiny_model(257, conv_init="identity"), tokenizer, folder / "cat")


@pytest.fixture
def folder(exported, tmp_path) -> Path:
    """An export, to be changed."""
    return Path(shutil.copytree(exported, tmp_path / "model"))


@pytest.fixture
def foreign(folder) -> Path:
    """The same folder without its record: as one from elsewhere."""
    (folder / "export.json").unlink()
    return folder


def change_settings(folder: Path, name: str = "config.json", **values: object) -> Path:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


def change_weights(folder: Path, change) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def flip(path: Path) -> None:
    """Changes a bit near the end; the size stays."""
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)


def run(monkeypatch, capsys, *arguments: object, stdin: bytes = b"") -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["generate", *map(str, arguments)])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
    code = 0
    try:
        generate.main()
    except SystemExit as ended:
        code = ended.code
    return code, *capsys.readouterr()


def assert_one_line(monkeypatch, capsys, said: str, *arguments: object, stdin: bytes = b"") -> None:
    code, out, err = run(monkeypatch, capsys, *arguments, stdin=stdin)
    assert (code, out) == (2, "")
    assert said in err
    assert err.startswith("error: ") and err.count("\n") == 1


class TestChecksums:
    @pytest.mark.parametrize(
        "name", ["model.safetensors", "config.json", "generation_config.json", "tokenizer.json"]
    )
    def test_a_changed_file_is_named(self, folder, monkeypatch, capsys, name):
        flip(folder / name)
        said = f"error: {folder / name}: has the XXH3 checksum "
        assert_one_line(monkeypatch, capsys, said, folder, "x")

    def test_size_and_absence_are_named(self, folder):
        with open(folder / "model.safetensors", "ab") as stream:
            stream.write(b"x")
        with pytest.raises(UserError, match=r"has [\d,]+ bytes, export.json lists"):
            load_model(folder)
        (folder / "generation_config.json").unlink()
        with pytest.raises(UserError, match=r"generation_config.json: is missing"):
            load_model(folder)

    def test_every_way_to_the_weights_compares_them(self, folder, tmp_path):
        from cat_lm.training.building import load_initial_weights
        from eval.common.filters import read_filters

        flip(folder / "model.safetensors")
        model = tiny_model(257)
        for load in (
            lambda: load_model(folder),
            lambda: upcycle(folder, tmp_path / "out", Convolution()),
            lambda: load_initial_weights(model, str(folder)),
            lambda: read_filters(folder),
        ):
            with pytest.raises(UserError, match=r"model.safetensors: has the XXH3"):
                load()
        assert not (tmp_path / "out").exists()

    def test_the_flag_takes_a_changed_file_and_ends_with_the_command(
        self, folder, monkeypatch, capsys
    ):
        change_settings(folder, attention_dropout=0.5)
        arguments = (folder, "x", "--max-new-tokens", 1, "--greedy")
        assert run(monkeypatch, capsys, *arguments, "--skip-checksums")[0] == 0
        assert_one_line(monkeypatch, capsys, "config.json: has ", *arguments)

    def test_a_damaged_record_is_named(self, folder):
        record = folder / "export.json"
        values = json.loads(record.read_text())
        for content, said in (
            ("{", "is not JSON"),
            ("[]", "must be an object"),
            (json.dumps(values | {"files": []}), "files is"),
            (json.dumps(values | {"files": {}}), "files is {}: .*at least 1 item"),
            (json.dumps(values | {"files": {"../x": {}}}), "inside the file's own folder"),
            (json.dumps({k: v for k, v in values.items() if k != "format"}), "another version of"),
        ):
            record.write_text(content)
            with pytest.raises(UserError, match=said):
                load_model(folder)

    def test_a_folder_from_elsewhere_loads(self, foreign):
        load_model(foreign)
        (foreign / "export.json").write_text('{"who": "another program"}')
        load_model(foreign)


class TestFinite:
    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_weights_that_are_not_finite_are_named(self, foreign, tmp_path, value):
        from cat_lm.training.building import load_initial_weights

        change_weights(foreign, lambda tensors: tensors[FILTER][1].fill_(value))
        for load in (
            lambda: load_model(foreign),
            lambda: upcycle(foreign, tmp_path / "out", Convolution()),
            lambda: load_initial_weights(tiny_model(257), str(foreign)),
        ):
            with pytest.raises(UserError, match=rf"1 of 34 tensors is not finite \({FILTER}\)"):
                load()

    def test_a_checkpoint_that_is_not_finite_is_not_exported(self, tmp_path, tiny_corpus):
        model = tiny_model(257)
        with torch.no_grad():
            model.lm_head.weight[3, 5] = math.nan
            model.gpt_neox.final_layer_norm.bias[:] = math.inf
        checkpoint(tmp_path / "run", model, tiny_corpus / "tokenizer")
        with pytest.raises(UserError, match=r"2 of 34 tensors are not finite \(.*, …\)"):
            export_checkpoint(tmp_path / "run", tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_a_dtype_that_has_no_room_is_said(self, tmp_path, tiny_corpus):
        model = tiny_model(257)
        with torch.no_grad():
            model.lm_head.weight[0, 0] = 1e6
        tokenizer = load_tokenizer(tiny_corpus / "tokenizer")
        with pytest.raises(UserError, match=r"weights in float16: 1 of 34 .* \(lm_head.weight\)"):
            export_model(model, tokenizer, tmp_path / "out", dtype="float16")
        assert not (tmp_path / "out").exists()


class TestCode:
    """Whatever a folder asks for, `ran` is never written."""

    @pytest.fixture
    def ran(self, tmp_path) -> Path:
        return tmp_path / "ran"

    def evil(self, foreign: Path, ran: Path) -> None:
        code = f"open({str(ran)!r}, 'w').close()\n"
        code += "from transformers import PreTrainedConfig as C, PreTrainedModel as M\n"
        code += "from transformers import PreTrainedTokenizerFast as T\n"
        (foreign / "evil.py").write_text(code)
        (foreign / "custom_generate").mkdir()
        (foreign / "custom_generate" / "generate.py").write_text(code + "def generate(**_): 1 / 0")

    def test_of_a_model_of_its_own(self, foreign, ran, monkeypatch, capsys):
        self.evil(foreign, ran)
        auto = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}
        change_settings(foreign, model_type="evil", auto_map=auto)
        monkeypatch.setattr("builtins.input", lambda *_: "y")
        assert_one_line(monkeypatch, capsys, "its code is not run", foreign, "x", stdin=b"y\n" * 9)
        with pytest.raises(UserError, match="its code is not run"):
            upcycle(foreign, ran.parent / "out", Convolution())
        assert not ran.exists()

    def test_of_a_tokenizer_of_its_own(self, foreign, ran, monkeypatch, capsys):
        from cat_lm.data.tokenizers import read_transformers_tokenizer

        self.evil(foreign, ran)
        (foreign / "tokenizer.json").unlink()
        auto = {"AutoTokenizer": ["evil.T", "evil.T"]}
        change_settings(foreign, "tokenizer_config.json", auto_map=auto, tokenizer_class="Evil")
        monkeypatch.setattr("builtins.input", lambda *_: "y")
        assert_one_line(monkeypatch, capsys, "its code is not run", foreign, "x", stdin=b"y\n" * 9)
        with pytest.raises(UserError, match="not a tokenizer folder"):
            read_transformers_tokenizer(foreign)
        assert not ran.exists()

    def test_beside_a_model_that_is_known(self, foreign, ran, monkeypatch, capsys):
        self.evil(foreign, ran)
        auto = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}
        change_settings(foreign, auto_map=auto)
        arguments = (foreign, "x", "--max-new-tokens", 1)
        assert run(monkeypatch, capsys, *arguments, stdin=b"y\n" * 9)[0] == 0
        assert not ran.exists()

    def test_in_a_pickle(self, foreign, ran, tmp_path):
        class Evil:
            def __reduce__(self):
                return os.mkdir, (str(ran),)

        (foreign / "model.safetensors").unlink()
        torch.save({"lm_head.weight": Evil()}, foreign / "pytorch_model.bin")
        for load in (load_model, lambda path: upcycle(path, tmp_path / "out", Convolution())):
            with pytest.raises(UserError, match=r"cannot be loaded: .*code, which is not run"):
                load(foreign)
        assert not ran.exists()

    def test_adapters_and_kernels_are_refused(self, foreign):
        change_settings(foreign, attn_implementation="someone/kernel:run")
        with pytest.raises(UserError, match="code from elsewhere is not run"):
            load_model(foreign)
        (foreign / "adapter_config.json").write_text('{"base_model_name_or_path": "/elsewhere"}')
        with pytest.raises(UserError, match="holds an adapter"):
            load_model(foreign)

    @pytest.mark.parametrize("key", ["transformers_weights", "configuration_files"])
    def test_settings_do_not_lead_elsewhere(self, foreign, key):
        change_settings(foreign, **{key: "other.safetensors"})
        with pytest.raises(UserError, match=f"{key}: other files are not read"):
            load_model(foreign)


class TestIndex:
    def test_weights_in_several_files_load(self, foreign):
        expected = load_model(foreign).state_dict()
        load_model(foreign).save_pretrained(foreign / "parts", max_shard_size="20KB")
        (foreign / "model.safetensors").unlink()
        for path in (foreign / "parts").glob("model*"):
            path.rename(foreign / path.name)
        assert len(list(foreign.glob("*.safetensors"))) > 1
        loaded = load_model(foreign).state_dict()
        assert all(torch.equal(loaded[name], expected[name]) for name in expected)
        next(foreign.glob("model-00002*")).rename(foreign / "parts" / "away")
        with pytest.raises(UserError, match=r"weight_map names model-00002.* not in the folder"):
            load_model(foreign)


# What a setting of config.json may not be, where the weights of a model are of this shape.
WRONG = [
    ({"hidden_size": "abc"}, "hidden_size"),
    ({"hidden_size": 10**30}, "hidden_size=1000000000000000000000000000000: must be from 1"),
    ({"hidden_size": 33}, "config.json cannot be used: "),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: must be from 1"),
    ({"max_position_embeddings": -1}, "max_position_embeddings=-1: must be from 1"),
    ({"layer_norm_eps": math.nan}, "layer_norm_eps=nan"),
    ({"hidden_act": "foo"}, "hidden_act='foo': is not supported; choose one of"),
    ({"rope_parameters": [1]}, "rope_parameters"),
    ({"rope_parameters": {"rope_theta": 1e-320}}, "rope_theta"),
    ({"rope_parameters": {"rope_theta": "big"}}, "rope_theta"),
    ({"rotary_emb_base": math.inf, "rope_parameters": None}, "rope_theta=inf: must be"),
    ({"use_parallel_residual": "yes"}, "use_parallel_residual"),
    ({"eos_token_id": 10**30}, "eos_token_id=1000000000000000000000000000000: must be"),
    ({"model_type": 3}, "its code is not run"),
    ({"model_type": "unheard_of"}, "its code is not run"),
    ({"of_text": {"n_layer": 1e9}}, "n_layer=1000000000.0: must be from 1 to 1,024"),
    ({"id2label": {i: "x" * 500 for i in range(2**15)}}, "is larger than 16 MiB"),
]
WRONG_OF_CAT = [
    ({"conv_type": 3}, "conv_type=3"),
    ({"pad_token_id": 300}, "pad_token_id=300: must be below vocab_size=257"),
    ({"conv_window": 21.0}, "conv_window=21.0: must be a"),
    ({"conv_window": 10**9}, "conv_window=1000000000: must be from 1"),
    ({"conv_streams": 5}, "conv_streams=5"),
    ({"attention_temperature": 1e-320}, "attention_temperature=1e-320: must be from 0.001"),
    ({"rope_parameters": {"rope_type": [1]}}, "rope_parameters.rope_type=[1]"),
    ({"hidden_size": 128}, "weights and config.json do not fit: mismatched keys"),
    ({"conv_window": 20}, "weights and config.json do not fit: mismatched keys"),
    ({"conv_type": "none"}, "weights and config.json do not fit: "),
    ({"num_hidden_layers": 3}, "missing keys gpt_neox.layers.2.attention"),
    ({"num_hidden_layers": 1}, "unexpected keys gpt_neox.layers.1"),
]


@pytest.mark.parametrize(
    ("kind", "values", "said"),
    [
        *(("gpt_neox", values, said) for values, said in WRONG),
        *(("cat_neox", values, said) for values, said in WRONG + WRONG_OF_CAT),
    ],
)
def test_wrong_setting_is_one_line(foreign, kind, values, said):
    change_settings(foreign, **{"model_type": kind} | values)
    with pytest.raises(UserError) as refused:
        load_model(foreign)
    line = str(refused.value)
    assert said in line and "config.json" in line and "\n" not in line


@pytest.mark.parametrize("content", ["", "[]", "\x00", "[" * 10_000])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json"])
def test_file_of_another_shape_is_one_line(foreign, monkeypatch, capsys, name, content):
    (foreign / name).write_text(content)
    assert_one_line(monkeypatch, capsys, str(foreign), foreign, "x")


# Settings of generation_config.json.
WRONG_GENERATION = [
    ({"eos_token_id": "x"}, "generation_config.json: eos_token_id"),
    ({"eos_token_id": [1.5]}, "generation_config.json: eos_token_id"),
    ({"num_beams": 10**6}, "num_beams is 1000000: should be less than or equal to 1024"),
    ({"encoder_no_repeat_ngram_size": 10**9}, "encoder_no_repeat_ngram_size is 1000000000"),
    ({"prefill_chunk_size": 0}, "prefill_chunk_size is 0"),
    ({"num_beams": 2, "length_penalty": 1e300}, "cannot generate with its generation_config.json"),
]


@pytest.mark.parametrize(("values", "said"), WRONG_GENERATION, ids=str)
def test_wrong_generation_setting_is_one_line(foreign, monkeypatch, capsys, values, said):
    change_settings(foreign, "generation_config.json", **values)
    assert_one_line(monkeypatch, capsys, said, foreign, "x", "--max-new-tokens", 2)


def test_prompts_and_options_that_cannot_be_meant_are_one_line(monkeypatch, capsys):
    monkeypatch.setattr("cat_lm.pretrained.loading.model_config", None)
    for option, values in {
        "--max-new-tokens": (0, 10**9, 10**30, "x", "1.5", ""),
        "--temperature": ("1e-320", "nan", "inf", -1, 0),
        "--top-p": (0, 1.5, "nan"),
        "--seed": (-(10**19), 10**30, "x"),
        "--num-samples": (0, 10**9),
    }.items():
        for value in values:
            given = ("nowhere", "x", f"{option}={value}")
            assert_one_line(monkeypatch, capsys, f"{option}: ", *given)
    said = "prompt -: is not UTF-8 text (byte 1)"
    assert_one_line(monkeypatch, capsys, said, "nowhere", "-", stdin=b"a\xff\xfe")
    assert_one_line(monkeypatch, capsys, "is not UTF-8 text", "nowhere", "a\udcff")


def test_memory_and_vocabulary_are_looked_at_before(foreign, monkeypatch, capsys):
    change_settings(foreign, "generation_config.json", num_beams=1000)
    with monkeypatch.context() as patch:
        patch.setattr(generate, "free_bytes", lambda device: 2**28)
        said = "do not fit into memory (about "
        assert_one_line(monkeypatch, capsys, said, foreign, "x" * 99)

    def change(tensors):
        for name in ("lm_head.weight", "gpt_neox.embed_in.weight"):
            tensors[name] = tensors[name][:200].clone()

    change_weights(foreign, change)
    change_settings(foreign, vocab_size=200, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    said = "tokenizer has 257 entries, the model 200"
    assert_one_line(monkeypatch, capsys, said, foreign, "x")
