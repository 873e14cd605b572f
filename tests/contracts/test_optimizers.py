"""Every optimizer of this project keeps its state as it says, and skips and resumes exactly."""

from __future__ import annotations

import pytest
import torch

from cat_lm import optimizers
from cat_lm.optimizers import OptimizerKind
from cat_lm.testing import check_entry

OPTIONS = {"muon": ({}, {"momentum": 0.5, "muon_lr": 0.02, "ns_steps": 3, "scale": "original"})}


@pytest.mark.parametrize("name", optimizers.OPTIMIZERS.own_names())
def test_check_entry_accepts_our_optimizers(name):
    for options in OPTIONS.get(name, ({},)):
        check_entry(optimizers.get(name), options)


class SignMomentum(OptimizerKind):
    """The sign of a momentum, as a plugin would write it; `wrong` makes one of its mistakes."""

    name = "sign_momentum"

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong

    def state_kinds(self, model):
        return {name: ("momentum",) for name, _ in model.named_parameters()}

    def build(self, groups, section, options):
        wrong = self.wrong

        class Stepper(torch.optim.Optimizer):
            @torch.no_grad()
            def step(self):
                goes = 1 - self.found_inf if wrong != "skip" else 1
                for group in self.param_groups:
                    for weight in group["params"]:
                        state = self.state[weight]
                        if not state:
                            state["momentum"] = torch.zeros_like(weight, requires_grad=False)
                            state["step"] = torch.zeros(())
                            if wrong == "state":
                                state["more"] = torch.zeros(())
                        state["step"] += goes
                        state["momentum"].lerp_(weight.grad, 0.1 * goes)
                        weight -= group["lr"] * goes * state["momentum"].sign()

        return Stepper(groups, {"lr": section.lr})


def test_check_entry_accepts_a_plugins_optimizer():
    check_entry(SignMomentum())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [("skip", "found_inf=1 changes"), ("state", r"must hold \['momentum', 'step'\]")],
)
def test_check_entry_names_a_wrong_optimizer(wrong, said):
    with pytest.raises(AssertionError, match=f"optimizer 'sign_momentum': .*{said}"):
        check_entry(SignMomentum(wrong))
