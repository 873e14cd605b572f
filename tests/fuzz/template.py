"""A process that has imported what a family of commands needs and forks each case from itself.

`python -m tests.fuzz.template FAMILY SCRATCH`: requests are JSON lines on stdin, answers on stdout.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.fuzz.privileges import adopt_orphans

_PLAIN = (
    *("numpy", "pyarrow.parquet", "zstandard", "sentencepiece", "tokenizers", "pydantic", "yaml"),
    *("cat_lm.config", "cat_lm.data.opening", "data_prep.prepare", "data_prep.assemble.pipeline"),
    *("data_prep.check.findings", "data_prep.megatron.convert", "data_prep.adopt"),
    *("data_prep.inspect", "launch.doctor.__main__", "launch.doctor.ranks"),
    *("launch.slurm.__main__", "launch.slurm.local", "launch.slurm.prepare"),
    *("launch.slurm.status", "launch.slurm.submit"),
    *("eval.study", "eval.studies.rivals", "torch", "transformers"),
)
_TORCH = (
    *("torch", "transformers", "deepspeed", "safetensors.torch", "matplotlib.pyplot", "train"),
    *("transformers.models.gpt_neox.modeling_gpt_neox", "cat_lm.model.hf.modeling"),
    *("cat_lm.training.checkpoint", "cat_lm.training.engine", "cat_lm.training.preflight"),
    *("cat_lm.training.validation", "cat_lm.training.report", "cat_lm.training.metrics"),
    *("cat_lm.export", "cat_lm.generate", "cat_lm.upcycle", "cat_lm.sparsify"),
    *("cat_lm.data.loader",),
    *("eval.length_sweep.__main__", "eval.report.write", "eval.speed.__main__"),
    *("eval.landmark.__main__", "eval.landmark.sweep", "eval.landmark.choosers"),
    *("eval.speed.conv", "eval.speed.decode"),
    *("eval.speed.train", "eval.speed.tables"),
    *("eval.recall.__main__", "eval.recall.filter_plots", "eval.study"),
    *("eval.long_range.__main__", "eval.long_range.training", "eval.long_range.grids"),
    *("eval.studies.streams", "launch.doctor.__main__", "launch.doctor.ranks"),
)
_HARNESS = ("torch", "transformers", "lm_eval", "eval.zero_shot.__main__")
_HARNESS += (
    "eval.zero_shot.run",
    "eval.zero_shot.results",
    "lm_eval.models.huggingface",
    "lm_eval.tasks",
)
FAMILIES = {"plain": _PLAIN, "torch": _TORCH, "harness": _HARNESS, "fakes": ()}


def main() -> None:
    family, scratch = sys.argv[1], Path(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # Before anything is imported: libraries read these once.
    home = str(scratch / "home")
    os.environ |= {"HOME": home, "XDG_CACHE_HOME": home, "HF_HOME": home, "TMPDIR": home}
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TQDM_DISABLE": "1"}
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": "PASSIVE"}
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # no thread in a forked process
    adopt_orphans()
    for name in FAMILIES[family]:
        importlib.import_module(name)
    _warm_up(family)
    from tests.fuzz.cases import run_case
    from tests.fuzz.world import World

    world = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "module" in request:
                answer = _run(request, scratch)
            else:
                world = world or World(scratch / "world")
                answer = run_case(request["id"], request["seed"], world, Path(request["place"]))
        except BaseException:
            answer = {"broken": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _warm_up(family: str) -> None:
    """What a process keeps and every case would make again, such as the compiled kernel."""
    if family in ("plain", "fakes"):
        return
    import torch

    torch.set_num_threads(1)
    from cat_lm.pretrained.loading import quiet_transformers

    quiet_transformers()
    if family == "torch":
        from cat_lm.training.distributed import import_deepspeed

        import_deepspeed()
    from cat_lm.ops.convolution.cpu.kernel import KERNEL

    KERNEL.library()


def _run(request: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """Runs a command in the world's folder, to make what is in it."""
    from tests.fuzz.cases import environment
    from tests.fuzz.child import import_what_was_used, run_command

    ended = run_command(
        request["module"],
        request["line"],
        scratch / "world",
        environment(scratch),
        scratch / "home/logs",
        limit_seconds=300.0,
    )
    import_what_was_used(scratch / "home/logs")
    return {"code": ended.code, "stderr": ended.stderr, "stdout": ended.stdout}


if __name__ == "__main__":
    main()
