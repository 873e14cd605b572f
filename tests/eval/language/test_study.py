"""Studies of language models: models, what is compared, restarts; commands are imitated."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from cat_lm.config import load_config
from cat_lm.core.errors import UserError
from cat_lm.core.files import write_json
from cat_lm.data.manifest import fingerprint, listed_shards
from cat_lm.data.opening import open_verified
from cat_lm.training.estimate import num_parameters
from eval import study as command
from eval.common.models import folder_sha256
from eval.lab import execution as running
from eval.lab.places import TUNING_SEED
from eval.language import cell as language
from eval.language import grids, recalled
from eval.language.attention import ROWS
from eval.language.models import FILE, configuration, in_order, label
from eval.studies import STUDIES
from tests.calls import call_main

QUESTIONS = {
    name: question
    for name in STUDIES.names()
    if isinstance(question := getattr(STUDIES.get(name).places, "args", (None,))[0], grids.Question)
}


class Imitation:
    """Stands for the commands of a run: leaves what the real ones leave, at once."""

    best_rate = 3e-3

    def __init__(self, fails: str = "$^", diverges: str = "$^", precision: str = "fp32") -> None:
        self.fails, self.diverges, self.precision = fails, diverges, precision
        self.calls: list[str] = []

    def __call__(self, arguments: list[str], log: Path, device: str) -> int:
        self.calls.append(text := " ".join(arguments))
        log.parent.mkdir(parents=True, exist_ok=True)
        if re.search(self.fails, text):
            log.write_text("Traceback:\nValueError: no such thing\n", encoding="utf-8")
            return 1
        if arguments[0] == "train.py":
            return self.train(load_config(arguments[1]).with_precision(self.precision))
        if arguments[1] == "cat_lm.export":
            folder = Path(arguments[3])
            folder.mkdir(exist_ok=True)
            write_json(folder / "export.json", {"format": 1, "parameters": 1000})
            write_json(folder / "config.json", {"run": folder.parent.name})
            save_file({"weight": np.zeros(1)}, folder / "model.safetensors")
            return 0
        options = dict(zip(arguments[3::2], arguments[4::2], strict=True))
        self.sweep(Path(arguments[2]), options)
        return 0

    def train(self, config) -> int:
        run = Path(config.train.output_dir)
        run.mkdir(parents=True, exist_ok=True)
        config.save(run / "config.yaml")
        is_bad = bool(re.search(self.diverges, run.name))
        step = {"step": 1, "tokens": 1024, "tokens_per_second": 5000.0, "step_seconds": 0.01}
        lines = [step | {"loss": None if is_bad else 5.0, "skipped": is_bad}]
        loss = 4.0 + abs(math.log10(config.optimizer.lr / self.best_rate))
        validation = {"val_loss": loss, "val_perplexity": 54.6, "val_bits_per_byte": 2.0}
        lines += [{"step": 8, "tokens": 8192, **validation}] * (not is_bad)
        (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return 2 if is_bad else 0

    def sweep(self, run: Path, options: dict[str, str]) -> None:
        model, seed = re.match(r"(\w+)-lr\S+-seed(\d+)", run.name).groups()
        own = {"pythia": 4.0, "pythia_nope": 4.1, "cat": 3.8}.get(model, 3.9) + 0.01 * int(seed)
        rows = []
        for method in options["--methods"].replace("paper", "none,pi+temperature").split(","):
            for length in map(int, options["--lengths"].split(",")):
                loss = own + 0.1 * math.log2(length / 128) / (1 + (method != "none"))
                tokens, hard = [1024] * 8, [0.02 * (-1) ** i * (model == "cat") for i in range(8)]
                row = {"label": run.name, "length": length, "method": method, "loss": loss}
                row |= {"perplexity": math.exp(loss), "bits_per_byte": loss / 3, "tokens": 8192}
                row |= {"standard_error": 0.1, "groups": 8, "group_kind": "documents"}
                row |= {"tokens_sha256": "a" * 64, "model_sha256": folder_sha256(run / "model")}
                row |= {"training_length": 128, "document_count": 8, "stride": length}
                row |= {"documents": "per-document", "dtype": "float32", "factor": 1.0}
                row |= {"temperature_scope": "logits", "positions": [], "document_tokens": tokens}
                row |= {"document_nlls": [1024 * (loss + i / 8 + x) for i, x in enumerate(hard)]}
                rows.append(row)
        result = {"format": 1, "text": "x", "protocol": {"windows": "x"}, "command": "x"}
        write_json(Path(options["--out"]) / "length_sweep.json", result | {"rows": rows})


@pytest.fixture
def run(monkeypatch, capsys, long_corpus, tmp_path, in_this_process):
    """Call `eval.study` in this process, with imitated commands, for two seeds of smoke scale."""

    def call(imitation: Imitation, name: str, *words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(language, "_command", imitation)
        given = ["--scale", "smoke", "--out", "out", "--data", long_corpus, *words]
        return call_main(command.main, monkeypatch, capsys, "eval.study", name, *given)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(running, "hours_by_mixer", lambda groups, _: {"n": sum(map(len, groups))})
    return call


def read(folder: Path, name: str) -> dict:
    return json.loads((folder / "out" / f"{name}.json").read_text(encoding="utf-8"))


def test_every_model_is_of_a_study_and_differs_from_pythia_in_what_it_names_alone():
    known = yaml.safe_load(FILE.read_text(encoding="utf-8"))["models"]
    used = {model.removesuffix("_nope") for q in QUESTIONS.values() for model in q.models}
    assert used == known.keys()
    for recipe in ("cpu", "gpu"):
        plain = configuration("pythia", recipe, "data").model_dump()
        for model, entry in known.items():
            if entry.get("family", "attention") == "attention":
                own = configuration(model, recipe, "data").model_dump()
                keys = {key for key in own["model"] if own["model"][key] != plain["model"][key]}
                assert keys <= entry.keys() | {"attn_implementation"}, model
                optimizer = plain["optimizer"] | entry.get("optimizer", {})
                named = {"model": None, "optimizer": optimizer}
                assert own | {"model": None} == plain | named


def test_name_of_a_model_without_positions_ends_so():
    for model, positions in (("cat", "rope"), ("cat_nope", "none")):
        assert configuration(model, "cpu", "data").model.position_embedding == positions
    assert (label("cat"), label("cat_nope")) == ("CAT", "CAT, NoPE")
    assert in_order(["cat_nope", "pythia", "cat"]) == ("pythia", "cat", "cat_nope")


def test_rate_and_tokens_keep_the_shape_of_the_schedule():
    config = configuration("cat", "cpu", "data", 512_000, 1e-2, 7)
    assert config.optimizer.min_lr == pytest.approx(1e-3)
    assert (config.optimizer.warmup_tokens, config.train.seed) == (25_600, 7)
    assert config.total_steps * config.tokens_per_step == 512_000


@pytest.mark.parametrize("scale", ["cpu", "gpu"])
def test_rivals_have_one_size_and_start_alike(scale):
    given, counts = grids.SCALES[scale], {}
    for model in QUESTIONS["rivals"].models:
        config = configuration(model, given.recipe, "data")
        counts[model] = num_parameters(config, given.vocabulary)
        if (section := config.model).architecture not in ("gpt_neox", "llama"):
            rule = math.sqrt(2 / (5 * section.hidden_size))
            assert section.initializer_range == pytest.approx(rule, rel=1e-5)
            assert getattr(section, "conv_init", "uniform") == "uniform"
    assert len(counts) == 12
    assert all(abs(count / counts["pythia"] - 1) < 0.02 for count in counts.values())


def test_no_rival_starts_with_a_mixer_that_does_next_to_nothing():
    for model in QUESTIONS["rivals"].models:
        config = configuration(model, "cpu", "data")
        assert 0.1 < added_at_the_start(config) < 20, model
        if model == "mamba":  # the control: the library's own start
            library = config.model.model_copy(update={"initializer_range": 0.02})
            assert added_at_the_start(config.model_copy(update={"model": library})) < 0.1


def added_at_the_start(config) -> float:
    """The deviation of what the first mixer adds, in parts of that of the embeddings."""
    import torch

    from cat_lm.training.building import build_model

    model, found = build_model(config, 2048).eval(), []
    mixer = r"(gpt_neox|model|backbone)\.layers\.0\.(attention|self_attn|attn|mixer)"
    (first,) = (m for name, m in model.named_modules() if re.fullmatch(mixer, name))
    first.register_forward_hook(lambda _, __, y: found.append(y[0] if isinstance(y, tuple) else y))
    rows = torch.randint(2048, (2, 128), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(rows)
    return float(found[0].std() / model.get_input_embeddings().weight.detach().std())


def lines_of(question, texts=("a", "b"), trained=128) -> list[dict]:
    found = []
    for model in question.models:
        for factor in question.factors:
            place = {"row": "a", "column": "as trained", "line": label(model)}
            place |= {"x": int(factor * trained), "runs": {"0": 1.0, "1": 2.0}, "also": {}}
            found += [place | {"row": text} for text in texts]
            if "yarn" in question.beyond and not model.endswith("_nope") and factor > 1:
                found += [place | {"row": text, "column": "YaRN"} for text in texts]
    return found


COUNTS = {"variants": 26, "conv-streams": 44, "maps": 16, "canon": 16, "rank": 13, "norms": 21}
COUNTS |= {"optimizers": 4 + 1}
# As trained, at the longest length, and by YaRN where one side has positions to scale.
COUNTS |= {"las-bytes": 36, "lengths": 14 + 24 + 15, "filters": 19 + 19 + 11, "rivals": 36}


@pytest.mark.parametrize("name", QUESTIONS)
def test_differences_are_those_that_were_fixed(name):
    question = QUESTIONS[name]
    found = grids.contrasts(question, lines_of(question))
    assert len(found) == 2 * COUNTS[name]
    assert len({(one.row, one.column, one.x, one.name) for one in found}) == len(found)
    some = [x for x in lines_of(question) if x["line"] in ("Pythia", "CAT on k only", "CAT")]
    assert all("NoPE" not in one.name for one in grids.contrasts(question, some))


def test_interactions_and_growth_have_their_sides():
    question = QUESTIONS["lengths"]
    found = grids.contrasts(question, lines_of(question, ("a",)))
    by_name = {(one.name, one.column, one.x): (one.plus, one.minus) for one in found}
    name = "(CAT - Pythia) - (CAT, NoPE - Pythia, NoPE)"
    for column, x in (("as trained", 128), ("YaRN", 4096)):
        sides = [[line["line"] for line in side] for side in by_name[name, column, x]]
        assert sides == [["CAT", "Pythia, NoPE"], ["CAT, NoPE", "Pythia"]]
    ((one,), (other,)) = by_name["CAT - itself at 128", "YaRN", 4096]
    assert (one["x"], other["x"]) == (4096, 128)
    assert (one["column"], other["column"]) == ("YaRN", "as trained")


def test_attention_is_corrected_apart_and_recall_with_the_losses():
    norms, rivals = QUESTIONS["norms"], QUESTIONS["rivals"]
    one = lines_of(norms, texts=("a",))
    sharp = [
        x | {"row": "attention", "column": column, "x": 128}
        for column in grids.SHARPNESS.values()
        for x in one
        if x["x"] == 128
    ]
    found = grids.contrasts(norms, one + sharp)
    assert [sum(x.family == f for x in found) for f in ("", "attention")] == [21, 30]
    one = lines_of(rivals)
    recall = [x | {"row": "recall"} for x in one if x["row"] == "a" and x["x"] == 128]
    found = grids.contrasts(rivals, one + recall)
    assert len(found) == 18 * 2 * 2 + 18 and {x.family for x in found} == {""}


def test_study_runs_what_is_missing_and_reports(run, tmp_path, long_corpus):
    models = ("--models", "pythia", "cat", "pythia_nope")
    code, out, err = run(first := Imitation(), "variants", *models)
    assert code == 0 and "6 runs, 6 to do" in out, err
    trained = [call for call in first.calls if call.startswith("train.py")]
    assert len(trained) == 6 and all("train.resume=auto" in call for call in trained)
    assert all(Path(call.split()[1]).is_absolute() for call in trained)
    swept = [call for call in first.calls if "length_sweep" in call]
    assert all("--documents per-document --max-document-tokens 1024" in c for c in swept)
    assert all("--max-tokens 4096 --skip-tokens 32768" in call for call in swept)
    record = read(tmp_path, "variants")
    at = {(x["line"], x["column"], x["x"]): x for x in record["lines"]}
    assert at["CAT", "as trained", 128]["runs"] == pytest.approx({"0": 3.8, "1": 3.81})
    assert {x for line, column, x in at if column == "scaled"} == {256, 512, 1024}
    (found,) = (x for x in record["contrasts"] if (x["contrast"], x["x"]) == ("CAT - Pythia", 128))
    assert found["mean"] == pytest.approx(-0.2) and found["document_error"] > 0
    assert found["documents"] == 8 and found["comparisons"] == 4
    assert record["extra"]["documents"] == {long_corpus.name: 8}
    text = (tmp_path / "out/variants.md").read_text(encoding="utf-8")
    assert "| CAT - Pythia | -0.200 [" in text and "| CAT | 1,000 | 5,000 | 0.003 |" in text
    # A cell is gone: its run is measured again, and not trained.
    next((tmp_path / "out/cells").iterdir()).unlink()
    code, out, _ = run(again := Imitation(), "variants", *models)
    assert code == 0 and "6 runs, 1 to do" in out
    assert again.calls and all("length_sweep" in call for call in again.calls)
    assert read(tmp_path, "variants")["contrasts"] == record["contrasts"]
    # Another study in the same folder has its trainings.
    code, _, err = run(other := Imitation(), "filters", "--models", "pythia", "cat")
    assert code == 0 and not any("train.py" in call for call in other.calls), err
    assert {x["column"] for x in read(tmp_path, "filters")["lines"]} == {"as trained", "YaRN"}


def test_rates_are_chosen_by_runs_that_are_trained_alone(run, tmp_path):
    rates = ("--models", "pythia", "--rates", "1e-3,3e-3,1e-2")
    code, _, err = run(found := Imitation(), "maps", *rates)
    assert code == 0, err
    configs = [load_config(c.split()[1]) for c in found.calls if c.startswith("train.py")]
    chosen = [(c.optimizer.lr, c.train.seed) for c in configs]
    tried = [(rate, TUNING_SEED) for rate in (1e-3, 3e-3, 1e-2)]
    assert chosen == [*tried, (3e-3, 0), (3e-3, 1)]
    assert sum("length_sweep" in call for call in found.calls) == 2
    (line, *_) = read(tmp_path, "maps")["lines"]
    scores = {"0.001": -4.4771, "0.003": -4, "0.01": -4.5229}
    assert line["tried"] == pytest.approx(scores, abs=1e-4)
    for words, said in (
        (("lengths", *rates, "--documents", 2), "documents of 4096 tokens"),
        (("maps", "--documents", 99), "behind the first 32,768 tokens, which choose rates, 99"),
    ):
        code, _, err = run(found := Imitation(), *words)
        assert code == 2 and said in err and not found.calls


def test_divergence_is_a_result(run, tmp_path):
    diverging = Imitation(diverges="cat-lr0.003-seed1")
    code, _, err = run(diverging, "variants", "--models", "pythia", "cat")
    assert code == 0, err
    record = read(tmp_path, "variants")
    (found,) = (x for x in record["contrasts"] if x["x"] == 128)
    assert (found["lost"], found["low"], found["verdict"]) == (1, None, "unclear")
    assert record["diverged"][0]["seed"] == 1
    assert "Diverged" in (tmp_path / "out/variants.md").read_text(encoding="utf-8")


def test_command_that_fails_is_one_line_and_other_runs_are_kept(run):
    failing = Imitation(fails="seed1.*export|export.*seed1")
    code, out, err = run(failing, "maps", "--models", "pythia")
    assert code == 2 and err.count("\n") == 1 and "ValueError: no such thing" in err
    assert "cat_lm.export ended with code 1, see " in err and ".log:" in err
    code, out, _ = run(again := Imitation(), "maps", "--models", "pythia")
    assert code == 0 and "2 runs, 1 to do" in out
    assert not any("-seed0" in call for call in again.calls)
    code, _, err = run(Imitation(precision="bf16"), "maps", "--models", "pythia", "mh_cat")
    assert code == 2 and "another precision (bf16, fp32)" in err


def test_models_that_do_not_fit_are_refused_where_they_are_asked_for(
    run, monkeypatch, tmp_path, long_corpus
):
    code, _, err = run(Imitation(), "rivals", "--models", "pythia", "mamba")
    assert code == 2 and "mamba: has " in err and "with a vocabulary of 257, " in err
    of_documents = {"tokens": [1, 1], "nats": [1.0, 2.0]}
    found = {"loss": 1.5, "counts": 2.0, "documents": of_documents}
    slices = {name: found for name in recalled.SLICES}
    monkeypatch.setattr(language, "score_recalled", lambda *_: slices)
    code, _, err = run(Imitation(), "rivals", "--models", "pythia", "cat")
    assert code == 0, err
    rows = {x["row"] for x in read(tmp_path, "rivals")["contrasts"]}
    assert rows == {long_corpus.name, "recall"}
    cell = language.Cell("mta", "cpu", ((str(long_corpus), ""),), 1e-3, lengths=(1024,))
    with pytest.raises(UserError, match="mta is to be read up to 1024 tokens: attention=multi"):
        grids.check(QUESTIONS["rank"], [cell], tmp_path)


def test_all_texts_are_scored_and_one_is_trained_on(run, long_corpus, tmp_path):
    shutil.copytree(long_corpus, other := tmp_path / "books")
    words = ("--models", "pythia", "cat", "--data", long_corpus, other)
    code, _, err = run(found := Imitation(), "variants", *words)
    assert code == 0, err
    swept = [call for call in found.calls if "length_sweep" in call]
    assert len(swept) == 8 and sum(f"--data {other} " in call for call in swept) == 4
    assert all(("--skip-tokens" in c) == (f"--data {other} " not in c) for c in swept)
    record = read(tmp_path, "variants")
    assert {x["row"] for x in record["contrasts"]} == {long_corpus.name, "books"}
    assert {x["comparisons"] for x in record["contrasts"]} == {4}


def test_text_of_another_tokenizer_or_the_same_name_is_refused(run, long_corpus, tmp_path):
    shutil.copytree(long_corpus, other := tmp_path / "other")
    tokenizer = other / "tokenizer/tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    manifest = json.loads((other / "manifest.json").read_text())
    digest = hashlib.sha256(tokenizer.read_bytes()).hexdigest()
    manifest["tokenizer"]["sha256"] = digest
    manifest["fingerprint"] = fingerprint(listed_shards(manifest), digest)
    (other / "manifest.json").write_text(json.dumps(manifest))
    code, _, err = run(Imitation(), "maps", "--data", long_corpus, other)
    assert code == 2 and f"--data {other}: was prepared with another tokenizer" in err
    code, _, err = run(Imitation(), "maps", "--data", long_corpus, long_corpus)
    assert code == 2 and "there is another folder of this name" in err


def test_library_is_prepared_without_codec_tables(long_corpus, monkeypatch, tmp_path):
    def imitated(words, **options):
        assert words[words.index("--exclude") + 1] == "encodings/*"
        shutil.copytree(long_corpus, words[words.index("--out") + 1])
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(grids.subprocess, "run", imitated)
    monkeypatch.setattr(grids, "ROOT", tmp_path)
    ((folder, _),) = grids.texts((), "smoke", 2048, None)
    assert folder == str(tmp_path / "data/python-stdlib-smoke")


def test_attention_is_measured_behind_what_is_skipped(long_corpus, monkeypatch):
    import cat_lm.pretrained.loading
    from eval.language import attention

    found = []
    monkeypatch.setattr(cat_lm.pretrained.loading, "load_model", lambda folder, device: None)
    monkeypatch.setattr(attention, "attention_statistics", lambda _, rows: found.append(rows))
    attention.sharpness(Path(), "cpu", long_corpus, 128, 32_768)
    wanted = open_verified(long_corpus, "validation").tokens(32_768, 32_768 + ROWS * 128)
    assert found[0].shape == (ROWS, 128) and found[0].flatten().tolist() == wanted.tolist()
