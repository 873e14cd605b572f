"""Models of a table of positions are not read beyond it: one line, not a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from cat_lm.core.errors import UserError
from cat_lm.pretrained.loading import load_tokenizer, refuse_beyond_positions
from tests.calls import call_main
from tests.zero_shot_rows import write_rows

LONGEST = 64
_SIZES = {"vocab_size": 257, "eos_token_id": 256, "bos_token_id": 256, "pad_token_id": 256}
_GPT = {"n_positions": LONGEST, "n_embd": 32, "n_layer": 1, "n_head": 2}
_OTHERS = {
    "max_position_embeddings": LONGEST,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
TABLES = {
    "gpt2": _GPT,
    "gptj": _GPT | {"rotary_dim": 8},
    "opt": _OTHERS | {"ffn_dim": 64, "word_embed_proj_dim": 32},
}
COMPUTED = {
    "mistral": _OTHERS | {"num_key_value_heads": 1, "intermediate_size": 64},
    "phi": _OTHERS | {"intermediate_size": 64},
    "mpt": {"d_model": 32, "n_heads": 2, "n_layers": 1},
}


def model_of(kind: str):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**_SIZES, **(TABLES | COMPUTED)[kind])
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("kind", [*TABLES, *COMPUTED])
def test_what_is_refused_is_what_the_model_cannot_read(kind):
    model = model_of(kind)
    for length in (LONGEST, LONGEST + 1):
        tokens = torch.zeros(1, length, dtype=torch.long)
        if kind in COMPUTED or length <= LONGEST:
            model(tokens)
            refuse_beyond_positions(model.config, length, "text")
            continue
        with pytest.raises((IndexError, RuntimeError)):
            model(tokens)
        with pytest.raises(UserError, match=f"^text: model type {kind} has positions for 64 "):
            refuse_beyond_positions(model.config, length, "text")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_corpus) -> Path:
    folder = tmp_path_factory.mktemp("models") / "gpt2"
    model_of("gpt2").save_pretrained(folder)
    load_tokenizer(tiny_corpus / "tokenizer").save_pretrained(folder)
    return folder


def test_every_command_refuses_in_one_line(folder, tmp_path, monkeypatch, capsys):
    from cat_lm import generate
    from eval.length_sweep import __main__ as length_sweep
    from eval.zero_shot import __main__ as zero_shot

    rows = write_rows(tmp_path / "rows")
    text = tmp_path / "text.txt"
    text.write_text("A dog saw a cat. " * 40, encoding="utf-8")
    for name in ("TQDM_DISABLE", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "")
    out = ("--out", tmp_path / "out")
    for module, arguments, message in (
        (generate, ("a cat", "--max-new-tokens", 61), "--max-new-tokens 61: model"),
        (length_sweep, ("--text", text, "--lengths", "32,65", *out), "--lengths 65: model gpt2: "),
        (
            zero_shot,
            ("--tasks", "piqa", "--data-dir", rows, "--max-length", 65, *out),
            "--max-length 65: model type gpt2 has positions for 64 tokens and none beyond",
        ),
    ):
        code, _, err = call_main(module.main, monkeypatch, capsys, "command", folder, *arguments)
        assert (code, err.count("\n")) == (2, 1) and message in err, err
    code, _, err = call_main(
        generate.main, monkeypatch, capsys, "command", folder, "a cat", "--max-new-tokens", 60
    )
    assert code == 0, err
