"""The run's configuration: typed and validated YAML, `a.b=c` overrides, DeepSpeed's config.

A run is one YAML file. `base: other.yaml` (relative to the file) takes another file's values
first. Overrides come last. All errors are gathered and shown at once; an unknown key is an error
that names the nearest known one. This module imports neither torch nor transformers.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from cat_lm.errors import UserError
from cat_lm.io.files import write_text

_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_count(value: Any) -> Any:
    """Reads counts as people write them: 15B, 0.5M, 1.5e9, 20_000. Leaves other values alone."""
    if isinstance(value, bool):
        raise ValueError("must be a whole number, not true or false")
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"([0-9_.]+(?:[eE][+-]?[0-9]+)?)\s*([KMBT]?)", value.strip())
    if not match:
        raise ValueError("must be a whole number such as 20000, 0.5M or 15B")
    count = float(match[1].replace("_", "")) * _SUFFIXES[match[2]]
    if not count.is_integer():
        raise ValueError("must be a whole number")
    return int(count)


Count = Annotated[int, BeforeValidator(parse_count)]
Positive = Annotated[int, BeforeValidator(parse_count), Field(gt=0)]
Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ModelSection(Section):
    """Shape and kind of the model, in the names of `transformers`' GPT-NeoX and CatConfig."""

    hidden_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    intermediate_size: Positive | None = Field(None, description="default: 4 x hidden_size")
    vocab_size: Positive | None = Field(None, description="default: the tokenizer's")
    rotary_pct: float = Field(0.25, gt=0, le=1)
    rope_theta: float = Field(10000.0, gt=0)
    position_embedding: Literal["rope", "none"] = "rope"
    conv_type: Literal["none", "head", "multihead", "depthwise"] = "none"
    conv_window: Positive = 21
    conv_streams: str = "qkv"
    conv_init: Literal["identity", "uniform"] = "identity"
    conv_mixing: Literal["embeddings", "maps"] = Field(
        "embeddings", description="what a multihead convolution mixes; maps needs the stream v"
    )
    conv_activation: Literal["none", "silu"] = Field(
        "none", description="after a depthwise convolution"
    )
    rope_parameters: dict[str, Any] | None = Field(
        None, description="scaled positions, such as {rope_type: yarn, factor: 4, …}"
    )
    attention_temperature: float = Field(1.0, gt=0, description="logits are divided by it")
    temperature_scope: Literal["logits", "rotary"] = "logits"
    use_parallel_residual: bool = True
    tie_word_embeddings: bool = False
    layer_norm_eps: float = Field(1e-5, gt=0)
    hidden_dropout: float = Field(0.0, ge=0, lt=1)
    attention_dropout: float = Field(0.0, ge=0, lt=1)
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2", "flex_attention"] = "sdpa"


class DataSection(Section):
    path: str | None = Field(
        None, description="folder written by data_prep.prepare, or its address (s3://, hf://, …)"
    )
    mixture: dict[str, Weight] | None = Field(
        None, min_length=1, description="instead of path: {folder: share of the sequences, …}"
    )
    context_length: Positive
    packing: Literal["stream", "best_fit"] = Field(
        "stream", description="best_fit: whole documents a window, few of them cut"
    )
    cache_dir: str | None = Field(
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
    """AdamW; weight decay acts on matrices and embeddings, not on biases, norms and filters."""

    lr: float = Field(gt=0, description="peak learning rate")
    initial_lr: float = Field(0.0, ge=0, description="where the warm-up starts")
    min_lr: float = Field(0.0, ge=0, description="where the decay ends")
    schedule: Literal["cosine", "constant", "wsd"] = "cosine"
    warmup_tokens: Count | None = Field(None, ge=0)
    warmup_steps: Count | None = Field(None, ge=0)
    decay_tokens: Positive | None = Field(None, description="wsd: length of the final decay")
    decay_steps: Positive | None = Field(None, description="wsd: length of the final decay")
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    grad_clip: float = Field(1.0, ge=0, description="global gradient norm; 0 means no clipping")


class TrainSection(Section):
    output_dir: str
    global_batch_size: Positive = Field(description="sequences a step, over all ranks")
    micro_batch_size: Positive = Field(description="sequences a rank computes at once")
    max_tokens: Positive | None = None
    max_steps: Positive | None = None
    seed: Count = Field(0, ge=0)
    precision: Literal["auto", "bf16", "fp32"] = Field(
        "auto", description="auto: bf16 where the device computes it natively, otherwise fp32"
    )
    zero_stage: Literal[0, 1, 2, 3] = 1
    activation_checkpointing: bool = False
    compile: bool = False
    conv_backend: Literal["auto", "reference", "cpu", "triton"] = Field(
        "auto", description="what computes convolutions; a name that cannot serve ends the run"
    )
    init_from: str | None = Field(
        None, description="model folder whose weights a new run starts from; default: random"
    )
    resume: str = Field("never", description="never, auto (newest complete checkpoint), or a path")
    log_every_steps: Positive = Field(10, description="lines in the log; metrics.jsonl has all")
    max_skipped_steps: Positive = Field(20, description="non-finite steps in a row before a stop")
    hang_minutes: float = Field(
        30.0, gt=0, description="a rank without progress for so long ends the run, code 76"
    )
    peak_tflops: float | None = Field(
        None, gt=0, description="of one device in this precision, for MFU; default: by its name"
    )


class ValidationSection(Section):
    every_steps: Positive = 500
    max_tokens: Positive | None = Field(None, description="default: the whole validation split")


class CheckpointSection(Section):
    every_steps: Positive = 1000
    keep_last: Positive = 2
    keep_every_steps: Positive | None = Field(None, description="these are never deleted")


class LoggingSection(Section):
    tensorboard: bool = True
    wandb_project: str | None = Field(None, description="needs the wandb extra")


class RunConfig(Section):
    """Everything that decides a run. `load_config` makes one; `save` writes it resolved."""

    model: ModelSection
    data: DataSection
    optimizer: OptimizerSection
    train: TrainSection
    validation: ValidationSection = ValidationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    logging: LoggingSection = LoggingSection()

    @property
    def tokens_per_step(self) -> int:
        return self.train.global_batch_size * self.data.context_length

    @property
    def total_steps(self) -> int:
        """Steps of the whole run; a budget in tokens is never exceeded (but for one step)."""
        if self.train.max_steps is not None:
            return self.train.max_steps
        return max(1, self.train.max_tokens // self.tokens_per_step)

    def steps_of(self, name: Literal["warmup", "decay"]) -> int:
        """The length of the warm-up or of WSD's decay in steps, whichever way it was given."""
        steps = getattr(self.optimizer, f"{name}_steps")
        tokens = getattr(self.optimizer, f"{name}_tokens")
        if steps is not None:
            return steps
        return math.ceil((tokens or 0) / self.tokens_per_step)

    def accumulation_steps(self, world_size: int) -> int:
        """Micro-batches a rank computes per step.

        Raises:
            UserError: the global batch does not divide into whole micro-batches.
        """
        per_pass = self.train.micro_batch_size * world_size
        if self.train.global_batch_size % per_pass:
            raise UserError(
                f"train.global_batch_size={self.train.global_batch_size} is not a multiple of "
                f"train.micro_batch_size x ranks = {self.train.micro_batch_size} x {world_size} "
                f"= {per_pass}"
            )
        return self.train.global_batch_size // per_pass

    def with_precision(self, precision: Literal["bf16", "fp32"]) -> RunConfig:
        """This configuration with `auto` decided."""
        train = self.train.model_copy(update={"precision": precision})
        return self.model_copy(update={"train": train})

    def deepspeed(self, world_size: int) -> dict[str, Any]:
        """DeepSpeed's configuration, derived here and nowhere else; precision must be decided.

        In bf16, ZeRO 1-3 keep bf16 parameters with fp32 master weights, accumulate and reduce
        gradients in fp32. DeepSpeed refuses that mix without ZeRO, so stage 0 keeps fp32
        parameters and computes under autocast.
        """
        stage = self.train.zero_stage
        bf16 = self.train.precision == "bf16"
        return {
            "train_batch_size": self.train.global_batch_size,
            "train_micro_batch_size_per_gpu": self.train.micro_batch_size,
            "gradient_accumulation_steps": self.accumulation_steps(world_size),
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": bf16 and stage > 0, "check_grad_overflow": True},
            "torch_autocast": {"enabled": bf16 and stage == 0, "dtype": "bfloat16"},
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",
            # Stage 0's gradients are clipped by the engine, which must see their norm first.
            "gradient_clipping": self.optimizer.grad_clip if stage > 0 else 0.0,
            "steps_per_print": None,
        }

    def save(self, path: Path | str) -> None:
        write_text(path, self.to_yaml())

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads and checks a run's configuration.

    Args:
        path: a YAML file; its `base:` names another one to start from.
        overrides: strings `section.key=value`, the value in YAML syntax; the last one wins.

    Raises:
        UserError: with one line for every error found.
    """
    values = _read_with_bases(Path(path), seen=())
    errors: list[str] = []
    for override in overrides:
        _apply_override(values, override, errors)
    errors += _unknown_keys(values)
    config = None
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        errors += [_describe(e) for e in error.errors() if e["type"] != "extra_forbidden"]
    if config is not None:
        errors += _inconsistencies(config)
    if errors:
        lines = errors[0] if len(errors) == 1 else "".join(f"\n  {line}" for line in errors)
        raise UserError(f"{path}: {lines}")
    return config


def changed_values(
    old: dict[str, Any], new: dict[str, Any], prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """What differs between two dumped configurations: dotted name to (old value, new value)."""
    changes = {}
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            changes |= changed_values(a, b, f"{prefix}{key}.")
        elif a != b:
            changes[prefix + key] = (a, b)
    return changes


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML lets a later duplicate of a key win in silence; here it is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        own = (key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge")
        keys = [self.construct_object(key, deep=True) for key in own]
        for key in keys:
            if keys.count(key) > 1:
                raise UserError(f"line {node.start_mark.line + 1}: key '{key}' stands twice")
        return super().construct_mapping(node, deep)


def _read_with_bases(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    path = path.resolve() if seen else path
    if path.resolve() in seen:
        raise UserError(f"{path}: 'base' leads back to the file itself")
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeyLoader)
    except FileNotFoundError:
        raise UserError(f"{path}: no such configuration file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: must hold sections such as 'model:' and 'train:', but is empty")
    base = values.pop("base", None)
    if base is None:
        return values
    if not isinstance(base, str):
        raise UserError(f"{path}: base: must be a file name, not {base!r}")
    return _merged(_read_with_bases(path.parent / base, (*seen, path.resolve())), values)


def _merged(base: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Sections are merged key by key. A key's value is replaced whole: a mixture is one value."""
    result = dict(base)
    for section, content in values.items():
        both = isinstance(content, dict) and isinstance(result.get(section), dict)
        result[section] = {**result[section], **content} if both else content
    return result


def _apply_override(values: dict[str, Any], override: str, errors: list[str]) -> None:
    name, equals, text = override.partition("=")
    section, dot, key = name.partition(".")
    if not equals or not dot or not key or "." in key:
        errors.append(f"override '{override}': must have the form section.key=value")
        return
    try:
        value = text if _is_text(section, key, text) else yaml.load(text, _UniqueKeyLoader)
    except (yaml.YAMLError, UserError):
        errors.append(f"override '{override}': the value is not valid YAML")
        return
    if not isinstance(values.get(section, {}), dict):
        return  # reported with the section itself
    values[section] = {**values.get(section, {}), key: value}


def _is_text(section: str, key: str, text: str) -> bool:
    """Whether a key takes any text, such as a path, in which `#` and `:` mean nothing to YAML."""
    field = RunConfig.model_fields.get(section)
    known = field.annotation.model_fields.get(key) if field else None
    if known is None:
        return False
    # A key that may be left out is still emptied by YAML's word for it.
    return known.annotation is str or (known.annotation == str | None and text != "null")


def _known_keys() -> dict[str, list[str]]:
    return {
        name: list(field.annotation.model_fields) for name, field in RunConfig.model_fields.items()
    }


def _unknown_keys(values: dict[str, Any]) -> list[str]:
    known = _known_keys()
    dotted = [f"{section}.{key}" for section, keys in known.items() for key in keys]
    errors = []
    for section, content in values.items():
        if section not in known:
            errors.append(_unknown(str(section), list(known)))
        elif not isinstance(content, dict):
            errors.append(f"{section}: must be a section with keys, not {content!r}")
        else:
            names = (f"{section}.{key}" for key in content if key not in known[section])
            errors += [_unknown(name, dotted) for name in names]
    return errors


def _unknown(name: str, known: list[str]) -> str:
    # A right key in the wrong section is nearer than a similar key in this one.
    same_key = [k for k in known if k.split(".")[-1] == name.split(".")[-1]]
    near = same_key or difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return f"{name}: unknown key; the nearest known one is {near[0]}"


def _describe(error: dict[str, Any]) -> str:
    # Unions add their member's name to the location; the first two parts name the key, and of a
    # mixture the third the folder.
    parts = 3 if error["loc"][:2] == ("data", "mixture") else 2
    name = ".".join(str(part) for part in error["loc"][:parts])
    if error["type"] == "missing":
        return f"{name}: is missing"
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"{name}={error['input']!r}: {message[0].lower()}{message[1:]}"


def _inconsistencies(config: RunConfig) -> list[str]:
    """What no single key shows to be wrong."""
    model, optimizer, train = config.model, config.optimizer, config.train
    errors = []
    if model.hidden_size % model.num_attention_heads:
        errors.append(
            f"model.hidden_size={model.hidden_size}: must be a multiple of "
            f"model.num_attention_heads={model.num_attention_heads}"
        )
    rotated = int(model.hidden_size // model.num_attention_heads * model.rotary_pct)
    if model.position_embedding == "rope" and (rotated < 2 or rotated % 2):
        errors.append(
            f"model.rotary_pct={model.rotary_pct}: rotates {rotated} channels of a head; "
            "must rotate an even number of at least 2"
        )
    streams = model.conv_streams
    if not streams or set(streams) - set("qkv") or len(set(streams)) != len(streams):
        errors.append(f"model.conv_streams={streams!r}: must be some of q, k and v, as in 'qkv'")
    if model.conv_mixing == "maps" and (model.conv_type != "multihead" or "v" not in streams):
        errors.append(
            f"model.conv_mixing=maps: needs conv_type=multihead and the stream v, not "
            f"conv_type={model.conv_type} and conv_streams={streams}"
        )
    if model.conv_activation != "none" and model.conv_type != "depthwise":
        errors.append(
            f"model.conv_activation={model.conv_activation}: goes with conv_type=depthwise only, "
            f"not with conv_type={model.conv_type}"
        )
    if train.global_batch_size % train.micro_batch_size:
        errors.append(
            f"train.micro_batch_size={train.micro_batch_size}: must divide "
            f"train.global_batch_size={train.global_batch_size}"
        )
    if config.data.path is None and config.data.mixture is None:
        errors.append("data: one of path and mixture is needed")
    if config.data.path is not None and config.data.mixture is not None:
        errors.append("data: path and mixture exclude each other; set one of them to null")
    errors += _exactly_one(config, "train", "max", required=True)
    errors += _exactly_one(config, "optimizer", "warmup", required=False)
    errors += _exactly_one(config, "optimizer", "decay", required=optimizer.schedule == "wsd")
    if optimizer.schedule != "wsd" and (optimizer.decay_steps or optimizer.decay_tokens):
        errors.append(f"optimizer.schedule={optimizer.schedule}: only 'wsd' has a decay length")
    if not all(0 <= beta < 1 for beta in optimizer.betas):
        errors.append(f"optimizer.betas={list(optimizer.betas)}: each must be in [0, 1)")
    for name in ("initial_lr", "min_lr"):
        if getattr(optimizer, name) > optimizer.lr:
            errors.append(f"optimizer.{name}={getattr(optimizer, name)}: is above optimizer.lr")
    if not errors and config.steps_of("warmup") + config.steps_of("decay") > config.total_steps:
        errors.append(
            f"optimizer: warm-up and decay take {config.steps_of('warmup')} + "
            f"{config.steps_of('decay')} steps, but the run has only {config.total_steps}"
        )
    if train.compile and train.zero_stage == 3:
        errors.append(
            "train.compile=True: does not go with train.zero_stage=3, whose hooks break it"
        )
    return errors


def _exactly_one(config: RunConfig, section: str, name: str, required: bool) -> list[str]:
    content = getattr(config, section)
    given = [k for k in ("tokens", "steps") if getattr(content, f"{name}_{k}") is not None]
    if len(given) > 1:
        return [
            f"{section}: {name}_tokens and {name}_steps exclude each other; "
            f"set the one that does not count to null"
        ]
    if required and not given:
        return [f"{section}: one of {name}_tokens and {name}_steps is needed"]
    return []
