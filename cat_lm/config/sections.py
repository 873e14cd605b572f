"""The sections of a run's YAML: every key with its type, range and meaning.

The keys of `model:` are its architecture's (`cat_lm.architectures`). The ranges are those of
`cat_lm.core.numbers`. This module imports neither torch nor transformers.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from cat_lm import optimizers
from cat_lm.core import numbers
from cat_lm.core.fields import (
    Name,
    OptionalName,
    OptionalOutput,
    OptionalPath,
    OutputPath,
    PathText,
    Section,
    Word,
    entry_of,
    number,
    whole,
    whole_or,
)

Steps = Annotated[int, whole(numbers.STEPS)]
PositiveSteps = Annotated[int, whole(numbers.STEPS.at_least(1))]
Tokens = Annotated[int, whole(numbers.TOKENS)]
PositiveTokens = Annotated[int, whole(numbers.TOKENS.at_least(1))]
Batch = Annotated[int, whole(numbers.BATCH)]
BatchOrAuto = Annotated[int | Literal["auto"], whole_or("auto", numbers.BATCH)]
Share = Annotated[float, number(numbers.SHARE)]
LearningRate = Annotated[float, number(numbers.LEARNING_RATE)]


class DataSection(Section):
    path: OptionalPath = Field(
        None, description="folder written by data_prep.prepare, or its address (s3://, hf://, …)"
    )
    mixture: dict[PathText, Share] | None = Field(
        None, min_length=1, description="instead of path: {folder: share of the sequences, …}"
    )
    context_length: Annotated[int, whole(numbers.CONTEXT)] = Field(
        description="tokens per sequence"
    )
    packing: Literal["stream", "best_fit"] = Field(
        "stream", description="best_fit: windows of whole documents, few of which are cut"
    )
    cache_dir: OptionalOutput = Field(
        None, description="local copies of remote data; default: ~/.cache/cat_lm/data"
    )
    mask_documents: bool = Field(
        False, description="attention and convolution stop at document starts, positions restart"
    )

    @property
    def folders(self) -> list[str]:
        """Return the prepared folders (or their addresses) that the run reads."""
        return list(self.mixture or {}) if self.path is None else [self.path]


class OptimizerSection(Section):
    """Weight decay acts on matrices and embeddings, not on biases, norms and filters."""

    name: Annotated[str, entry_of(optimizers.OPTIMIZERS)] = Field(
        "adamw", description="adamw, muon (matrices of layers; adamw for the rest), or a plugin's"
    )
    lr: Annotated[float, number(numbers.LEARNING_RATE, above=0)] = Field(
        description="peak learning rate"
    )
    initial_lr: LearningRate = Field(0.0, description="learning rate at the start of the warm-up")
    min_lr: LearningRate = Field(0.0, description="learning rate at the end of the decay")
    schedule: Literal["cosine", "constant", "wsd"] = Field(
        "cosine", description="learning rate after the warm-up; wsd: constant, then a final decay"
    )
    warmup_tokens: Tokens | None = Field(
        None, description="length of the linear warm-up; or warmup_steps"
    )
    warmup_steps: Steps | None = Field(None, description="instead of warmup_tokens")
    decay_tokens: PositiveTokens | None = Field(
        None, description="wsd: length of the final decay; or decay_steps"
    )
    decay_steps: PositiveSteps | None = Field(None, description="instead of decay_tokens")
    betas: tuple[
        Annotated[float, number(numbers.FRACTION, below=1)],
        Annotated[float, number(numbers.FRACTION, below=1)],
    ] = Field((0.9, 0.95), description="decay rates of the two moments")
    eps: Annotated[float, number(numbers.OPTIMIZER_EPSILON)] = Field(
        1e-8, description="added to the root of the second moment"
    )
    weight_decay: Annotated[float, number(numbers.WEIGHT_DECAY)] = Field(
        0.01, description="weight decay of matrices and embeddings"
    )
    grad_clip: Annotated[float, number(numbers.GRADIENT_NORM)] = Field(
        1.0, description="global gradient norm; 0 means no clipping"
    )
    momentum: Annotated[float, number(numbers.FRACTION, below=1)] | None = Field(
        None, description="muon: decay rate of the momentum; default: 0.95"
    )
    muon_lr: Annotated[float, number(numbers.LEARNING_RATE, above=0)] | None = Field(
        None, description="muon: peak learning rate of the matrices; default: lr"
    )
    ns_steps: Annotated[int, whole(numbers.NEWTON_SCHULZ_STEPS)] | None = Field(
        None, description="muon: steps of Newton-Schulz; default: 5"
    )
    scale: Literal["match_rms_adamw", "original"] | None = Field(
        None, description="muon: original: sqrt(max(1, rows/columns)); default: match_rms_adamw"
    )
    options: dict[str, Any] = Field(
        {}, description="options of a plugin's optimizer: {option: value, …}"
    )
    lr_groups: dict[Name, Annotated[float, number(numbers.RATE_FACTOR)]] = Field(
        {}, description="factors of learning rates: {'*filter*': 0.5, …}; first match counts"
    )


class TrainSection(Section):
    output_dir: OutputPath = Field(description="the run's folder: checkpoints, logs, metrics")
    global_batch_size: Batch = Field(description="sequences per step, over all ranks")
    micro_batch_size: BatchOrAuto = Field(
        description="sequences that a rank computes at once; auto: as many as fit in its memory"
    )
    max_tokens: PositiveTokens | None = Field(
        None, description="length of the run; this or max_steps is needed"
    )
    max_steps: PositiveSteps | None = Field(None, description="instead of max_tokens")
    seed: Annotated[int, whole(numbers.SEED)] = Field(
        0, description="seed of initial weights, order of the data and dropout"
    )
    precision: Literal["auto", "bf16", "fp32"] = Field(
        "auto", description="auto: bf16 where the device computes it natively, otherwise fp32"
    )
    zero_stage: Literal[0, 1, 2, 3] = Field(
        1, description="sharded among ranks: 0 nothing, 1 moments, 2 also gradients, 3 also weights"
    )
    gradient_communication: Literal["fp32", "bf16"] = Field(
        "fp32", description="dtype in which ranks sum gradients; bf16: half the bytes, rounded"
    )
    sequence_parallel: Annotated[int, whole(numbers.RANKS)] = Field(
        1, description="number of neighbouring ranks that share the tokens of every sequence"
    )
    activation_checkpointing: bool = Field(
        False, description="compute layers again in the backward pass: less memory, more time"
    )
    compile: bool = Field(False, description="compile the model with torch.compile")
    deterministic: bool = Field(
        False, description="bit-identical results on a GPU, where attention is then slower"
    )
    conv_backend: Literal["auto", "reference", "cpu", "triton"] = Field(
        "auto", description="backend of convolutions; one that cannot run here is an error"
    )
    mixer_backend: Literal["auto", "torch", "cpu", "triton", "fla"] = Field(
        "auto", description="backend of recurrences; one that cannot run here is an error"
    )
    landmark_loss: Literal["hard", "dense", "guided", "calibrate"] = Field(
        "hard",
        description="attention=landmark: train on selected blocks, or on all keys with a loss",
    )
    landmark_weight: Annotated[float, number(numbers.AUXILIARY_WEIGHT)] | None = Field(
        None,
        description="guided: weight of the landmarks' loss, added to the tokens'; default: 0.3",
    )
    landmark_rows: PositiveSteps | None = Field(
        None, description="queries per sequence that landmarks are trained on; default: 64"
    )
    init_from: OptionalPath = Field(
        None, description="model folder with the initial weights of a new run; default: random"
    )
    init_checksums: bool = Field(
        True,
        description="compare the files of init_from with its checksums; slow if they are large",
    )
    resume: PathText = Field(
        "never", description="checkpoint to resume: never, auto (newest complete one), or a path"
    )
    reset_optimizer: bool = Field(
        False, description="resume with an empty optimizer state; allows another optimizer.name"
    )
    log_every_steps: PositiveSteps = Field(
        10, description="steps between lines of the log; metrics.jsonl has every step"
    )
    max_skipped_steps: PositiveSteps = Field(
        20, description="non-finite steps in a row that end the run"
    )
    hang_minutes: Annotated[float, number(numbers.MINUTES)] = Field(
        30.0, description="minutes without progress after which a rank ends the run, exit code 76"
    )
    peak_tflops: Annotated[float, number(numbers.TFLOPS)] | None = Field(
        None, description="peak TFLOP/s of one device, for MFU; default: by the device's name"
    )
    ema_decay: Annotated[float, number(numbers.FRACTION, above=0, below=1)] | None = Field(
        None, description="keep an exponential moving average of the weights with this decay"
    )
    profile_steps: tuple[PositiveSteps, PositiveSteps] | None = Field(
        None, description="[first, last] step to trace, into OUTPUT_DIR/profile"
    )
    callbacks: dict[str, dict[str, Any]] = Field(
        {}, description="plugins' callbacks: {name: {option: value, …}, …}"
    )


class ValidationSection(Section):
    every_steps: PositiveSteps = Field(500, description="steps between validations")
    max_tokens: PositiveTokens | None = Field(
        None, description="tokens of the validation split that are scored; default: all"
    )
    sets: dict[Word, PathText] = Field(
        {}, description="more prepared folders to score: {name: folder, …}"
    )
    tasks: tuple[Name, ...] = Field(
        (), description="tasks of lm-evaluation-harness, as eval.zero_shot --tasks: [piqa, …]"
    )
    tasks_every_steps: PositiveSteps | None = Field(
        None, description="steps between evaluations of tasks; default: every_steps"
    )
    tasks_dir: OptionalPath = Field(
        None, description="task data, as eval.zero_shot --prefetch writes; default: from the Hub"
    )
    tasks_include: OptionalPath = Field(
        None, description="folder of custom tasks, as eval.zero_shot --include-path"
    )
    tasks_rows: Annotated[int, whole(numbers.ROWS)] | None = Field(
        None, description="number of examples of every task, from the first; default: all"
    )


class CheckpointSection(Section):
    every_steps: PositiveSteps = Field(1000, description="steps between checkpoints")
    keep_last: PositiveSteps = Field(
        2, description="number of checkpoints to keep; older ones are deleted"
    )
    keep_every_steps: PositiveSteps | None = Field(
        None, description="never delete checkpoints of multiples of this step"
    )


class LoggingSection(Section):
    tensorboard: bool = Field(
        True, description="write TensorBoard curves to OUTPUT_DIR/tensorboard"
    )
    wandb_project: OptionalName = Field(
        None, description="log to this W&B project; needs the wandb extra"
    )
    wandb_entity: OptionalName = Field(None, description="W&B user or team; default: the account's")
    wandb_group: OptionalName = Field(None, description="W&B group of runs")
    wandb_tags: tuple[Name, ...] = Field((), description="W&B labels of the run: [a, b, …]")
    wandb_name: OptionalName = Field(
        None, description="W&B name of the run; default: the name of train.output_dir"
    )
