"""Parts of a block that cannot be, as a user asks for them: in a run's file, or at upcycling."""

from __future__ import annotations

import pytest

from cat_lm import upcycle
from cat_lm.config import load_config
from cat_lm.errors import UserError
from tests.runs import run_values, write_config
from tests.unit.calls import call_main
from tests.unit.tiny_models import stock_model


@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"canon": "ABCD"},
            'model.canon="ABCD": must be none or some of A, C and D, each once, as in ACD; B is '
            "conv_type=depthwise with conv_window=4 and conv_init=residual",
        ),
        (
            {"conv_rank": 2, "conv_streams": "v"},
            "model.conv_rank=2: needs conv_type=head and the streams q and k, whose filters make "
            "the kernel, not conv_type=head and conv_streams=v",
        ),
    ],
    ids=["canon", "rank"],
)
def test_a_runs_file_is_refused_in_one_line(family, keys, said, tmp_path):
    values = run_values(tmp_path, tmp_path / "run")
    del values["model"]["hidden_dropout"]  # which Llama has not
    values["model"] |= {"architecture": family} | keys
    path = write_config(tmp_path, values)
    with pytest.raises(UserError) as raised:
        load_config(path)
    assert str(raised.value) == f"{path}: {said}"


def test_a_norm_at_upcycling_is_refused_in_one_line(tmp_path, monkeypatch, capsys):
    stock_model().save_pretrained(tmp_path / "pythia")
    capsys.readouterr()
    given = [tmp_path / "pythia", tmp_path / "out", "--qk-norm", "l2"]
    code, out, err = call_main(upcycle.main, monkeypatch, capsys, "cat_lm.upcycle", *given)
    assert (code, out) == (2, "")
    assert err == (
        "error: --qk-norm l2: normalised queries and keys change the model, so the two cannot "
        "compute the same; train from scratch with model.qk_norm=l2\n"
    )
    assert not (tmp_path / "out").exists()
