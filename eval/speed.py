"""`python -m eval.speed train`: how fast a training step is, and how much memory it takes.

Three models of one size take turns in one process: CAT (head convolution on q, k and v), Pythia
(the same code without convolutions) and transformers' own `GPTNeoXForCausalLM` with sdpa. A step is
a forward pass with its loss and a backward pass; the optimizer, the same for all, is left out.
Peak memory is measured in a process of its own for each model. Before anything is timed, CAT with
identity filters must give the logits of the stock model on the very shapes, else nothing is
reported.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cat_lm.errors import UserError, command
from cat_lm.files import write_json

if TYPE_CHECKING:
    import torch

MODELS = {
    "cat": "CAT, head convolution, W={window}, q/k/v",
    "pythia": "Pythia, this code",
    "stock": "GPTNeoXForCausalLM of transformers, sdpa",
}
# Relative to the largest logit. In bf16 the bias is added to a projection that was rounded before.
TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2}


@dataclass(frozen=True)
class TrainingCase:
    """What is timed: a model size, a batch, a precision and a device."""

    hidden_size: int
    layers: int
    heads: int
    context_length: int
    batch_size: int
    vocab_size: int
    window: int
    dtype: str
    device: str


def build(case: TrainingCase, name: str) -> torch.nn.Module:
    """One of `MODELS`, in training mode. Only weights are cast; rotary frequencies stay fp32."""
    import torch
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    from cat_lm.model import CatConfig, CatForCausalLM

    fields = {
        "vocab_size": case.vocab_size,
        "hidden_size": case.hidden_size,
        "num_hidden_layers": case.layers,
        "num_attention_heads": case.heads,
        "intermediate_size": 4 * case.hidden_size,
        "max_position_embeddings": case.context_length,
        "attn_implementation": "sdpa",
        "use_cache": False,
    }
    torch.manual_seed(0)
    if name == "stock":
        model = GPTNeoXForCausalLM(GPTNeoXConfig(**fields))
    else:
        conv_type = "head" if name == "cat" else "none"
        model = CatForCausalLM(CatConfig(**fields, conv_type=conv_type, conv_window=case.window))
    model.to(case.device)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, case.dtype))
    return model.train()


def batch(case: TrainingCase) -> torch.Tensor:
    """Token ids [B, T]."""
    import torch

    generator = torch.Generator().manual_seed(1)
    shape = (case.batch_size, case.context_length)
    return torch.randint(case.vocab_size, shape, generator=generator).to(case.device)


def training_step(model: torch.nn.Module, ids: torch.Tensor) -> None:
    """Loss and gradients."""
    model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad(set_to_none=True)


def check_logits(case: TrainingCase, models: dict[str, torch.nn.Module]) -> dict[str, float]:
    """Gives all models the stock weights; the largest difference of their logits from stock's.

    Relative to the largest logit. Raises `UserError` where it is above the tolerance.
    """
    import torch

    ids = batch(case)[:1]
    differences = {}
    with torch.no_grad():
        expected = models["stock"](input_ids=ids).logits.float()
        for name in ("cat", "pythia"):
            models[name].load_state_dict(models["stock"].state_dict(), strict=False)
            difference = (models[name](input_ids=ids).logits.float() - expected).abs().max()
            differences[name] = float(difference / expected.abs().max())
    wrong = {name: value for name, value in differences.items() if not value <= _tolerance(case)}
    if wrong:
        raise UserError(
            f"logits differ from transformers' by {wrong} of the largest (at most "
            f"{_tolerance(case)} is right); speeds of a wrong model are not reported"
        )
    return differences


def _tolerance(case: TrainingCase) -> float:
    return TOLERANCES[case.dtype]


def time_steps(
    case: TrainingCase, models: dict[str, torch.nn.Module], repeats: int
) -> dict[str, list[float]]:
    """Seconds of `repeats` steps of each model, taken in turn after a step to warm up."""
    import torch
    from tqdm import tqdm

    ids = batch(case)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for repeat in tqdm(range(repeats + 1), desc="steps", disable=None):
        for name, model in models.items():
            start = time.perf_counter()
            training_step(model, ids)
            if case.device.startswith("cuda"):
                torch.cuda.synchronize()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def peak_memory(case: TrainingCase, name: str) -> int:
    """Bytes that two training steps need beyond the weights; run in a process of its own."""
    model, ids = build(case, name), batch(case)
    gc.collect()
    if case.device.startswith("cuda"):
        import torch

        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            training_step(model, ids)
        return torch.cuda.max_memory_allocated() - before
    # Linux forgets the highest resident size so far when asked to.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _resident("VmRSS")
    for _ in range(2):
        training_step(model, ids)
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise UserError(f"/proc/self/status has no {field}: memory cannot be measured on this system")


def train_speed(case: TrainingCase, repeats: int) -> dict[str, Any]:
    """Measures a case; the result is what goes into the JSON file."""
    import torch

    from eval.provenance import provenance

    models = {name: build(case, name) for name in MODELS}
    differences = check_logits(case, models)
    seconds = time_steps(case, models, repeats)
    del models
    gc.collect()
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        memory = {name: pool.apply(peak_memory, (case, name)) for name in MODELS}

    tokens = case.batch_size * case.context_length
    stock = statistics.median(seconds["stock"])
    rows = {
        name: {
            "model": title.format(window=case.window),
            "tokens_per_second": tokens / statistics.median(seconds[name]),
            "tokens_per_second_range": [tokens / max(seconds[name]), tokens / min(seconds[name])],
            "speed_relative_to_stock": stock / statistics.median(seconds[name]),
            "peak_memory_bytes": memory[name],
            "step_seconds": seconds[name],
        }
        for name, title in MODELS.items()
    }
    return {
        "benchmark": "train",
        **provenance(),
        "case": asdict(case),
        "device": _device_name(case),
        "threads": torch.get_num_threads(),
        "repeats": repeats,
        "largest_relative_logit_difference": differences,
        "results": rows,
    }


def _device_name(case: TrainingCase) -> str:
    import torch

    if case.device.startswith("cuda"):
        return torch.cuda.get_device_name(case.device)
    return f"cpu, {torch.get_num_threads()} threads"


def print_train(result: dict[str, Any]) -> None:
    """The result as a table."""
    case = result["case"]
    print(
        f"{case['layers']}x{case['hidden_size']}, {case['heads']} heads, "
        f"batch {case['batch_size']}x{case['context_length']}, vocabulary {case['vocab_size']}, "
        f"{case['dtype']}, {result['device']}, {result['repeats']} repeats"
    )
    print(f"{'model':<42}{'tokens/s':>10}{'range':>17}{'of stock':>10}{'peak MiB':>10}")
    for row in result["results"].values():
        slow, fast = row["tokens_per_second_range"]
        print(
            f"{row['model']:<42}{row['tokens_per_second']:>10.0f}{f'{slow:.0f}-{fast:.0f}':>17}"
            f"{row['speed_relative_to_stock']:>10.3f}{row['peak_memory_bytes'] / 2**20:>10.0f}"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval.speed", description="Speed and memory, measured side by side."
    )
    benchmarks = parser.add_subparsers(dest="benchmark", required=True)
    train = benchmarks.add_parser(
        "train", help="a training step of CAT, Pythia and transformers' GPT-NeoX"
    )
    numbers = {
        "hidden-size": 512,
        "layers": 8,
        "heads": 8,
        "context-length": 1024,
        "batch-size": 4,
        "vocab-size": 32000,
        "window": 21,
        "repeats": 5,
    }
    for name, default in numbers.items():
        train.add_argument(f"--{name}", type=_positive, default=default, metavar="N")
    train.add_argument("--dtype", choices=sorted(TOLERANCES), default="float32")
    train.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, …")
    train.add_argument("--json", type=Path, metavar="FILE", help="where to write the result")
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def _training_case(options: argparse.Namespace) -> TrainingCase:
    import torch

    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"--device {device}: torch sees no CUDA device; use cpu")
    if options.hidden_size % options.heads:
        raise UserError(
            f"--hidden-size {options.hidden_size} must be a multiple of --heads {options.heads}"
        )
    return TrainingCase(
        **{
            name: getattr(options, name)
            for name in TrainingCase.__annotations__
            if name != "device"
        },
        device=device,
    )


@command
def main() -> None:
    options = _parser().parse_args()
    result = train_speed(_training_case(options), options.repeats)
    print_train(result)
    if options.json:
        write_json(options.json, result)
        print(f"wrote {options.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
