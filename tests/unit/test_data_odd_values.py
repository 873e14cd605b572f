"""The data commands with paths and files that nobody means: one line, code 2, nothing written."""

import os

import pyarrow as pa
import pyarrow.parquet
import pytest

from data_prep import adopt, inspect, prepare

LONG = "x" * 300
ODD = ("long", "loop", "in loop", "below a file", "zero", "empty")


@pytest.fixture
def odd(tmp_path):
    """Paths by name; those that are missing are not there."""
    folder = tmp_path / "odd"
    folder.mkdir()
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "nothing").symlink_to(folder / "gone")
    (folder / "text.txt").write_text("some words\n\nand more\n\nand others\n\nand the last")
    (folder / "latin.txt").write_bytes(b"\xe9t\xe9")
    (folder / "file.json").write_text("[1]")
    return {
        "long": folder / LONG,
        "loop": folder / "loop",
        "in loop": folder / "loop" / "x",
        "nothing": folder / "nothing",
        "below a file": folder / "text.txt" / "x",
        "proc": "/proc/nowhere",
        "latin": folder / "latin.txt",
        "json": folder / "file.json",
        "folder": folder,
        "text": folder / "text.txt",
        "empty": "",
        "zero": "a\0b",
    }


def answer(module, monkeypatch, capsys, arguments):
    monkeypatch.setattr("sys.argv", ["command", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0]


PREPARE = [
    *((flag, name) for flag in ("--path", "--tokenizer") for name in ("long", "in loop", "zero")),
    *(("--path", name) for name in ("loop", "nothing", "below a file", "latin", "json", "empty")),
    *(("--tokenizer", name) for name in ("loop", "nothing", "below a file", "latin", "json")),
    *(("--tokenizer", name) for name in ("folder", "text", "empty")),
    *(("--out", name) for name in ("long", "loop", "in loop", "below a file", "proc", "text")),
    *(("--out", name) for name in ("nothing", "empty", "zero")),
    *(("--scratch", name) for name in ("long", "loop", "in loop", "below a file", "proc", "text")),
    *(("--scratch", name) for name in ("nothing", "empty", "zero")),
]


@pytest.mark.parametrize(("flag", "name"), PREPARE)
def test_prepare(odd, tmp_path, monkeypatch, capsys, flag, name):
    arguments = {"--source": "files", "--path": odd["text"], "--tokenizer": "bytes"}
    arguments |= {"--out": tmp_path / "out", "--workers": 1, "--document-separator": r"\n\n"}
    arguments |= {"--validation-fraction": 0.4, flag: odd[name]}
    before = sorted(os.listdir(odd["folder"]))
    given = [part for pair in arguments.items() for part in pair]
    answer(prepare, monkeypatch, capsys, given)
    assert sorted(os.listdir(odd["folder"])) == before
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize(
    "name", ["long", "loop", "in loop", "below a file", "folder", "text", "zero"]
)
def test_inspect(odd, monkeypatch, capsys, name):
    answer(inspect, monkeypatch, capsys, [odd[name]])


@pytest.mark.parametrize("flag", ["--out", "--json", "--scratch"])
@pytest.mark.parametrize("name", [*ODD, "proc"])
def test_where_inspect_writes(odd, tiny_corpus, monkeypatch, capsys, flag, name):
    if (flag, name) == ("--json", "loop"):
        pytest.skip("a link that leads nowhere is replaced by the file, as any file is")
    answer(inspect, monkeypatch, capsys, [tiny_corpus, "--samples", 0, flag, odd[name]])


@pytest.mark.parametrize("name", [*ODD, "proc"])
def test_adopt(odd, tiny_corpus, tmp_path, monkeypatch, capsys, name):
    whole = [tiny_corpus / "train-00000", "--validation", tiny_corpus / "validation-00000"]
    whole += ["--tokenizer", "bytes", "--out"]
    answer(adopt, monkeypatch, capsys, [*whole, odd[name]])
    if name != "proc":
        answer(adopt, monkeypatch, capsys, [odd[name], *whole[1:], tmp_path / "out"])


@pytest.mark.parametrize("damage", ["page", "footer", "cut"])
def test_damaged_parquet_is_one_line(odd, tmp_path, monkeypatch, capsys, damage):
    file = odd["folder"] / "x.parquet"
    texts = [f"a text of some length, number {n}" for n in range(2000)]
    pyarrow.parquet.write_table(pa.table({"text": texts}), file, compression="snappy")
    data = bytearray(file.read_bytes())
    if damage == "page":
        data[40:400] = bytes(360)
    elif damage == "footer":
        data[-200:-20] = bytes(180)
    else:
        del data[-30:]
    file.write_bytes(data)
    given = ["--source", "files", "--path", file, "--tokenizer", "bytes", "--workers", 1]
    line = answer(prepare, monkeypatch, capsys, [*given, "--out", tmp_path / "out"])
    assert str(file) in line
