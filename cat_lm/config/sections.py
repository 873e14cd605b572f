"""The sections of a run's YAML: every key with its kind, its range and what it means.

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
        description="tokens of a sequence"
    )
    packing: Literal["stream", "best_fit"] = Field(
        "stream", description="best_fit: whole documents a window, few of them cut"
    )
    cache_dir: OptionalOutput = Field(
        None, description="local copies of remote data; default: ~/.cache/cat_lm/data"
    )
    mask_documents: bool = Field(
        False, description="attention and convolution stop at document starts, positions restart"
    )

    @property
    def folders(self) -> list[str]:
        """The prepared folders (or their addresses) that the run reads."""
        return list(self.mixture or {}) if self.path is None else [self.path]


class OptimizerSection(Section):
    """Weight decay acts on matrices and embeddings, not on biases, norms and filters."""

    name: Annotated[str, entry_of(optimizers.OPTIMIZERS)] = Field(
        "adamw", description="adamw, muon (matrices of layers; adamw for the rest), or a plugin's"
    )
    lr: Annotated[float, number(numbers.LEARNING_RATE, above=0)] = Field(
        description="peak learning rate"
    )
    initial_lr: LearningRate = Field(0.0, description="where the warm-up starts")
    min_lr: LearningRate = Field(0.0, description="where the decay ends")
    schedule: Literal["cosine", "constant", "wsd"] = Field(
        "cosine", description="after the warm-up; wsd: constant, with a decay at the end"
    )
    warmup_tokens: Tokens | None = Field(None, description="linear; or warmup_steps")
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
        0.01, description="of matrices and embeddings"
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
    options: dict[str, Any] = Field({}, description="of a plugin's optimizer: {option: value, …}")
    lr_groups: dict[Name, Annotated[float, number(numbers.RATE_FACTOR)]] = Field(
        {}, description="factors of learning rates: {'*filter*': 0.5, …}; first match counts"
    )


class TrainSection(Section):
    output_dir: OutputPath = Field(description="the run's folder: checkpoints, logs, metrics")
    global_batch_size: Batch = Field(description="sequences a step, over all ranks")
    micro_batch_size: BatchOrAuto = Field(
        description="sequences a rank computes at once; auto: the most that its memory holds"
    )
    max_tokens: PositiveTokens | None = Field(
        None, description="length of the run; this or max_steps is needed"
    )
    max_steps: PositiveSteps | None = Field(None, description="instead of max_tokens")
    seed: Annotated[int, whole(numbers.SEED)] = Field(
        0, description="of first weights, order of the data and dropout"
    )
    precision: Literal["auto", "bf16", "fp32"] = Field(
        "auto", description="auto: bf16 where the device computes it natively, otherwise fp32"
    )
    zero_stage: Literal[0, 1, 2, 3] = Field(
        1, description="what ranks divide among them: nothing, moments, gradients too, weights too"
    )
    gradient_communication: Literal["fp32", "bf16"] = Field(
        "fp32", description="what ranks sum gradients in; bf16: half the bytes, rounded"
    )
    sequence_parallel: Annotated[int, whole(numbers.RANKS)] = Field(
        1, description="so many neighbouring ranks share every sequence, each a part of its tokens"
    )
    activation_checkpointing: bool = Field(
        False, description="layers are computed again in the backward pass: less memory, more time"
    )
    compile: bool = Field(False, description="by torch.compile")
    deterministic: bool = Field(
        False, description="the same bits each time on a GPU, where attention is then slower"
    )
    conv_backend: Literal["auto", "reference", "cpu", "triton"] = Field(
        "auto", description="what computes convolutions; a name that cannot serve ends the run"
    )
    mixer_backend: Literal["auto", "torch", "cpu", "triton", "fla"] = Field(
        "auto", description="what computes recurrences; a name that cannot serve ends the run"
    )
    landmark_loss: Literal["hard", "dense", "guided", "calibrate"] = Field(
        "hard", description="attention=landmark in training: chosen blocks, or all keys and a loss"
    )
    landmark_weight: Annotated[float, number(numbers.AUXILIARY_WEIGHT)] | None = Field(
        None, description="guided: of the landmarks' loss beside the tokens'; default: 0.3"
    )
    landmark_rows: PositiveSteps | None = Field(
        None, description="queries of a sequence that landmarks are taught on; default: 64"
    )
    init_from: OptionalPath = Field(
        None, description="model folder whose weights a new run starts from; default: random"
    )
    init_checksums: bool = Field(
        True, description="compare files of init_from with their export's record; slow if huge"
    )
    resume: PathText = Field(
        "never", description="never, auto (newest complete checkpoint), or a path"
    )
    reset_optimizer: bool = Field(
        False, description="resume a checkpoint of another optimizer.name, with an empty state"
    )
    log_every_steps: PositiveSteps = Field(
        10, description="lines in the log; metrics.jsonl has all"
    )
    max_skipped_steps: PositiveSteps = Field(
        20, description="non-finite steps in a row before a stop"
    )
    hang_minutes: Annotated[float, number(numbers.MINUTES)] = Field(
        30.0, description="a rank without progress for so long ends the run, code 76"
    )
    peak_tflops: Annotated[float, number(numbers.TFLOPS)] | None = Field(
        None, description="of one device in this precision, for MFU; default: by its name"
    )
    ema_decay: Annotated[float, number(numbers.FRACTION, above=0, below=1)] | None = Field(
        None, description="keep an average of the weights, w, after each step: e = d e + (1 - d) w"
    )
    profile_steps: tuple[PositiveSteps, PositiveSteps] | None = Field(
        None, description="[first, last] step to trace; files are in the run's folder profile"
    )
    callbacks: dict[str, dict[str, Any]] = Field(
        {}, description="of plugins: {name: {option: value, …}, …}"
    )


class ValidationSection(Section):
    every_steps: PositiveSteps = Field(500, description="steps between validations")
    max_tokens: PositiveTokens | None = Field(
        None, description="default: the whole validation split"
    )
    sets: dict[Word, PathText] = Field(
        {}, description="more prepared folders to score: {name: folder, …}"
    )
    tasks: tuple[Name, ...] = Field(
        (), description="of lm-evaluation-harness, as eval.zero_shot --tasks: [piqa, …]"
    )
    tasks_every_steps: PositiveSteps | None = Field(
        None, description="steps between evaluations of tasks; default: every_steps"
    )
    tasks_dir: OptionalPath = Field(
        None, description="rows of tasks, as eval.zero_shot --prefetch writes; default: the Hub"
    )
    tasks_include: OptionalPath = Field(
        None, description="folder of custom tasks, as eval.zero_shot --include-path"
    )
    tasks_rows: Annotated[int, whole(numbers.ROWS)] | None = Field(
        None, description="the first rows of every task alone; default: all"
    )


class CheckpointSection(Section):
    every_steps: PositiveSteps = Field(1000, description="steps between checkpoints")
    keep_last: PositiveSteps = Field(2, description="checkpoints; older ones are deleted")
    keep_every_steps: PositiveSteps | None = Field(
        None, description="checkpoints of such steps are never deleted"
    )


class LoggingSection(Section):
    tensorboard: bool = Field(True, description="write curves to the run's folder, too")
    wandb_project: OptionalName = Field(None, description="needs the wandb extra")
    wandb_entity: OptionalName = Field(None, description="user or team; default: the account's")
    wandb_group: OptionalName = Field(None, description="group of runs")
    wandb_tags: tuple[Name, ...] = Field((), description="labels of the run: [a, b, …]")
    wandb_name: OptionalName = Field(None, description="default: the name of train.output_dir")
