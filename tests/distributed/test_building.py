"""Only the first rank makes weights; all train with them, in every ZeRO stage."""

from __future__ import annotations

import pytest
import torch

from cat_lm.config import RunConfig
from cat_lm.training.building import build_model, give_memory
from cat_lm.training.checkpoint.optimizer_state import full_precision_weights
from cat_lm.training.engine import Engine
from tests.distributed.ranks import run_on_ranks
from tests.distributed.test_engine import MODEL, VOCAB, global_batch, make_config, rows_of

LLAMA = MODEL | {"architecture": "llama", "num_key_value_heads": 2, "attention_bias": True}
MODELS = {"tied": MODEL | {"tie_word_embeddings": True}, "llama": LLAMA}


def config_of(name: str, stage: int = 1, precision: str = "fp32") -> RunConfig:
    return make_config(stage, 2, precision, MODELS[name])


@pytest.mark.parametrize("name", MODELS)
def test_model_without_weights_has_all_else(name):
    whole, empty = (build_model(config_of(name), VOCAB, weights=w) for w in (True, False))
    assert all(p.is_meta for p in empty.parameters())
    assert not torch.nn.Linear(2, 2).weight.is_meta
    give_memory(empty, torch.device("cpu"))
    shapes = [{key: p.shape for key, p in m.named_parameters()} for m in (whole, empty)]
    assert shapes[0] == shapes[1], "what was tied is tied"
    assert all(p.device.type == "cpu" and p.requires_grad for p in empty.parameters())
    # Weights and buffers can be copied into it, and then it computes the same.
    empty.load_state_dict(whole.state_dict())
    for buffer, other in zip(empty.buffers(), whole.buffers(), strict=True):
        buffer.copy_(other)
    ids = torch.arange(12)[None]
    assert whole.eval()(ids).logits.equal(empty.eval()(ids).logits)


def two_steps(ranks, cases: list[tuple]) -> list[tuple]:
    """Losses and weights where all ranks make the weights, and where only the first does."""
    found = []
    for case in cases:
        outcomes = []
        for weights in (True, ranks.is_first):
            config = config_of(*case)
            engine = Engine(build_model(config, VOCAB, weights=weights), config, ranks)
            steps = [engine.train_step(rows_of(global_batch(s), ranks), 1e-3) for s in range(2)]
            kept = {name: w.numpy() for name, w in full_precision_weights(engine).items()}
            outcomes.append(([(s.loss, s.grad_norm) for s in steps], kept))
        found.append(outcomes)
    return found


def test_two_ranks_train_as_if_both_had_made_the_weights():
    cases = [("tied", 0, "fp32"), ("llama", 1, "bf16"), ("tied", 3, "fp32")]
    (first, second) = run_on_ranks(two_steps, 2, cases)
    for case, here, there in zip(cases, first, second, strict=True):
        (steps, weights), (other_steps, other_weights) = here
        assert steps == other_steps == there[0][0] == there[1][0], case
        assert weights and weights.keys() == other_weights.keys()
        assert all((weights[name] == other_weights[name]).all() for name in weights), case
