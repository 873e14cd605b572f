"""Parts of a block that cannot be, as a user asks for them in a run's file."""

from __future__ import annotations

import pytest

from cat_lm.config import load_config
from cat_lm.core.errors import UserError
from tests.runs import run_values, write_config


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
            "model.conv_rank=2: needs conv_type=head, filters of taps and the streams q and k, "
            "whose filters make the kernel, not conv_type=head, conv_filter=taps and "
            "conv_streams=v",
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
