"""`import cat_lm` is light, and transformers' Auto classes know the model afterwards."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

from tests.tiny_models import cat_model

REPOSITORY = Path(__file__).parents[2]
LOAD = """
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
config = AutoConfig.from_pretrained(folder)
assert type(config).__name__ == "CatConfig", config
assert type(AutoModelForCausalLM.from_pretrained(folder)).__name__ == "CatForCausalLM"
assert type(AutoModelForCausalLM.from_config(config)).__name__ == "CatForCausalLM"
assert type(AutoModel.from_pretrained(folder)).__name__ == "CatModel"
assert type(AutoConfig.for_model("cat_neox")).__name__ == "CatConfig"
"""
ORDERS = {
    "cat_lm first": "import cat_lm",
    "gpt_neox later": "import cat_lm\nfrom transformers import GPTNeoXConfig, GPTNeoXForCausalLM",
    "transformers first": "from transformers import AutoConfig\nimport cat_lm",
    "reloaded": "import importlib, cat_lm, transformers.models.auto.modeling_auto as auto\n"
    "importlib.reload(auto)\nimportlib.reload(cat_lm)",
}


def python(code):
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    cat_model().save_pretrained(path)
    return path


# Each is an interpreter of its own.
SHORT = ("transformers first",)


@pytest.mark.parametrize(
    "order",
    [
        pytest.param(order, marks=() if order in SHORT else pytest.mark.long, id=order)
        for order in ORDERS
    ],
)
def test_every_import_order(order, folder):
    python(f"folder = {str(folder)!r}\n{ORDERS[order]}\n{LOAD}")


@pytest.mark.long
def test_other_processes_know_it_too(folder):
    """A process that only unpickles a configuration, as a spawned one does."""
    pickled = pickle.dumps(AutoConfig.from_pretrained(folder))
    said = python(f"import pickle\nprint(type(pickle.loads({pickled!r})).__name__)")
    assert said == "CatConfig\n"


def test_import_is_light():
    code = (
        "import sys, time\nstart = time.perf_counter()\nimport cat_lm\n"
        "seconds = time.perf_counter() - start\n"
        "heavy = {'torch', 'transformers', 'numpy', 'deepspeed'} & set(sys.modules)\n"
        "assert not heavy, heavy\nassert seconds < 2, seconds\nprint(cat_lm.__version__)"
    )
    assert python(code).strip()


@pytest.mark.long
def test_other_models_are_untouched():
    """Awaiting the Auto modules changes nothing for the models of transformers."""
    python(
        "import cat_lm\nfrom transformers import AutoConfig, AutoModelForCausalLM\n"
        "config = AutoConfig.for_model('gpt_neox', hidden_size=8, num_hidden_layers=1,"
        " num_attention_heads=2, intermediate_size=8, vocab_size=9)\n"
        "model = AutoModelForCausalLM.from_config(config)\n"
        "assert type(model).__name__ == 'GPTNeoXForCausalLM'\n"
        "assert not hasattr(vars(AutoConfig)['from_pretrained'], '_cat_lm_waits')\n"
    )
