"""Records with a seal, and scores that are no numbers."""

from __future__ import annotations

import json

import pytest
import torch

from cat_lm.core.errors import UserError
from cat_lm.core.files import SEAL, opened, write_sealed
from cat_lm.generate import refuse_nonsense

RECORD = {"loss": 1.5, "lengths": (32, 64), "by_step": {10: 1.0, 9: 2.0}, "none": None}


def test_a_record_is_whole_until_a_value_changes(tmp_path):
    write_sealed(tmp_path / "cell.json", RECORD)
    stored = json.loads((tmp_path / "cell.json").read_text())
    record, whole = opened(stored)
    assert whole is True and SEAL not in record and record == json.loads(json.dumps(RECORD))
    for changed in ({"loss": 1.25}, {"more": 1}, {SEAL: "0" * 64}):
        assert opened(stored | changed)[1] is False
    assert opened(record) == (record, False)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_scores_that_are_no_numbers_are_refused(wrong):
    ids, scores = torch.zeros(1, 2, dtype=torch.long), torch.randn(1, 5)
    assert refuse_nonsense(ids, scores) is scores
    assert refuse_nonsense(ids, scores.index_fill(1, torch.tensor([0]), -torch.inf)) is not None
    for bad in (scores.index_fill(1, torch.tensor([3]), wrong), torch.full((1, 5), -torch.inf)):
        with pytest.raises(UserError, match="scores of the next token are not finite"):
            refuse_nonsense(ids, bad)
