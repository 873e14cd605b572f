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
      step-00000050.aside/         was no whole checkpoint, or not ours: renamed, never deleted

It takes 12 bytes a parameter: 4 of weights, which are stored once, in model/, and 8 of moments.
Saving gathers the weights on the first rank's CPU (4 bytes a parameter: 28 GB for 7B parameters)
and moves each rank's moments through its own CPU.

It is *elastic*: the number of ranks and the ZeRO stage may be others on resuming. With the same
ones the losses are those of a run that was never interrupted, bit for bit where a step gives the
same bits twice: on CPUs, and on GPUs with train.deterministic as far as NCCL's order of sums is the
same. Otherwise weights, moments and steps are restored bit for bit too, and the samples are the
same; but sums over ranks are rounded in another order. With another number of ranks the generators
are seeded anew, by `seed_of`, so that dropout draws other masks.

A checkpoint is written beside its final name, flushed, hashed, compared with memory, marked and
then renamed, so that a process killed at any moment leaves the previous ones as they were. Whatever
goes on from one compares all its files with the marker first. Finding one needs neither torch nor
DeepSpeed.
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
