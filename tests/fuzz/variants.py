"""Further forms of the exported model in `model/`, and the files of a submitted run; see world.py.

Run as a command in the world's folder.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from cat_lm.core.files import opened, write_sealed

# Measured times differ in length, and with them what a case of the same seed would damage.
_TIMES = re.compile(r'("(?:\w*seconds|tokens_per_second|data|training|testing)": )[\d.e-]+')


def main() -> None:
    import torch

    from cat_lm.pretrained.loading import load_model

    torch.manual_seed(0)
    model = load_model("model")
    _beside(Path("sharded"))
    model.save_pretrained("sharded", max_shard_size="60KB")
    _beside(Path("pickled"))
    torch.save(model.state_dict(), "pickled/pytorch_model.bin")
    _pythia(Path("pythia"))
    _submitted(Path("run").absolute())
    for pattern in ("run/metrics.jsonl", "run/zero_shot/*.json", "recall/cells/*.json"):
        for path in Path().glob(pattern):
            path.write_text(_TIMES.sub(r"\g<1>0.125", path.read_text("utf-8")), "utf-8")
    for path in Path("recall/cells").glob("*.json"):
        write_sealed(path, opened(json.loads(path.read_text("utf-8")))[0])


def _beside(folder: Path) -> None:
    """A copy of the export without its weights and its record."""
    ignored = shutil.ignore_patterns("*.safetensors", "export.json", "precious.txt")
    shutil.copytree("model", folder, ignore=ignored)


def _pythia(folder: Path) -> None:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    _beside(folder)
    (folder / "config.json").unlink()
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = GPTNeoXConfig(
        vocab_size=257, intermediate_size=64, max_position_embeddings=32, **sizes
    )
    GPTNeoXForCausalLM(config).save_pretrained(folder)


def _submitted(run: Path) -> None:
    """As `launch.slurm submit` leaves a run, without a cluster."""
    from cat_lm.config import load_config
    from launch.slurm import snapshot
    from launch.slurm.folder import JobRecord, RunFolder
    from launch.slurm.options import Options

    folder = RunFolder(run)
    folder.slurm.mkdir()
    values = snapshot.resolved(load_config("config.yaml"))
    snapshot.save_config(folder, values)
    options = Options(nodes=2, tasks_per_node=1)
    jobs = [{"id": "12", "time": "2026-01-01T00:00:00+00:00", "command": ["python"]}]
    JobRecord(
        format=1,
        config=str(Path("config.yaml").absolute()),
        overrides=[],
        options=options,
        site=None,
        jobs=jobs,
    ).write(folder)
    folder.reset_attempts("submitted")
    folder.begin_attempt("12", 0)


if __name__ == "__main__":
    main()
