"""`train.sequence_parallel`: what it refuses, and the arithmetic of ranks that share sequences."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cat_lm.config import RunConfig, load_config
from cat_lm.core.errors import UserError
from cat_lm.model.sequence import SequenceGroup
from cat_lm.training.distributed import Ranks
from cat_lm.training.preflight import batch_advice
from tests.tiny_models import cat_model, random_ids

ROOT = Path(__file__).resolve().parents[3]
ROWS = ROOT / "configs/pretrain"


def config_of(row: str, parts: int, *overrides: str) -> RunConfig:
    path = ROWS / f"{row}.yaml"
    return load_config(path, [f"train.sequence_parallel={parts}", *overrides])


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


def test_ranks_and_rows():
    config = config_of("cat_rope", 4, "train.global_batch_size=24", "train.micro_batch_size=2")
    assert config.count_rank_groups(16) == 4 and config.accumulation_steps(16) == 3
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
