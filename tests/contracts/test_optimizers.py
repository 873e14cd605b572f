"""Every optimizer of this project keeps its state as it says, and skips and resumes exactly."""

from __future__ import annotations

import runpy

import pytest

from cat_lm import optimizers
from cat_lm.testing import check_entry
from tests.conftest import REPOSITORY

OPTIONS = {"muon": ({}, {"momentum": 0.5, "muon_lr": 0.02, "ns_steps": 3, "scale": "original"})}


@pytest.mark.parametrize("name", optimizers.OPTIMIZERS.own_names())
def test_check_entry_accepts_our_optimizers(name):
    for options in OPTIONS.get(name, ({},)):
        check_entry(optimizers.get(name), options)


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("where(skips, 0.0, ", "mul(1.0, ", "found_inf=1 changes weight of"),
        ("torch.where(skips, momentum, new)", "new", "found_inf=1 changes momentum of"),
        # The product of 0 and a gradient that is not finite is not 0.
        ("torch.where(skips, momentum, new)", "new * ~skips + momentum * skips", "momentum of"),
        ("+= ~skips", "+= 1", "found_inf=1 changes step of"),
        ('state["step"] =', 'state["steps"] = state["step"] =', "must hold .'momentum', 'step'."),
    ],
)
def test_check_entry_names_a_wrong_optimizer(monkeypatch, tmp_path, right, wrong, said):
    monkeypatch.setattr(optimizers.OPTIMIZERS, "_entries", dict(optimizers.OPTIMIZERS._entries))
    code = (REPOSITORY / "tests/own_ideas/optimizer.py").read_text(encoding="utf-8")
    assert right in code
    (tmp_path / "lion.py").write_text(code.replace(right, wrong), encoding="utf-8")
    runpy.run_path(str(tmp_path / "lion.py"))
    with pytest.raises(AssertionError, match=f"optimizer 'lion': .*{said}"):
        check_entry(optimizers.get("lion"))
