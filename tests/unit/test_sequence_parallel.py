"""`train.sequence_parallel`: what it refuses, and the arithmetic of ranks that share sequences.

What such ranks compute is tested in tests/distributed/test_sequence.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cat_lm.config import RunConfig, load_config
from cat_lm.core.errors import UserError
from cat_lm.model.sequence import SequenceGroup
from cat_lm.training.distributed import Ranks
from cat_lm.training.estimate import memory_per_rank
from cat_lm.training.preflight import batch_advice
from launch.doctor import costs as plan
from launch.doctor import scale
from launch.doctor.cost_table import table
from launch.doctor.scale import Scale
from tests.launch.test_costs import cluster
from tests.unit.tiny_models import cat_model, random_ids

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "configs/pretrain"


def config_of(row: str, parts: int, *overrides: str) -> RunConfig:
    path = ROWS / f"{row}.yaml"
    return load_config(path, [f"train.sequence_parallel={parts}", *overrides])


# What cannot be divided

GROUPED = "model.num_key_value_heads=4"
MULTI = ("model.attention=multi_token", "data.context_length=512")
MULTI += ("model.attn_implementation=eager",)
LAYER = ("model.attention=landmark", "model.attention_options={share: layer}")
REFUSED = [
    ("cat_rope", 3, (), "must divide data.context_length=2048"),
    ("cat_rope", 32, (), "must divide model.num_attention_heads=16"),
    ("cat_rope", 2, ("train.compile=true", "train.zero_stage=1"), "with train.compile=True"),
    ("tfpp_cat", 8, (GROUPED,), "must divide model.num_key_value_heads=4"),
    ("mh_maps_rope", 2, (), "mixed attention maps cannot be divided by heads"),
    ("pythia", 2, MULTI, "multi-token attention cannot be divided by heads"),
    ("pythia", 2, LAYER, "share=layer chooses blocks by all heads; use share=head"),
    ("gla", 8, (), "must divide model.num_heads=4"),
    ("mamba2", 64, (), "must divide model.num_heads=32"),
    ("mamba", 64, ("model.hidden_size=48",), "must divide model.expand x hidden_size=96"),
    (
        "mh_cat_rope", 4, ("data.context_length=64",),
        "parts of 16 tokens are shorter than the 20 before them that model.conv_window=21 reads",
    ),
    ("canon_abcd", 4, ("data.context_length=8",), "model.canon_window=4 reads"),
    ("mamba", 4, ("data.context_length=8",), "model.conv_kernel=4 reads"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "parts", "overrides", "said"), REFUSED)
def test_what_cannot_be_divided_is_one_line(row, parts, overrides, said):
    with pytest.raises(UserError) as raised:
        config_of(row, parts, *overrides)
    (line,) = [text for text in str(raised.value).splitlines() if said in text]
    assert f"train.sequence_parallel={parts}: " in line


def test_a_family_that_says_nothing_is_refused():
    values = load_config(ROWS / "gla.yaml").model_dump()
    values["model"] = {"architecture": "mixer", "mixer": "gla", "hidden_size": 32}
    values["model"]["num_hidden_layers"] = 1
    section = RunConfig.model_validate(values).model
    assert section.division_problems(2, 64) == [
        "cannot divide the sequences of model.architecture=mixer"
    ]


def test_every_row_that_mixes_no_maps_and_has_even_heads_is_divided():
    for path in ROWS.glob("*.yaml"):
        if path.stem.startswith("mh_maps") or path.stem == "gated_deltanet":  # of three heads
            with pytest.raises(UserError):
                config_of(path.stem, 2)
        elif not path.stem.startswith("base"):
            config_of(path.stem, 2)


def test_padding_caches_and_masks_are_refused():
    model = cat_model(conv_type="head")
    model.set_sequence_group(SequenceGroup(2, 0, None))
    for given in ({"attention_mask": torch.ones(1, 6)}, {"use_cache": True}):
        with pytest.raises(ValueError, match="neither padding nor a cache"):
            model(random_ids(1, 6), **given)


# Ranks, rows, tokens


def test_ranks_and_rows():
    config = config_of("cat_rope", 4, "train.global_batch_size=24", "train.micro_batch_size=2")
    assert config.row_shares(16) == 4 and config.accumulation_steps(16) == 3
    given = config.deepspeed(16)
    product = given["train_micro_batch_size_per_gpu"] * given["gradient_accumulation_steps"] * 16
    assert given["train_batch_size"] == product  # DeepSpeed asserts it
    places = [Ranks(rank, 0, 16, torch.device("cpu")).share(4) for rank in (0, 3, 4, 15)]
    assert places == [(0, 4), (0, 4), (1, 4), (3, 4)]
    with pytest.raises(UserError, match=r"sequence_parallel=4: must divide the number of ranks, 6"):
        config.accumulation_steps(6)
    assert batch_advice(config, 6) == "right would be 4 or 8 ranks"
    with pytest.raises(UserError, match=r"2 x 5 = 10"):
        config.accumulation_steps(20)


def test_a_part_and_its_halo():
    row = torch.arange(1, 13)[None]
    first, second = (SequenceGroup(2, rank, None) for rank in (0, 1))
    assert first.part(row, 3)[0].tolist() == [0, 0, 0, 1, 2, 3, 4, 5, 6]
    assert second.part(row, 3)[0].tolist() == [4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert first.is_real(2, row)[0].tolist() == [False] * 2 + [True] * 10
    assert second.is_real(2, row) is None and first.is_real(0, row) is None
    assert first.whole_like(torch.zeros(2, 3, 4)).shape == (2, 6, 4)


def test_memory_of_activations_is_divided():
    whole, parts = (
        memory_per_rank(config_of("cat_rope", p, "train.precision=bf16"), 10**8, 64, 32_000)
        for p in (1, 4)
    )
    assert parts.states == whole.states
    assert 3 < whole.activations / parts.activations <= 4  # the head's gradient is whole


# Costs and ranks that are not there


def test_costs():
    overrides = ["train.precision=bf16", "train.global_batch_size=64", "train.micro_batch_size=8"]
    run = plan.Run.of(config_of("cat_rope", 4, *overrides), 0)
    found = plan.costs(run, cluster(), 32)
    assert (found.micro_batch_size, found.accumulation_steps) == (8, 1)
    # Of each of its tokens a GPU keeps a quarter of q, k, v and output in bf16, there and back.
    sent = 2 * 24 * (64 * 2048 / 32) * 4 * 1024 * 3 / 4 * 2
    assert plan.sequence_bytes(run, 32) == sent
    plain = plan.communication_bytes(run.config, run.parameters, 32)
    assert found.communication_bytes == plain + sent
    within = plan.LINK_EFFICIENCY * cluster().device.link * 1e9
    seconds = plain / cluster().bandwidth(32) + sent / within
    assert found.communication_seconds == pytest.approx(seconds)
    again = config_of("cat_rope", 4, *overrides, "train.activation_checkpointing=true")
    assert plan.sequence_bytes(plan.Run.of(again, 0), 32) == 1.5 * sent
    lines = " ".join(table(run, cluster(), [found]))
    assert "256 ranks, with a sequence for 4 together (train.sequence_parallel); 32 with" in lines
    for gpus, near in ((6, "4 or 8"), (512, "256")):
        with pytest.raises(UserError, match=rf"groups of 4 .*; {near} GPUs can"):
            plan.with_fitting_micro_batch(run.config, gpus)


@pytest.mark.parametrize(
    ("parts", "gpus", "seconds"),
    [
        (8, 32, 1 / 450),  # within nodes of 8
        (16, 16, 8 / 15 / 25),  # of 15 others 8 are on the other node
        (32, 64, 24 / 31 / 25),
        (6, 24, 4 / 5 / 25),  # 6 | 2 4 | 4 2 | 6: two have four others elsewhere
        (12, 24, 8 / 11 / 25),  # 8 4 | 4 8
        (3, 3, 1 / 450),
    ],
)
def test_what_crosses_nodes_goes_through_a_gpus_own_way_out(parts, gpus, seconds):
    """Of a byte to 450 GB/s within a node and 25 GB/s out of it, 70% of them reached."""
    found = cluster().exchange_seconds(parts, gpus) * plan.LINK_EFFICIENCY * 1e9
    assert found == pytest.approx(seconds)


def test_groups_on_several_nodes_have_costs():
    overrides = [
        "model.hidden_size=768",
        "model.num_attention_heads=12",
        "data.context_length=1536",
    ]
    overrides += ["train.global_batch_size=64", "train.precision=bf16"]
    run = plan.Run.of(config_of("cat_rope", 12, *overrides), 0)
    found = plan.costs(run, cluster(), 24)
    shared = plan.sequence_bytes(run, 24)
    ring = plan.communication_bytes(run.config, run.parameters, 24) / cluster().bandwidth(24)
    waited = shared * 8 / 11 / (plan.LINK_EFFICIENCY * 25e9)
    assert found.communication_seconds == pytest.approx(ring + waited)


def test_ranks_that_are_not_there():
    config = config_of("cat_rope", 4, "train.micro_batch_size=2")
    (_, batch) = scale.batch(config, Scale((64,)))
    assert "16 a group of 4 ranks (512 tokens each), 2 at once, 8 micro-batches" in batch.text
    (_, wrong) = scale.batch(config, Scale((8 * 3 + 2,)))
    assert wrong.broken and "must divide the number of ranks, 26" in wrong.problem
