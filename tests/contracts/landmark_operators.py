"""The operators of landmark attention under contract; their modules are named here alone."""

from cat_lm.ops.landmark import teaching
from cat_lm.ops.landmark.blocks import attend_block_major
from cat_lm.ops.landmark.decode import decode
from cat_lm.ops.landmark.dispatch import attend_blocks, choose_backend
from cat_lm.ops.landmark.gather import attend_gathered
from cat_lm.ops.landmark.keys import block_weights, landmark_keys
from cat_lm.ops.landmark.layout import cached_blocks, sequence_blocks
from cat_lm.ops.landmark.long_keys import long_landmark_keys, next_long_landmarks
from cat_lm.ops.landmark.reference import attend_by_masks
from cat_lm.ops.landmark.segments import attend_segments, why_not
from cat_lm.ops.landmark.select import Choice, choose_blocks, landmark_scores
from cat_lm.ops.landmark.step import attend_one
from cat_lm.ops.landmark.teaching import block_mass

__all__ = [
    "Choice",
    "attend_block_major",
    "attend_blocks",
    "attend_by_masks",
    "attend_gathered",
    "attend_one",
    "attend_segments",
    "block_mass",
    "block_weights",
    "cached_blocks",
    "choose_backend",
    "choose_blocks",
    "decode",
    "landmark_keys",
    "landmark_scores",
    "long_landmark_keys",
    "next_long_landmarks",
    "sequence_blocks",
    "teaching",
    "why_not",
]
