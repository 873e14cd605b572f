"""Checkpoints that are either complete or ignored.

    checkpoints/
      latest                       name of the newest complete one, for people and other tools
      step-00000100/
        complete.json              marker: every file with its size and checksum; written last
        state.json                 step, tokens, data fingerprint, world size, code version
        run_config.yaml            the resolved configuration
        model/                     config.json, model.safetensors: fp32 master weights
        tokenizer/
        state/                     rank-00000.safetensors …: AdamW's moments (see optimizer_state)
        random-00000.pt            generator states of each rank
      step-00000050.aside/         an incomplete or unknown folder: renamed, never deleted

A checkpoint takes 12 bytes per parameter: 4 for the weights, which are stored once, in model/, and
8 for the moments. Saving gathers the weights on the CPU of rank 0 (4 bytes per parameter: 28 GB for
7B parameters) and moves each rank's moments through its own CPU.

Checkpoints are *elastic*: the number of ranks and the ZeRO stage may change on resuming. If they do
not, the losses match those of an uninterrupted run bit for bit, provided that steps are
reproducible: on CPUs, and on GPUs with train.deterministic if NCCL sums in the same order. If they
change, weights, moments and steps are restored bit for bit, and the samples are the same, but sums
over ranks are rounded in another order. With another number of ranks the random generators are
seeded by `seed_of`, so that dropout masks differ.

A checkpoint is written under a temporary name, flushed, hashed, compared with memory, given its
completion marker and then renamed. A process that is killed at any moment leaves the previous
checkpoints unchanged. Resuming first compares all files with the marker. Finding a checkpoint needs
neither torch nor DeepSpeed.
"""

from cat_lm.training.checkpoint.files import (
    MARKER,
    complete_checkpoints,
    find_checkpoint,
    is_complete,
    read_run_config,
    read_run_state,
    step_folders,
    step_of,
)

__all__ = [
    "MARKER",
    "complete_checkpoints",
    "find_checkpoint",
    "is_complete",
    "read_run_config",
    "read_run_state",
    "step_folders",
    "step_of",
]
