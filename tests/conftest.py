"""Data that tests share: real data where a machine has them, and a tiny prepared corpus.

And pytest-xdist's hooks, where it is installed: tests/workers.py says how work is spread.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from tests import workers

workers.one_thread_each()
# Continuous integration tries the same examples each time; `python -m tests.fuzz` tries others.
REPOSITORY = Path(__file__).resolve().parent.parent
settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
settings.register_profile(
    "other",
    deadline=None,
    max_examples=800,
    database=DirectoryBasedExampleDatabase(REPOSITORY / "runs/fuzz/examples"),
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    print_blob=False,
)
settings.load_profile("fixed")
# A shell's `&` has INT ignored, and so have all processes below it; tests send it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Those of the shell would be in the scripts that launch.slurm renders.
for name in [name for name in os.environ if name.startswith("SBATCH_")]:
    del os.environ[name]
WORDS = "the a cat sat saw heard on under near mat dog bird tree house and then slept ran 7 12"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    given = "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ
    return None if given else workers.worker_count(config.args)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object | None:
    # Another than -n's own `load` was asked for by --dist.
    return workers.scheduler(config, log) if config.option.dist == "load" else None


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("cat_lm")
    group.addoption("--all", action="store_true", help="also the tests marked `long`")
    group.addoption("--nightly", action="store_true", help="all tests, also those marked `nightly`")
    group.addoption(
        "--write-durations",
        action="store_true",
        help="write what each test took into tests/durations.json, which orders them",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--write-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(workers.Durations())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tiers = workers.TIERS if config.getoption("--nightly") else workers.TIERS[:1]
    asked = config.getoption("--nightly") or config.getoption("--all")
    items[:], left_out = workers.in_tiers(items, config.args, frozenset(tiers if asked else ()))
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    if "PYTEST_XDIST_WORKER" in os.environ:
        workers.longest_first(items, workers.known_durations())


@pytest.fixture(autouse=True)
def denormals_kept() -> Iterator[None]:
    """What a test calls may be a program, which flushes them; then no later test could read one."""
    yield
    # A test of what torch does not load, does not load it.
    if "torch" in sys.modules:
        sys.modules["torch"].set_flush_denormal(False)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data (`slimpajama_sample`, `tokenizers`, `text`, `benchmarks`)."""
    root = os.environ.get("CAT_LM_SHARED")
    folder = (Path(root) if root else REPOSITORY.parent / "shared") / "data"
    if not folder.is_dir():
        pytest.skip(f"needs real data in {folder} (CAT_LM_SHARED names the folder that has data/)")
    return folder


@pytest.fixture(scope="session")
def prepare() -> Callable[..., Path]:
    """Runs the data preparation in this process: prepare(out, flag, value, …) -> out."""

    def run(out: Path, *flags: object) -> Path:
        from data_prep.assemble.pipeline import prepare as steps
        from data_prep.prepare import parse_arguments

        steps(parse_arguments(["--out", str(out), *map(str, flags)]))
        return out

    return run


def generated_text(documents: int, seed: int = 0) -> list[str]:
    """Short texts of a few lines over a small vocabulary, the same in every run."""
    rng = random.Random(seed)
    words = WORDS.split()

    def line() -> str:
        return " ".join(rng.choices(words, k=rng.randint(3, 12))).capitalize() + "."

    return ["\n".join(line() for _ in range(rng.randint(1, 12))) for _ in range(documents)]


def many_texts(documents: int = 3000) -> list[str]:
    """By default several chunks of work, with awkward ones at the end."""
    awkward = [
        "",
        "</s><|endoftext|><|endoftext|>",
        " ",
        "\0",
        "x" * 5000,
        "\U0001f600",
        "",
        "last",
    ]
    return generated_text(documents) + awkward


def write_jsonl(path: Path, texts: list[str]) -> Path:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    path.write_text(lines, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def many_documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A jsonl file of `many_texts`."""
    return write_jsonl(tmp_path_factory.mktemp("many_documents") / "x.jsonl", many_texts())


@pytest.fixture(scope="session")
def some_documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A jsonl file of some 500 texts, for what is the same with many."""
    return write_jsonl(tmp_path_factory.mktemp("some_documents") / "x.jsonl", many_texts(500))


@pytest.fixture(scope="session")
def long_corpus(tmp_path_factory: pytest.TempPathFactory, prepare: Callable[..., Path]) -> Path:
    """A prepared folder: 100 documents of 1,200 tokens, `bytes` tokenizer, half of them held out.

    So many that some are held out behind the 32,768 tokens that studies choose rates on.
    Shared by all tests of a session: read it, do not change it.
    """
    folder = tmp_path_factory.mktemp("long_corpus")
    text = "\n".join(generated_text(800, seed=1))
    texts = [text[start : start + 1199] for start in range(0, 100 * 1199, 1199)]
    assert len(texts[-1]) == 1199
    rows = write_jsonl(folder / "text.jsonl", texts)
    return prepare(
        folder / "prepared",
        *("--source", "files", "--path", rows, "--tokenizer", "bytes"),
        *("--validation-fraction", 0.5, "--workers", 1),
    )


@pytest.fixture(scope="session")
def tiny_corpus(tmp_path_factory: pytest.TempPathFactory, prepare: Callable[..., Path]) -> Path:
    """A prepared folder: some 200 generated documents, `bytes` tokenizer (257 ids), two splits.

    Shared by all tests of a session: read it, do not change it.
    """
    folder = tmp_path_factory.mktemp("tiny_corpus")
    text = folder / "text.txt"
    text.write_text("\n\n".join(generated_text(200)), encoding="utf-8")
    return prepare(
        folder / "prepared",
        *("--source", "files", "--path", text, "--document-separator", r"\n\n"),
        *("--tokenizer", "bytes", "--validation-fraction", 0.1, "--workers", 1),
    )
