"""The operators of landmark attention under contract; their modules are named here alone."""

# ruff: noqa: F401

from cat_lm.ops.landmark import teaching
from cat_lm.ops.landmark.attend import (
    attend_blocks,
    attend_by_masks,
    attend_gathered,
    choose_backend,
)
from cat_lm.ops.landmark.decode import decode
from cat_lm.ops.landmark.keys import block_weights, landmark_keys, next_landmarks
from cat_lm.ops.landmark.layout import cached_blocks, sequence_blocks
from cat_lm.ops.landmark.segments import why_not
from cat_lm.ops.landmark.select import Choice, choose_blocks, landmark_scores
from cat_lm.ops.landmark.teaching import block_mass
from cat_lm.ops.runtime.triton_launch import INSTALLED

if INSTALLED:
    from cat_lm.ops.landmark.segments_triton import attend_segments
