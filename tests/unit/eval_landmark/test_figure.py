"""The figure: what is one series, one point and one seed of it."""

import json
import math

import numpy as np
import pytest


def test_needles_by_length(command, tmp_path):
    """Seeds are one line, of the rate that validation chooses; chance is the task's."""

    def cell(name, mixer, lr, seed, valid, **accuracies):
        options = {"task": "needle:vocab_size=64", "seq_len": 32, "d_model": 16}
        tests = {n: {"seq_len": int(n[1:]), "accuracy": a} for n, a in accuracies.items()}
        named = {"label": mixer, "options": {}}
        values = {"format": 1, "cell": options | {"lr": lr, "seed": seed}, "mixer": named}
        values |= {"validation": {"accuracy": valid}, "tests": tests}
        (tmp_path / "cells" / f"{name}.json").write_text(json.dumps(values))

    (tmp_path / "cells").mkdir()
    cell("a", "landmark", 1e-2, 0, 0.9, L32=0.9, L1024=0.5)
    cell("b", "landmark", 1e-2, 1, 0.7, L32=0.7, L1024=0.3)
    cell("c", "landmark", 1e-3, 0, 0.6, L32=1.0, L1024=1.0)  # better where nobody may look
    cell("d", "none", 1e-2, 0, 0.0, L32=0.03, L1024=0.03)
    cell("lost", "none", 1e-1, 0, -math.inf, L32=-math.inf, L1024=-math.inf)  # not the best rate
    (tmp_path / "cells/e.json").write_text(json.dumps({"cell": {"task": "mqar"}}))
    out = tmp_path / "out"
    code, said, err = command("figure", "--recall", tmp_path, "--out", out)
    assert code == 0 and "0.300 to 0.500" in said, err
    points = json.loads((out / "landmark.json").read_text())["needles"]
    assert [(p["series"], p["length"], p["seeds"]) for p in points] == [
        ("landmark", 32, 2), ("landmark", 1024, 2), ("none", 32, 1), ("none", 1024, 1),
    ]  # fmt: skip
    assert [p["accuracy"] for p in points] == pytest.approx([0.8, 0.4, 0.03, 0.03])
    assert all(p["chance"] == 1 / 32 for p in points) and points[0]["lr"] == 1e-2
    assert (out / "landmark.png").stat().st_size > 1000
    (tmp_path / "empty").mkdir()
    cell("g", "landmark", 1e-2, 2, 0.99, L32=0.99, L1024=-math.inf)
    code, _, err = command("figure", "--recall", tmp_path, "--out", tmp_path / "other")
    assert code == 2 and "landmark at the rate 0.01 diverged with seed 2, so that" in err
    (tmp_path / "cells/g.json").unlink()
    cell("f", "landmark", 1e-2, 2, 0.7, L32=0.7)
    other = tmp_path / "cells/f.json"
    other.write_text(
        other.read_text().replace('"seq_len": 32, "d_model"', '"seq_len": 16, "d_model"')
    )
    for folder, named in (
        (tmp_path / "empty", "has no finished one"),
        (tmp_path, "draw one alone"),
    ):
        code, _, err = command("figure", "--recall", folder, "--out", tmp_path / "other")
        assert code == 2 and "error: --recall" in err and named in err and err.count("\n") == 1
    for more, said in (({}, "has no format, must be 1"), ({"format": 1}, "has no 'tests'")):
        other.write_text(json.dumps({"cell": {"task": "needle"}} | more))
        code, _, err = command("figure", "--recall", tmp_path, "--out", tmp_path / "other")
        assert code == 2 and f"f.json: {said}" in err


NEEDLE = {"task": "needle:vocab_size=64", "mixer": "cat", "seq_len": 32, "d_model": 16, "lr": 1e-2}


def needles(path, accuracy=0.5, lengths=(32,), layers=2, **options):
    """Write a cell of one validation accuracy, with the same one at every length."""
    cell = NEEDLE | {"seed": 0, "epochs": 64, "layers": None, "test_lengths": []} | options
    name = {"label": cell["mixer"].partition(":window=4")[0], "options": {"window": 4}}
    tests = {str(i): {"seq_len": n, "accuracy": accuracy} for i, n in enumerate(lengths)}
    values = {
        "format": 1,
        "cell": cell,
        "mixer": name,
        "layers": cell["layers"] or layers,
        "tests": tests,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values | {"validation": {"accuracy": accuracy}}))


def drawn_needles(command, *folders, out):
    code, _, err = command("figure", "--recall", *folders, "--out", out)
    assert code == 0, err
    points = json.loads((out / "landmark.json").read_text())["needles"]
    return [(p["series"], p["length"], p["seeds"], p["accuracy"]) for p in points]


def test_needles_of_other_options_are_no_seeds(command, tmp_path):
    cells = tmp_path / "cells"
    needles(cells / "a.json", 0.9)
    needles(cells / "b.json", 0.8, epochs=1)
    needles(cells / "c.json", 0.7, layers=1)  # of a mixer that had another default
    needles(cells / "d.json", 0.6, d_model=64, test_lengths=[48])
    needles(cells / "e.json", 0.1, mixer="none", layers=1)
    found = drawn_needles(command, tmp_path, out=tmp_path / "out")
    usual = "cat, d 16, epochs 64"
    assert found == [
        ("cat, d 16, epochs 1, layers 2", 32, 1, 0.8),
        (f"{usual}, layers 1", 32, 1, 0.7),
        (f"{usual}, layers 2", 32, 1, 0.9),
        ("cat, d 64, epochs 64, layers 2", 32, 1, 0.6),
        # Its layers are its own: cells of other mixers do not make them worth a word.
        ("none, d 16, epochs 64", 32, 1, 0.1),
    ]


def test_needles_of_one_model_however_it_is_asked_for_are_one_series(command, tmp_path):
    cells = tmp_path / "cells"
    needles(cells / "a.json", 0.9)
    needles(cells / "b.json", 0.7, seed=1, layers=2, test_lengths=[48])
    needles(cells / "c.json", 0.5, seed=2, mixer="cat:window=4")
    (point,) = drawn_needles(command, tmp_path, out=tmp_path / "out")
    assert point == ("cat", 32, 3, pytest.approx(0.7))


def test_a_length_that_is_tested_twice_counts_once(command, tmp_path):
    needles(tmp_path / "cells/a.json", 0.9, lengths=(32, 32, 48, 48))
    needles(tmp_path / "cells/b.json", 0.7, lengths=(32, 48), seed=1)
    mean = pytest.approx(0.8)
    found = drawn_needles(command, tmp_path, out=tmp_path / "out")
    assert found == [("cat", 32, 2, mean), ("cat", 48, 2, mean)]


def test_two_cells_of_one_seed_are_one_line(command, tmp_path):
    for name in "ab":
        needles(tmp_path / name / "cells/x.json", 0.9)
        needles(tmp_path / name / f"cells/{name}.json", 0.9, lr=0.1, seed=ord(name))
    folders = [tmp_path / name for name in "ab"]
    code, _, err = command("figure", "--recall", *folders, "--out", tmp_path / "out")
    first, second = (folder / "cells/x.json" for folder in folders)
    named = f"--recall: {first} and {second} are of the same model and rate, both with seed 0;"
    assert code == 2 and named in err and err.count("\n") == 1 and not (tmp_path / "out").exists()
    assert len(drawn_needles(command, folders[0], folders[0], out=tmp_path / "out")) == 1


def swept(label, over, **values):
    """A row of a sweep."""
    row = {"label": label, "select": "box", "top_k": 1, "block": 4, "local": 2, "length": 64}
    row |= {
        "share": 0.1,
        "over_dense": over,
        "model_sha256": f"of {label}",
        "tokens_sha256": "1" * 64,
    }
    return row | values


def test_sweeps_of_other_rows_are_no_seeds(command, tmp_path):
    """Other near blocks and other texts are other points; a row that comes twice is one."""
    files = [tmp_path / f"{i}.json" for i in range(4)]
    rows = [
        [swept("mine-0", 0.1), swept("mine-0", 0.5, local=16, share=0.7)],
        [swept("mine-1", 0.3), swept("mine-1", 0.9, tokens_sha256="2" * 64)],
        [swept("mine-0", 0.1), swept("mine-2", 0.2)],
    ]
    for file, own in zip(files[:3], rows, strict=True):
        file.write_text(json.dumps({"format": 1, "rows": own, "text": "t"}))
    out = tmp_path / "out"
    code, said, err = command("figure", "--sweeps", *files[:3], "--out", out)
    assert code == 0 and "mine, local 16, text 11111111" in said, err
    points = json.loads((out / "landmark.json").read_text())["perplexity"]
    found = [(p["series"], p["share"], p["seeds"], pytest.approx(p["over_dense"])) for p in points]
    assert found == [
        ("mine, local 2, text 11111111", 0.1, 3, 0.2),
        ("mine, local 2, text 22222222", 0.1, 1, 0.9),
        ("mine, local 16, text 11111111", 0.7, 1, 0.5),
    ]
    assert points[2]["local"] == 16 and points[1]["tokens_sha256"] == "2" * 64
    for name, value, was in (("model_sha256", "of another", "of mine-0"), ("over_dense", 0.2, 0.1)):
        own = [swept("mine-0", **{"over": 0.1, name: value})]
        files[3].write_text(json.dumps({"format": 1, "rows": own, "text": "t"}))
        words = ("--sweeps", files[0], files[3], "--out", tmp_path / "other")
        code, _, err = command("figure", *words)
        assert (
            code == 2 and f"--sweeps: {name} of mine-0, box, top-k 1 is {was} and {value};" in err
        )
        assert err.count("\n") == 1 and not (tmp_path / "other").exists()


def test_sweeps_are_drawn_at_the_largest_length_that_all_have(command, tmp_path):
    """A model that was not read at the largest of any one is drawn beside the others."""
    files = [tmp_path / f"{i}.json" for i in range(3)]
    at = [(64, 128), (64,), (32,)]
    for file, name, lengths in zip(files, ("long", "short", "other"), at, strict=True):
        rows = [swept(name, 0.1 + length / 1000, length=length) for length in lengths]
        file.write_text(json.dumps({"format": 1, "rows": rows, "text": "t"}))
    out = tmp_path / "out"
    code, _, err = command("figure", "--sweeps", *files[:2], "--out", out)
    assert code == 0, err
    points = json.loads((out / "landmark.json").read_text())["perplexity"]
    assert [(p["series"], p["length"]) for p in points] == [("long", 64), ("short", 64)]
    code, _, err = command("figure", "--sweeps", *files, "--out", tmp_path / "none")
    assert code == 2 and "--sweeps: no length is in all of them; draw those" in err
    assert err.count("\n") == 1 and not (tmp_path / "none").exists()


def test_figure(command, tmp_path):
    """Heads are put in bins of x, seeds are one series, and what is drawn is written."""

    def head(snr, block, top_k, far, retrieved):
        law = {"predicted": retrieved / 2, "rivals": 30.0}
        choice = {"block": block, "top_k": top_k, "retrieved": retrieved}
        return choice | law | {"snr_squared": snr, "far": far}

    def cell(label, select, top_k, over, block=4):
        return swept(label, over, select=select, top_k=top_k, block=block, share=0.1 * top_k)

    def written(name, **values):
        (tmp_path / name).write_text(json.dumps({"format": 1} | values))
        return tmp_path / name

    needed = 2 * 4 * np.log(30 / 2)
    first = [head(needed, 4, 2, 0.3, 1.0), head(needed, 4, 2, 0.1, 0.6)]
    second = [head(4 * needed, 4, 2, 0.3, 1.0), head(9.0, 4, 30, 0.3, 0.0)]  # the last has no x
    diagnoses = [
        written(f"d{i}.json", rows=rows, wanted=0.9, label=f"mine-{i}")
        for i, rows in enumerate((first, second))
    ]
    sweeps = []
    for i in range(2):
        rows = [cell(f"mine-{i}", "box", 1, 0.1 + 0.2 * i), cell(f"mine-{i}", "box", 1, 9.0, 8)]
        rows.append(cell(f"mine-{i}", "dense", 0, 0.0, None))
        sweeps.append(written(f"s{i}.json", text="t", rows=rows))
    times = {"dense": "sdpa", "seconds": {"sdpa": {"median": 0.5}, "landmark": {"median": 0.1}}}
    row = {"name": "cat", "case": {"context": 64}, "layer": times, "model": times}
    contexts = written("c.json", contexts=[row, row | {"case": {"context": 128}}])
    words = ("--diagnoses", *diagnoses, "--sweeps", *sweeps, "--contexts", contexts)
    out = tmp_path / "out"
    code, said, err = command("figure", *words, "--out", out)
    assert code == 0 and "+20.00%" in said, err
    found = json.loads((out / "landmark.json").read_text())
    assert [point["series"] for point in found["retrieval"]] == ["mine", "mine"]
    near, far = found["retrieval"]
    assert near["x"] == pytest.approx(1) and far["x"] == pytest.approx(4)
    assert near["heads"] == 2 and near["retrieved"] == pytest.approx(0.9)
    assert near["predicted"] == pytest.approx(0.45)
    (point,) = found["perplexity"]
    assert point["seeds"] == 2 and point["over_dense"] == pytest.approx(0.2)
    assert point["block"] == 4 and point["range"] == pytest.approx([0.1, 0.3])
    named = {(p["part"], p["attention"], p["context"]): p["ms"] for p in found["decoding"]}
    assert len(named) == 8 and named["layer", "landmark", 128] == pytest.approx(100)
    assert all((out / f"landmark.{kind}").stat().st_size > 1000 for kind in ("png", "svg"))
    other_out = tmp_path / "other"
    other = written("other.json", rows=first, wanted=0.9, label="mine-0", text="t")
    nothing = written("nothing.json", contexts=[3])
    empty = written("empty.json", rows=[], contexts=[], text="t", wanted=0.9)
    for words, said in (
        (("--sweeps", diagnoses[0]), "has no 'text'"),
        (("--sweeps", other), "is not the record that is asked for (KeyError: 'label')"),
        (("--sweeps", empty), "its rows are empty"),
        (("--diagnoses", empty), "its rows are empty"),
        (("--contexts", empty), "its contexts are empty"),
        (("--contexts", nothing), "is not the record that is asked for (TypeError: "),
        (("--sweeps", *sweeps, "--block", 5), "--block 5: all sweeps have 4, 8"),
        (("--contexts", contexts, "--block", 5), "--block 5: says nothing without --sweeps"),
        ((), "nothing to draw"),
    ):
        code, _, err = command("figure", *words, "--out", other_out)
        assert code == 2 and said in err and err.count("\n") == 1 and not other_out.exists()
