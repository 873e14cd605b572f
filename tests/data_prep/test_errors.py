"""Bad input of data_prep.{prepare,inspect,adopt}: one line, exit code 2, nothing written."""

import shutil

import pyarrow
import pyarrow.parquet
import pytest

from data_prep import adopt, inspect, prepare
from tests.data_prep.helpers import json_lines

COMMANDS = {"prepare": prepare, "inspect": inspect, "adopt": adopt}
PREPARE = "prepare --source files --path {text}/x.jsonl --tokenizer bytes --workers 1 --out {out}"
SLIM = "prepare --source slimpajama --tokenizer bytes --out {out}"
HUB = "prepare --source {} --tokenizer bytes --out {{out}}"
RAW = "prepare --source raw-bytes --tokenizer bytes --out {out}"
ADOPT = "adopt {data}/train-00000 --tokenizer bytes --out {out}"
LONG = "x" * 300
TABLE = [
    (f"{PREPARE} --validation-fraction 0", "--validation-fraction: '0' must be greater than 0"),
    (f"{PREPARE} --validation-fraction 1", "must lie between 0 and 1"),
    (f"{PREPARE} --workers 0", "--workers: '0' must be from 1 to 4,096"),
    (f"{PREPARE} --seed {10**64}", "--seed: '1000000"),
    (f"{PREPARE} --set-key meta..x", "--set-key: 'meta..x' must be a key"),
    (f"{PREPARE} --path another", "--path: is given twice"),
    (f"{PREPARE} --mixture A=1 --mixture B=1", "--mixture: is given twice"),
    (f"{PREPARE} --eod-token=", "--eod-token: '' is no path, name or value"),
    (f"{PREPARE} --eod-token <nowhere>", "--eod-token"),
    (f"{PREPARE} --max-bytes -1", "--max-bytes: '-1' must be from 1 to 1,000,000"),
    (f"{PREPARE} --tokens 15X", "--tokens: '15X' must be a whole number such as 20000"),
    (f"{PREPARE} --tokens 1e99", "--tokens: '1e99' must be from 1 to 1,000,000"),
    (f"{PREPARE} --tokens 2M", "ask for fewer"),
    (f"{PREPARE} --tokens 9999B", "the input has about"),
    (f"{PREPARE} --mixture A=1,B", "--mixture: 'A=1,B' must be SET=NUMBER"),
    (f"{PREPARE} --mixture A=1,A=2", "which 'A=2' is not"),
    (f"{PREPARE} --mixture A={'9' * 5000}", "must be SET=NUMBER with a positive number"),
    (f"{PREPARE} --repeat A=0", "SET=NUMBER with a positive number"),
    (f"{PREPARE} --repeat A=9999999", "--repeat A=9999999: must be at most 1,000,000 times"),
    (f"{PREPARE} --repeat A=2 --tokens 1M", "--repeat does not go with --tokens"),
    (f"{PREPARE} --tokens 1M --max-documents 9", "--tokens does not go with --max-documents"),
    (f"{PREPARE} --mixture A=1 --exclude-sets A", "A: the set is left out by the other"),
    (f"{PREPARE} --sets ,", "--sets: ',' must be names or patterns, with commas"),
    (f"{PREPARE} --sets nowhere", "--sets nowhere: no such set; there are jsonl"),
    (f"{PREPARE} --exclude *.md", "--exclude *.md: matches no file; they have names such as x"),
    (f"{PREPARE} --exclude *", "--exclude *: leaves no file"),
    (f"{PREPARE} --files-share 0.5", "--files-share: only with --source hub or slimpajama"),
    (f"{SLIM} --files-share 0", "--files-share: '0' must be greater than 0"),
    (HUB.format("dcml"), "--source dcml: must be one of python-stdlib, files, hub, slimpajama"),
    (HUB.format("dcml"), "did you mean dclm?"),
    (HUB.format("hub"), "--source hub needs --path: hub:OWNER/NAME[/FOLDER][@REVISION], or"),
    (f"{HUB.format('hub:o/n')} --path x", "--path: does not go with --source hub:o/n"),
    (HUB.format("hub:owner"), "--path hub:owner: give hub:OWNER/NAME[/FOLDER][@REVISION]"),
    (f"{PREPARE} --max-malformed some", "--max-malformed: 'some' must be a number of lines"),
    (f"{PREPARE} --task 0/2", "--task goes with --stage encode"),
    (f"{PREPARE} --task 2/2 --stage encode", "--task: '2/2' must be I/N, with I from 0"),
    (f"{PREPARE} --nothing", "unrecognized arguments: --nothing"),
    (f"{PREPARE} --document-separator=", "--document-separator: ''"),
    (f"{PREPARE} --tokenizer absent.model", "--tokenizer absent.model: no such file"),
    (f"{PREPARE} --tokenizer {{text}}/{LONG}/x", "File name too long"),
    (f"{PREPARE} --tokenizer train:sentencepiece:99", "VOCAB must be at least 260"),
    (f"{PREPARE} --validation-path /absent", "--validation-path /absent: no such file or folder"),
    (f"{PREPARE} --text-key body", "x.jsonl:1: no text under the key 'body'"),
    (f"{PREPARE} --out /proc/nowhere", "--out /proc/nowhere: /proc may not be written to"),
    (f"{PREPARE} --scratch /proc/nowhere", "--scratch /proc/nowhere: /proc may not be written to"),
    (f"{PREPARE} --out {{text}}", "is not empty ('a.csv' is in it) and was not made by this"),
    (f"{PREPARE} --out {{text}}/a.csv", "is a file"),
    (f"{PREPARE} --splits 1,1", "--splits: only with --source raw-bytes"),
    ("prepare --source files --tokenizer bytes --out {out}", "needs --path: a file, a folder"),
    ("prepare --source python-stdlib --path x --tokenizer bytes --out {out}", "takes no --path"),
    (f"{SLIM}", "--source slimpajama needs --path: hub:DKYoon/SlimPajama-6B"),
    (f"{SLIM} --path {{text}} --validation-path x", "goes with --source files"),
    *(
        (f"prepare --source files --tokenizer bytes --out {{out}} --path {path}", words)
        for path, words in (
            ("{text}/absent", "no such file or folder"),
            ("{text}/a.csv", "unknown kind of file; known are .txt"),
            ("{text}/sub", "no file of a known kind in it"),
            ("{text}/loop", "--path"),
            ("{text}/latin.txt", "latin.txt: not UTF-8 (byte 0xe9 at 0)"),
            ("{text}/no.parquet", "no column 'text'; its columns are body"),
            ("{text}/empty.jsonl", "empty input, no document with any text"),
            ("{text}/half.jsonl.gz", "half.jsonl.gz: broken gzip file"),
            ("{text}/one.txt", "a single document of 5 bytes, in which no line and no word ends"),
        )
    ),
    (f"{RAW} --splits 9,9", "--source raw-bytes needs --path: a file"),
    *(
        (f"{RAW} --path {{text}}/one.txt {more}", words)
        for more, words in (
            ("", "--source raw-bytes needs --splits: bytes of each split"),
            ("--splits 9M,1,1", "--splits 9000000,1,1: are 9,000,002 bytes, and "),
            ("--splits 9", "--splits: '9' must be two or three numbers, such as 90M,5M,5M"),
            ("--splits 1,0,1", "--splits: '1,0,1' must be from 1 to 1,000"),
            ("--splits 1,1 --seed 3", "--seed: says nothing with --source raw-bytes; leave it out"),
            ("--splits 1,1 --exclude x", "--exclude: says nothing with --source raw-bytes"),
            ("--splits 1,1 --tokenizer train:sentencepiece:300", "has bytes for ids; give bytes"),
            ("--splits 1,1 --path /nowhere", "--path: is given twice"),
            ("--splits 1,1 --out {data}", "holds data made otherwise; choose another folder"),
            ("--splits 1,1 --out {text}", "is not empty; choose another folder"),
        )
    ),
    (f"{RAW} --splits 1,1 --path /", "--path /: is no file; raw-bytes reads one file"),
    ("inspect {text}", "holds no finished data"),
    ("inspect {out}", "no such folder"),
    *(
        (f"inspect {{data}} {more}", words)
        for more, words in (
            ("--samples -1", "--samples: '-1' must be from 0 to 10,000"),
            ("--context-length 0", "--context-length: '0' must be from 1"),
            ("--scratch nowhere", "--scratch nowhere: no such folder"),
            ("--out {text}/a.csv", "is a file; give a folder"),
            ("--out {text}/pictures", "document_lengths.png is not of an earlier run"),
            ("--json /", "--json: /: is a folder; give a file"),
            ("--json {text}/a.csv", "holds no earlier result of"),
            ("--no-duplicates --fail-on-duplicates any", "not with --no-duplicates"),
        )
    ),
    *(
        (f"{ADOPT} {more}", words)
        for more, words in (
            ("", "either --validation or --validation-documents"),
            ("--validation-documents 3", "needs --link copy"),
            ("--validation-documents 9999 --link copy", "leave some for training"),
            ("--validation {data}/train-00000", "given twice, as train data too"),
            ("--validation {out}/x", "x.bin: no such file; give a path without .bin and .idx"),
            ("--validation ={data}/x", "give [NAME=]PREFIX"),
            ("--validation {data}/validation-00000 --eod-token <none>", "<none>"),
            ("--validation {data}/validation-00000 --out {text}", "is not empty"),
            ("--validation {data}/validation-00000 --out {text}/a.csv", "is a file"),
            ("--validation {data}/validation-00000 --tokenizer {text}/a.csv", "not a tokenizer"),
            ("--validation {data}/x --tokenizer train:sentencepiece:300", "give the tokenizer"),
        )
    ),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory, tiny_corpus):
    """What stands for the words in braces; only `out` is not there."""
    root = tmp_path_factory.mktemp("places")
    text, data = root / "text", shutil.copytree(tiny_corpus, root / "data")
    (text / "sub").mkdir(parents=True)
    (text / "pictures").mkdir()
    (text / "a.csv").write_text("x")
    (text / "x.jsonl").write_bytes(json_lines([f"text {n}" for n in range(40)]))
    (text / "empty.jsonl").write_bytes(json_lines(["", ""]))
    (text / "latin.txt").write_bytes(b"\xe9t\xe9")
    (text / "half.jsonl.gz").write_bytes(b"\x1f\x8b\x08")
    (text / "one.txt").write_text("hello")
    (text / "loop").symlink_to(text / "loop")
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), text / "no.parquet")
    (text / "pictures/document_lengths.png").write_text("mine")
    return {"text": text, "data": data, "out": root / "out"}


@pytest.mark.parametrize(("line", "words"), TABLE)
def test_bad_input_is_one_line_and_exit_code_2(places, monkeypatch, capsys, line, words):
    name, *arguments = line.format(**places).split(" ")
    monkeypatch.setattr("sys.argv", [name, *filter(None, arguments)])
    with pytest.raises(SystemExit) as ended:
        COMMANDS[name].main()
    assert ended.value.code == 2
    (complaint,) = capsys.readouterr().err.splitlines()
    assert complaint.startswith("error: ") and words in complaint
    assert not (places["out"] / "manifest.json").exists()
    shutil.rmtree(places["out"], ignore_errors=True)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_options_without_loading_anything_large(name, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        COMMANDS[name].main()
    assert ended.value.code == 0 and "--out" in capsys.readouterr().out
