"""Estimate the costs of a run on a number of GPUs, for `--ranks`.

README.md has the equations and the assumptions, with tables that these functions computed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cat_lm.config import RunConfig
from cat_lm.core.errors import UserError
from cat_lm.core.host import GIB
from cat_lm.training.devices import ASSUMED_INTERCONNECT, Device

if TYPE_CHECKING:
    from cat_lm.training.estimate import Memory

# The assumed fraction of a GPU's peak that a training step reaches. Published runs of dense models
# of 1 to 70 billion parameters on A100 and H100 report 0.35 to 0.55 of the model's FLOPs; small
# models and micro-batches reach less. It was not measured here: `eval.speed train` measures it, for
# `--mfu`.
ASSUMED_MFU = 0.40
# The assumed seconds in which one core launches the kernels of a layer for a micro-batch, forward
# and backward; no step is shorter. It is 38 microseconds for each of the 39 kernels that the tests
# count in a layer with a convolution per head, two fifths of the measured time on a CPU, where the
# same core also computes. README.md has that measurement.
HOST_SECONDS_A_LAYER = 1.5e-3
# The assumed fraction of a link that large collectives reach; NCCL's tests show 0.7 to 0.9.
LINK_EFFICIENCY = 0.7
# The assumed bandwidth of all nodes together to the file system of the run's folder, in GB/s.
STORAGE = 2.0
# The fraction of the communication that can overlap with computing, by ZeRO stage (DeepSpeed's
# overlap_comm): gradients are reduced, and in ZeRO-3 weights gathered, while other layers compute.
OVERLAP = {0: 0.0, 1: 0.0, 2: 0.5, 3: 0.5}


@dataclass(frozen=True)
class Cluster:
    """The properties of a cluster on which the costs depend.

    Attributes:
        device: the type of GPU; None if no costs are computed.
        gpus_per_node: number of GPUs per node.
        mfu: the fraction of its peak FLOP/s that a GPU reaches.
        interconnect: GB/s from a GPU to other nodes.
    """

    device: Device | None = None
    gpus_per_node: int = 8
    mfu: float = ASSUMED_MFU
    interconnect: float = ASSUMED_INTERCONNECT

    def flops(self, config: RunConfig) -> float:
        """Return the model FLOP/s that a GPU achieves in training.

        Raises:
            UserError: the device's peak in the run's precision is unknown.
        """
        peak = config.train.peak_tflops
        if peak is None and config.train.precision == "fp32":
            raise UserError(
                "train.precision=fp32: only peaks in bf16 are known; give train.peak_tflops=X, of "
                f"one {self.device.name} in fp32"
            )
        return self.mfu * (peak or self.device.tflops) * 1e12

    def nodes(self, gpus: int) -> int:
        """Return the number of nodes. Raises `UserError` if the GPUs do not fill whole nodes."""
        if gpus > self.gpus_per_node and gpus % self.gpus_per_node:
            raise UserError(
                f"--ranks {gpus}: is not a multiple of --gpus-per-node {self.gpus_per_node}"
            )
        return max(1, gpus // self.gpus_per_node)

    def bandwidth(self, gpus: int) -> float:
        """Return the bytes per second that each GPU sends in a ring over all of them.

        A ring enters and leaves a node once, and there are as many simultaneous rings as a node has
        network ports, one per GPU. The limit is therefore the sum of a node's ports, or a GPU's
        link.
        """
        link = self.device.link
        if self.nodes(gpus) > 1:
            link = min(link, self.interconnect * self.gpus_per_node)
        return LINK_EFFICIENCY * link * 1e9

    def exchange_seconds(self, parts: int, gpus: int) -> float:
        """Return the seconds per byte that a GPU sends in all-to-alls among `parts` neighbours.

        A GPU sends the same amount to each of the others, to those on its node by its link and to
        other nodes by its network port, simultaneously. The slowest GPU determines the time.
        """
        if parts == 1:
            return 0.0
        link, out = self.device.link, min(self.device.link, self.interconnect)
        together = set()  # all numbers of a group's GPUs that are on one node
        for start in range(0, gpus, parts):
            nodes = Counter(gpu // self.gpus_per_node for gpu in range(start, start + parts))
            together |= set(nodes.values())
        busiest = max(max((n - 1) / link, (parts - n) / out) for n in together)
        return busiest / (parts - 1) / (LINK_EFFICIENCY * 1e9)


@dataclass(frozen=True)
class Run:
    """A configuration and its model's counts, which do not depend on the number of GPUs."""

    config: RunConfig
    vocab_size: int
    parameters: int
    flops_per_token: float

    @classmethod
    def of(cls, config: RunConfig, vocab_size: int) -> Run:
        from cat_lm.training.building import model_config
        from cat_lm.training.estimate import flops_per_token, num_parameters

        parameters = num_parameters(config, vocab_size)
        work = flops_per_token(config, vocab_size)
        return cls(config, model_config(config, vocab_size).vocab_size, parameters, work)


@dataclass(frozen=True)
class Costs:
    """The costs of a run on `gpus` GPUs; times in seconds, sizes in bytes.

    The GPU's computing and the host's launching in a step overlap.
    """

    gpus: int
    micro_batch_size: int
    accumulation_steps: int
    compute_seconds: float
    host_seconds: float
    communication_bytes: float
    communication_seconds: float
    exposed_seconds: float
    step_seconds: float
    tokens_per_second: float
    checkpoint_seconds: float
    checkpoints: int
    validation_seconds: float
    total_seconds: float
    memory: Memory

    @property
    def is_host_bound(self) -> bool:
        """Return True if launching takes longer than computing."""
        return self.host_seconds > self.compute_seconds

    @property
    def days(self) -> float:
        return self.total_seconds / 86_400

    @property
    def gpu_hours(self) -> float:
        return self.gpus * self.total_seconds / 3600


def compute_costs(run: Run, cluster: Cluster, gpus: int) -> Costs:
    """Compute the costs of `run` on `gpus` GPUs.

    Raises:
        UserError: the GPUs cannot divide the global batch, or do not fill whole nodes.
    """
    from cat_lm.training.estimate import checkpoint_bytes, count_saves, memory_per_rank

    config = with_fitting_micro_batch(run, gpus, cluster.device)
    train, passes = config.train, config.accumulation_steps(gpus)
    # Activation checkpointing repeats the forward pass, a third of the FLOPs.
    again = 4 / 3 if train.activation_checkpointing else 1.0
    speed = gpus * cluster.flops(config)
    compute = again * run.flops_per_token * config.tokens_per_step / speed
    # Compiled graphs launch fewer kernels, whose number is unknown.
    layers = 0 if train.compile else config.model.num_hidden_layers
    host = passes * again * layers * HOST_SECONDS_A_LAYER
    busy = max(compute, host)
    volume = communication_bytes(config, run.parameters, gpus)
    communication = volume / cluster.bandwidth(gpus)
    exposed = communication - min(OVERLAP[train.zero_stage] * communication, busy)
    shared = sequence_bytes(run, gpus)
    # This communication does not overlap, because a layer waits for its inputs.
    waited = shared * cluster.exchange_seconds(train.sequence_parallel, gpus)
    step = busy + exposed + waited
    saving = checkpoint_bytes(config, run.parameters) / (STORAGE * 1e9)
    # Forward passes over `validation.max_tokens`; 0 for the whole split, whose size is unknown.
    tokens = config.total_steps // config.validation.every_steps
    tokens *= config.validation.max_tokens or 0
    validation = tokens * run.flops_per_token / 3 / speed
    return Costs(
        gpus=gpus,
        micro_batch_size=train.micro_batch_size,
        accumulation_steps=passes,
        compute_seconds=compute,
        host_seconds=host,
        communication_bytes=volume + shared,
        communication_seconds=communication + waited,
        exposed_seconds=exposed + waited,
        step_seconds=step,
        tokens_per_second=config.tokens_per_step / step,
        checkpoint_seconds=saving,
        checkpoints=count_saves(config),
        validation_seconds=validation,
        total_seconds=config.total_steps * step + count_saves(config) * saving + validation,
        memory=memory_per_rank(config, run.parameters, gpus, run.vocab_size),
    )


def with_fitting_micro_batch(run: Run, gpus: int, device: Device) -> RunConfig:
    """Return the configuration with the largest micro-batch size that divides a GPU's sequences.

    It is at most the configured size or, with `auto`, what fits in the device's memory.

    Raises:
        UserError: the GPUs cannot divide the global batch.
    """
    from cat_lm.training.estimate import fitting_micro_batch, micro_batch_sizes

    config = run.config
    batch, parts = config.train.global_batch_size, config.train.sequence_parallel
    sizes = micro_batch_sizes(config, gpus)
    if not sizes:
        fits = [n * parts for n in range(1, batch + 1) if batch % n == 0]
        near = [*[n for n in fits if n < gpus][-1:], *[n for n in fits if n > gpus][:1]]
        groups = f" in groups of {parts} (train.sequence_parallel)" if parts > 1 else ""
        raise UserError(
            f"--ranks {gpus}: train.global_batch_size={batch} sequences cannot be shared by "
            f"{gpus} GPUs{groups}; {' or '.join(map(str, near))} GPUs can, or change the batch"
        )
    if config.train.micro_batch_size == "auto":
        given = run.parameters, gpus, run.vocab_size, device.memory * GIB
        return config.with_micro_batch(fitting_micro_batch(config, *given))
    fits = [size for size in sizes if size <= config.train.micro_batch_size]
    return config.with_micro_batch(fits[-1])


def communication_bytes(config: RunConfig, parameters: int, gpus: int) -> float:
    """Return the bytes that each GPU sends in a step for gradients and weights.

    A ring all-reduce of P numbers sends 2 (n − 1) / n P numbers, and a reduce-scatter or all-gather
    half of that. Gradients are sent in `train.gradient_communication`. ZeRO-0 all-reduces them once
    per step. So does ZeRO-1 (DeepSpeed combines the ranks' buckets in one all-reduce), which also
    gathers the weights. ZeRO-2 reduces after every micro-batch. ZeRO-3 gathers the weights twice in
    every micro-batch and reduce-scatters the gradients.
    """
    stage, passes = config.train.zero_stage, config.accumulation_steps(gpus)
    weights = parameters * (2 if config.train.precision == "bf16" else 4)
    gradients = parameters * (2 if config.train.gradient_communication == "bf16" else 4)
    sent = {
        0: 2 * gradients,
        1: 2 * gradients + weights,
        2: passes * 2 * gradients + weights,
        3: passes * (gradients + 2 * weights),
    }[stage]
    return sent * (gpus - 1) / gpus


def sequence_bytes(run: Run, gpus: int) -> float:
    """Return the bytes that each GPU sends in a step for sequence parallelism.

    They are the exchanges of all layers, forward and backward, and again for recomputed
    activations.
    """
    from cat_lm.training.estimate import saved_bytes

    train, config = run.config.train, run.config
    if train.sequence_parallel == 1:
        return 0.0
    times = 3 if train.activation_checkpointing else 2
    passes = config.tokens_per_step / gpus * train.sequence_parallel
    passes /= train.micro_batch_size * config.data.context_length
    return times * passes * saved_bytes(config, run.vocab_size, on_gpu=True).sent
