"""Ways to choose blocks against their definitions, the sweep, and the diagnosis."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from cat_lm.core.errors import UserError
from cat_lm.ops.landmark import select as select_module
from cat_lm.ops.landmark.layout import sequence_blocks
from cat_lm.ops.long_filter import filters
from cat_lm.ops.long_filter.chunks import taps_of
from cat_lm.sparsify import dense_model, sparsify
from eval.landmark import __main__ as program
from eval.landmark import choosers as choosing
from eval.landmark import diagnose as diagnosing
from eval.landmark import sweep as sweeping
from eval.landmark.options import LEARNED, SELECTORS, Grid, Questions, Selection
from eval.length_sweep.perplexity import score_tokens
from tests.calls import call_main
from tests.tiny_models import GROUPED, cat_model, random_ids

FIELDS = {"vocab_size": 257, "max_position_embeddings": 64}
FAMILIES = {"cat": {"conv_window": 3}, "llama": GROUPED}
BLOCK = 4


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs the command: its exit code, stdout and stderr."""
    return lambda *words: call_main(program.main, monkeypatch, capsys, "eval.landmark", *words)


def saved(folder, tiny_corpus, family="cat", **options):
    model = cat_model(**FIELDS, **FAMILIES[family], **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("query_key_value.weight", "q_proj.weight", "k_proj.weight")):
                parameter.mul_(4)  # so that the choice of blocks matters
    model.save_pretrained(folder)
    shutil.copytree(tiny_corpus / "tokenizer", folder, dirs_exist_ok=True)
    return folder


def drawn(heads=4, shared=2, time=18, width=8):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, heads, time, width, generator=generator)
    key = torch.randn(2, shared, time, width, generator=generator)
    return choosing.Streams(query, key, 0.3)


@pytest.mark.parametrize("name", SELECTORS)
def test_scores_are_the_definition(name):
    streams = drawn()
    layout = sequence_blocks(18, BLOCK, None, None, streams.key.device)
    state = 4 if name == "ssm" else 0
    config = cat_model(**FIELDS, **GROUPED).config
    module = None
    if name in (*LEARNED, *choosing.FIXED):
        module = choosing.make_core(config, name, BLOCK, state)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter += 0.1 * torch.randn(parameter.shape)
    rows = slice(13, 18)
    scores = choosing.prepared_scores(name, streams, layout, 1, module)(
        rows, layout.of_queries(rows)
    ).detach()
    assert scores.shape[1:] == (4, 5, 4)
    again = choosing.prepared_scores(name, streams, layout, 1, module)(
        rows, layout.of_queries(rows)
    )
    assert torch.equal(scores, again.detach())
    for head, t, j in ((0, 13, 0), (3, 15, 2), (1, 17, 3)):
        query, keys = streams.query[1, head, t], streams.key[1, head // 2]
        own, found = keys[j * BLOCK : (j + 1) * BLOCK], scores[1, head, t - 13, j]
        if name == "box":
            expected = query @ own.mean(dim=0)
        elif name == "exponential":
            decay = torch.exp(-torch.arange((j + 1) * BLOCK) / BLOCK)
            weights = decay / decay[:BLOCK].sum()
            expected = query @ (keys[: (j + 1) * BLOCK].flip(0) * weights[:, None]).sum(dim=0)
        elif name == "learned":
            landmark = (own.flip(0) * module.filter[head // 2][:, None]).sum(dim=0)
            expected = query @ landmark
        elif name == "ssm":
            modes = filters.get("ssm").modes_of(module.filter, 4)
            taps = taps_of(modes, (j + 1) * BLOCK)[head // 2]
            expected = query @ (keys[: (j + 1) * BLOCK].flip(0) * taps[:, None]).sum(dim=0)
        elif name == "oracle":
            if j > t // BLOCK - 1:
                continue
            weights = (keys[: t + 1] @ query * 0.3).softmax(dim=0)
            expected = weights[j * BLOCK : (j + 1) * BLOCK].sum().log()
        elif name == "local":
            expected = torch.tensor(float(j))
        else:
            assert 0 <= found < 1 and scores.unique().numel() == scores.numel()
            continue
        torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name, state", [("learned", 0), ("ssm", 4)])
def test_learned_chooses_as_a_model_with_its_filter(name, state, monkeypatch):
    """Also where heads share keys, and each head weighs its blocks with a sharpness of its own."""
    options = {"block": BLOCK, "top_k": 1, "local": 1, "filter": name, "filter_state": state}
    model = cat_model(**FIELDS, **GROUPED, attention="landmark", attention_options=options)
    choosers = choosing.add_choosers(model)
    generator = torch.Generator().manual_seed(0)
    for chooser in choosers:
        learned = choosing.make_core(model.config, name, BLOCK, state)
        with torch.no_grad():
            learned.filter += 0.3 * torch.randn(learned.filter.shape, generator=generator)
            learned.sharpness += 2 * torch.randn(learned.sharpness.shape, generator=generator)
            chooser.dense.filter.copy_(learned.filter)
            chooser.dense.sharpness.copy_(learned.sharpness)
        chooser.learners = {(name, BLOCK): learned}
    chosen, select = [], select_module.select_blocks

    def kept(*given):
        chosen.append(select(*given))
        return chosen[-1]

    monkeypatch.setattr(select_module, "select_blocks", kept)
    monkeypatch.setattr(choosing, "select_blocks", kept)
    ids, found = random_ids(2, 61), {}
    for selection in (None, Selection(name, BLOCK, 1, 1)):
        chosen.clear()
        for chooser in choosers:
            chooser.selection = selection
        found[selection is None] = [model(ids, use_cache=False).logits, *chosen]
    assert len(found[True]) == 3
    for swept, own in zip(found[False], found[True], strict=True):
        torch.testing.assert_close(swept, own)


def test_drawn_blocks_differ_between_layers():
    layout = sequence_blocks(18, BLOCK, None, None, torch.device("cpu"))
    one, other = (
        choosing.prepared_scores("random", replace(drawn(), layer=layer), layout, 1, None)
        for layer in (0, 1)
    )
    assert not torch.isclose(one(slice(None), layout), other(slice(None), layout)).any(-1).all()


def test_what_is_read_is_counted():
    for length, block, top_k, local in ((23, 4, 2, 1), (16, 4, 0, 2), (9, 8, 1, 1)):
        read = 0
        for t in range(length):
            near = [s for s in range(t + 1) if s // block > t // block - local]
            read += len(near) + block * min(top_k, max(0, t // block - local + 1))
        assert sweeping.keys_read(length, block, top_k, local) == (read, length * (length + 1) / 2)
    config = cat_model(**FIELDS, **GROUPED).config
    assert choosing.selector_bytes("box", config, 64, 4, 4) == 16 * 2 * 8 * 4
    assert choosing.selector_bytes("oracle", config, 64, 4, 4) == 4 * 16 * 2 * 8 * 4
    assert choosing.selector_bytes("local", config, 64, 4, 4) == 0


def test_sweep(command, tiny_corpus, tmp_path, monkeypatch):
    folder, out = saved(tmp_path / "model", tiny_corpus, "llama"), tmp_path / "out"
    words = [
        *("sweep", folder, "--data", tiny_corpus, "--lengths", "32", "--blocks", "4"),
        *("--top-k", "1,99", "--local", "1", "--select", ",".join(SELECTORS)),
        *("--calibrate", tiny_corpus, "--tokens", 4 * 32, "--max-tokens", 320, "--out", out),
    ]
    code, said, err = command(*words)
    assert code == 0, err
    record = json.loads((out / "landmark_sweep.json").read_text())
    rows = {(row["select"], row["top_k"]): row for row in record["rows"]}
    assert len(rows) == 1 + 2 * len(SELECTORS) and all(name in said for name in SELECTORS)
    dense = rows["dense", None]
    assert dense["share"] == 1 and dense["over_dense"] == 0
    for name in SELECTORS:
        whole, part = rows[name, 99], rows[name, 1]
        assert whole["share"] == 1 and abs(whole["loss"] - dense["loss"]) < 1e-5
        assert abs(whole["over_dense"]) < 1e-5 < abs(part["over_dense"])
        assert part["share"] == pytest.approx(np.divide(*sweeping.keys_read(32, 4, 1, 1)))
        assert part["over_dense_error"] > 0 and part["groups"] > 1
    # What differs in how blocks are chosen differs in what is predicted.
    assert len({rows[name, 1]["loss"] for name in SELECTORS}) == len(SELECTORS)
    # A model that was made sparse has the same loss.
    sparse, _, _ = sparsify(folder, tmp_path / "sparse", {"block": 4, "top_k": 1, "local": 1})
    from cat_lm.pretrained.loading import load_model, load_tokenizer
    from eval.length_sweep.token_stream import split_stream

    stream = split_stream(tiny_corpus, load_tokenizer(folder), 320)
    scored = score_tokens(load_model(sparse), stream.tokens, 32, num_bytes=1, num_words=1)
    assert scored.loss == pytest.approx(rows["box", 1]["loss"], abs=1e-6)
    for name in ("landmark_sweep.csv", "landmark_sweep.png", "landmark_sweep.svg"):
        assert (out / name).stat().st_size > 100
    # Nothing is computed or learned twice; a damaged cell is computed again.
    monkeypatch.setattr(sweeping.Cells, "_compute", lambda *_: pytest.fail("computed"))
    monkeypatch.setattr(choosing, "calibrate", lambda *_: pytest.fail("learned"))
    monkeypatch.setattr(sweeping, "_draw", lambda *_: None)
    assert command(*words)[0] == 0
    for file in (out / "learned").iterdir():
        file.write_bytes(b"nothing")
    code, _, err = command(*words)
    assert code == 2 and "damaged" in err and err.count("\n") == 1


def test_learned_selectors_learn_alone(tiny_corpus, tmp_path):
    model = dense_model(saved(tmp_path / "model", tiny_corpus))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids = random_ids(2, 32)
    expected = model(ids, use_cache=False).logits
    choosers = choosing.add_choosers(model)
    assert [chooser.layer for chooser in choosers] == [0, 1]
    torch.testing.assert_close(model(ids, use_cache=False).logits, expected)
    sizes = {"lengths": (32,), "select": LEARNED, "blocks": (4, 8), "local": 1}
    grid = Grid(calibrate=str(tiny_corpus), tokens=30 * 4 * 32, **sizes)
    how = model, choosers, grid, 32, tmp_path / "learned", {}
    name = choosing.learn(*how)
    for key in ((name_, block) for name_ in LEARNED for block in (4, 8)):
        losses = np.mean([chooser.taught[key] for chooser in choosers], axis=0)
        assert len(losses) == 30 and losses[-6:].mean() < losses[:6].mean()
    after = {name.replace("core.dense.", "core."): x for name, x in model.state_dict().items()}
    assert all(torch.equal(after[key], value) for key, value in before.items())
    learned = [x.clone() for x in choosers[0].learners["ssm", 4].parameters()]
    assert choosing.learn(*how) == name
    for one, other in zip(learned, choosers[0].learners["ssm", 4].parameters(), strict=True):
        assert torch.equal(one, other)
    path = tmp_path / "learned" / f"{name}.json"
    path.write_text(path.read_text().replace("0.", "1.", 1))
    with pytest.raises(UserError, match=r"\.json: damaged: was changed after it was written"):
        choosing.learn(*how)


def test_diagnosis_of_drawn_products():
    """Independent normals with a planted match behave by the law; clumped keys do not."""
    heads, time, width = 400, 256, 4
    questions = Questions(length=time, blocks=(8,), top_k=(1, 4), local=1)
    generator = torch.Generator().manual_seed(1)
    products = torch.randn(heads, time, generator=generator)
    products[:, 77] = 9.0

    def sums_of(products):
        # Keys of one channel that counts, so that q·k is what was drawn.
        key = torch.zeros(1, heads, time, width)
        key[0, :, :, 0] = products
        query = torch.zeros_like(key)
        query[..., 0] = 1
        streams = choosing.Streams(query, key, 1.0)
        found = {}
        drawn = torch.tensor([time - 1, 3])  # the second has no choice
        diagnosing.add_window(found, streams, drawn, questions)
        return diagnosing.head_rows(found, questions)

    rows = sums_of(products)
    assert len(rows) == 2 * heads and all(row["queries"] == 1 for row in rows)
    assert all(row["rivals"] == 30 for row in rows)
    assert 8.8 < np.sqrt([row["snr_squared"] for row in rows]).mean() < 9.2
    assert 0.9 < np.mean([row["clumping"] for row in rows]) < 1.1
    for k in (1, 4):
        own = [row for row in rows if row["top_k"] == k]
        predicted, retrieved = (np.mean([r[n] for r in own]) for n in ("predicted", "retrieved"))
        assert abs(predicted - retrieved) < 0.06 and 0.5 < retrieved < 0.999
        assert all(row["caught"] <= row["most"] + 1e-6 for row in own)
    clumped = torch.randn(heads, time // 8, 1, generator=generator).expand(-1, -1, 8).flatten(1)
    rows = sums_of(clumped)
    assert 6 < np.mean([row["clumping"] for row in rows]) <= 8
    assert all(row["retrieved"] == 1 for row in rows)  # its block is as high as itself
    means = [
        {"block": b, "top_k": 1, "predicted": p, "retrieved": 0.95, "caught": 0.2}
        for b, p in ((4, 0.99), (8, 0.91), (16, 0.5))
    ]
    assert diagnosing.tolerated_sizes(means, 0.9) == [
        {"top_k": 1, "predicted": 8, "retrieved": 16, "caught": None}
    ]


def test_retrieval_is_binned_over_heads():
    """Heads are put in bins of x, weighed by their far attention."""

    def head(snr, top_k, far, retrieved):
        choice = {"block": 4, "top_k": top_k, "retrieved": retrieved, "predicted": retrieved / 2}
        return choice | {"rivals": 30.0, "snr_squared": snr, "far": far}

    needed = 2 * 4 * np.log(30 / 2)
    rows = [head(needed, 2, 0.3, 1.0), head(needed, 2, 0.1, 0.6), head(4 * needed, 2, 0.3, 1.0)]
    near, far = diagnosing.retrieval_points([*rows, head(9.0, 30, 0.3, 0.0)])  # without a choice
    assert (near["x"], far["x"]) == (pytest.approx(1), pytest.approx(4)) and near["heads"] == 2
    assert near["retrieved"] == pytest.approx(0.9) and near["predicted"] == pytest.approx(0.45)


@pytest.mark.parametrize("family", FAMILIES)
def test_diagnose(family, command, tiny_corpus, tmp_path):
    folder, out = saved(tmp_path / "model", tiny_corpus, family), tmp_path / "out"
    words = ("--length", 64, "--windows", 3, "--queries", 16, "--blocks", "4,8", "--top-k", "1,30")
    words = ("diagnose", folder, "--data", tiny_corpus, *words, "--out", out)
    code, said, err = command(*words)
    assert code == 0, err
    record = json.loads((out / "diagnosis.json").read_text())
    assert len(record["rows"]) == 2 * 4 * 2 * 2  # layers, heads, blocks, numbers of blocks
    for row in record["rows"]:
        assert 0 < row["far"] < 1 and row["caught"] <= row["most"] + 1e-6 <= 1 + 2e-6
        if row["top_k"] == 30:
            named = ("predicted", "retrieved", "caught", "most")
            assert [row[name] for name in named] == pytest.approx([1] * 4, abs=1e-5)
    assert "of which top-k 30 keep 90% at 64 tokens: 8 as predicted, 8 as retrieved" in said
    assert record["bears"][1]["caught"] == 8
    for name in ("diagnosis.csv", "diagnosis.png", "diagnosis.svg"):
        assert (out / name).stat().st_size > 100


WRONG = {
    "sweep --select ssm": "--select ssm: is learned; give --calibrate",
    "sweep --select box --calibrate x": "--calibrate x: has no effect",
    "sweep --tokens 5": "--tokens 5: has no effect",
    "sweep --state 8": "--state 8: has no effect without --select ssm",
    "sweep --select ssm --state 5 --calibrate x": "--state 5: ",
    "sweep --select best": "--select: 'best' is not one of",
    "sweep --blocks 16": "--blocks 16: with --local 2 there is no block to choose",
    "diagnose --blocks 4,16": "--blocks 16: with --local 2 there is no block",
    "diagnose --length 25 --windows 1 --queries 1 --blocks 8": "none of those drawn has two blocks",
    "sweep --lengths 256 --blocks 32 --select learned --calibrate DATA": (
        "--local 2 there is no block to choose in rows of 64 tokens, from which"
    ),
}


@pytest.fixture(scope="module")
def model(tiny_corpus, tmp_path_factory):
    return saved(tmp_path_factory.mktemp("model"), tiny_corpus)


@pytest.mark.parametrize("words", WRONG)
def test_wrong_option_is_one_line(words, command, model, tiny_corpus, tmp_path):
    name, *more = words.replace("DATA", str(tiny_corpus)).split()
    usual = ("--blocks", "4", "--data", tiny_corpus, "--out", tmp_path / "out")
    usual += {"sweep": ("--lengths", "32"), "diagnose": ("--length", "32")}[name]
    code, out, err = command(name, model, *usual, *more)
    assert (code, out) == (2, "") and WRONG[words] in err.splitlines()[-1]
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").glob("*.json"))


def test_model_without_such_attention_is_refused(command, tiny_corpus, tmp_path):
    folder = saved(tmp_path / "model", tiny_corpus, conv_type="multihead", conv_mixing="maps")
    words = ("--data", tiny_corpus, "--lengths", "32", "--blocks", "4", "--out", tmp_path / "out")
    code, _, err = command("sweep", folder, *words)
    assert code == 2 and "mixed attention maps" in err.splitlines()[-1]
