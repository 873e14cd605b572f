"""Adopting shards made elsewhere: GPT-NeoX's conventions, and whatever can be wrong with them."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from unicodedata import normalize

import numpy as np
import pytest

from cat_lm.core.errors import UserError
from cat_lm.data.opening import open_corpus
from data_prep.adopt import parse_arguments
from data_prep.megatron import validate
from data_prep.megatron.convert import adopt
from tests.cat_lm.data import megatron_files
from tests.conftest import REPOSITORY, generated_text

EOD = 256  # of the bytes tokenizer
UINT16, INT32 = 8, 4


def encoded(text):
    return [*text.encode(), EOD]


def as_documents(texts):
    """As GPT-NeoX writes them: a document is one sequence that ends with EOD."""
    return [[encoded(text)] for text in texts]


TRAIN, HELD = generated_text(60, seed=1), generated_text(20, seed=2)


@pytest.fixture
def pairs(tmp_path):
    """(training, validation): prefixes of two good pairs."""
    return (
        megatron_files.write(tmp_path / "train_text_document", as_documents(TRAIN)),
        megatron_files.write(tmp_path / "valid_text_document", as_documents(HELD)),
    )


def run(out, train, validation, *flags, tokenizer="bytes"):
    train, validation = ([p] if not isinstance(p, list) else p for p in (train, validation))
    held_out = ["--validation", *validation] if validation else []
    words = [*train, *held_out, "--tokenizer", tokenizer, "--out", out, *flags]
    adopt(parse_arguments([str(word) for word in words]))
    return out


def texts_of(folder, split):
    corpus = open_corpus(folder, split)
    found = [corpus.tokens(*corpus.document(i)) for i in range(corpus.num_documents)]
    assert all(document[-1] == EOD for document in found)
    return [bytes(document[:-1].tolist()).decode() for document in found]


@pytest.mark.parametrize("code", [UINT16, INT32])
def test_adopted_data_are_prepared_data(tmp_path, code):
    train = megatron_files.write(tmp_path / "a", as_documents(TRAIN), code)
    held = megatron_files.write(tmp_path / "b", as_documents([*HELD, ""]), code)
    folder = run(tmp_path / "out", f"web={train}", f"web={held}.idx")
    assert texts_of(folder, "train") == TRAIN
    assert texts_of(folder, "validation") == [*HELD, ""]
    manifest = json.loads((folder / "manifest.json").read_text())
    for split, texts in (("train", TRAIN), ("validation", [*HELD, ""])):
        sizes = [len(text.encode()) for text in texts]
        counts = {"documents": len(texts), "tokens": sum(sizes) + len(sizes), "bytes": sum(sizes)}
        assert manifest["sources"]["web"][split] == counts
        assert {key: manifest["splits"][split][key] for key in counts} == counts
    assert manifest["unigram_loss"] == pytest.approx(_unigram(TRAIN, [*HELD, ""]))
    command = [sys.executable, "-m", "data_prep.inspect", folder]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr


def _unigram(train, held):
    tokens = [[token for text in texts for token in encoded(text)] for texts in (train, held)]
    counts = [np.bincount(ids, minlength=257) for ids in tokens]
    share = (counts[0] + 1) / (counts[0].sum() + 257)
    return -(counts[1] * np.log(share)).sum() / counts[1].sum()


@pytest.mark.parametrize("link", ["hard", "symbolic", "copy"])
def test_links_and_copies(tmp_path, pairs, link):
    folder = run(tmp_path / "out", *pairs, "--link", link)
    source, target = tmp_path / "train_text_document.bin", folder / "train-00000.bin"
    assert target.is_symlink() == (link == "symbolic")
    assert os.path.samefile(source, target) == (link != "copy")
    assert target.read_bytes() == source.read_bytes()
    assert sorted(p.name for p in folder.iterdir()) == [
        *(".verified.jsonl", "manifest.json", "tokenizer", "train-00000.bin", "train-00000.idx"),
        *("validation-00000.bin", "validation-00000.idx"),
    ]
    assert texts_of(folder, "train") == TRAIN
    assert not [p for p in tmp_path.iterdir() if p.name.endswith(".tmp")]


def test_documents_of_several_sequences_become_one_each(tmp_path, pairs):
    pieces = [[[*b"one "], [*b"two"], [EOD]], [encoded("three")], [[*b"fo"], encoded("ur")]]
    train = megatron_files.write(tmp_path / "x", pieces)
    folder = run(tmp_path / "out", train, pairs[1])
    assert texts_of(folder, "train") == ["one two", "three", "four"]
    documents, _ = megatron_files.read(folder / "train-00000")
    assert documents == [[encoded(t)] for t in ("one two", "three", "four")]
    with pytest.raises(UserError, match="3 of 6 documents do not end with"):
        run(tmp_path / "no", train, pairs[1], "--documents", "sequences")


def test_merged_files_without_marks_need_to_be_told_what_a_document_is(tmp_path, pairs):
    for marks in ([0], []):
        train = megatron_files.write(tmp_path / "x", as_documents(TRAIN), marks=marks)
        with pytest.raises(UserError, match=r"x\.idx: marks no documents.*--documents sequences"):
            run(tmp_path / "out", train, pairs[1])
        for documents in ("sequences", "eod"):
            folder = run(tmp_path / documents, train, pairs[1], "--documents", documents)
            assert texts_of(folder, "train") == TRAIN
            shutil.rmtree(folder)


def test_eod_inside_of_documents_is_refused_unless_it_ends_them(tmp_path, pairs):
    train = megatron_files.write(tmp_path / "x", [[[*encoded("one"), *encoded("two")]]])
    with pytest.raises(UserError, match=r"2 tokens .* for 1 documents.*--documents eod"):
        run(tmp_path / "out", train, pairs[1])
    folder = run(tmp_path / "out", train, pairs[1], "--documents", "eod")
    assert texts_of(folder, "train") == ["one", "two"]


@pytest.mark.parametrize("documents", ["marks", "eod"])
def test_the_last_documents_of_a_single_pair_can_be_held_out(tmp_path, pairs, documents):
    """GPT-NeoX splits one file by fractions of its documents; here the tail is cut off."""
    more = megatron_files.write(tmp_path / "more", as_documents(["x", "yz"]))
    flags = ("--link", "copy", "--validation-documents", 7, "--documents", documents)
    folder = run(tmp_path / "out", [f"a={more}", f"b={pairs[0]}"], [], *flags)
    assert texts_of(folder, "train") == ["x", "yz", *TRAIN[:-7]]
    assert texts_of(folder, "validation") == TRAIN[-7:]
    manifest = json.loads((folder / "manifest.json").read_text())
    expected = {"b": {"train": TRAIN[:-7], "validation": TRAIN[-7:]}, "a": {"train": ["x", "yz"]}}
    for name, splits in manifest["sources"].items():
        for split, found in splits.items():
            size = sum(len(text.encode()) for text in expected[name][split])
            count = len(expected[name][split])
            assert found == {"documents": count, "tokens": size + count, "bytes": size}
    assert manifest["unigram_loss"] == pytest.approx(_unigram(["x", "yz", *TRAIN[:-7]], TRAIN[-7:]))
    for split in manifest["splits"].values():
        for shard in split["shards"]:
            for kind in ("bin", "idx"):
                data = (folder / f"{shard['name']}.{kind}").read_bytes()
                assert hashlib.sha256(data).hexdigest() == shard[f"{kind}_sha256"]
    for flags, message in (
        (("--link", "copy", "--validation-documents", 60), "has 60 documents; leave some"),
        (("--validation-documents", 3), "needs --link copy"),
        ((), "either --validation or --validation-documents"),
    ):
        with pytest.raises(UserError, match=message):
            run(tmp_path / "no", pairs[0], [], *flags)
    with pytest.raises(UserError, match="either --validation or"):
        run(tmp_path / "no", *pairs, "--link", "copy", "--validation-documents", 3)


def test_bytes_of_held_out_documents_are_their_own_where_all_are_decoded(
    tmp_path, pairs, monkeypatch
):
    real = validate.bytes_per_token
    monkeypatch.setattr(validate, "bytes_per_token", lambda *given: real(*given) + 1)
    flags = ("--link", "copy", "--validation-documents", 7)
    folder = run(tmp_path / "out", pairs[0], [], *flags)
    splits = json.loads((folder / "manifest.json").read_text())["splits"]
    expected = {"train": TRAIN[:-7], "validation": TRAIN[-7:]}
    for split, texts in expected.items():
        assert splits[split]["bytes"] == sum(len(text.encode()) for text in texts)


def damage(prefix, kind, change):
    path = prefix.with_name(f"{prefix.name}.{kind}")
    path.write_bytes(change(path.read_bytes()))


NO_EOD = [[[*text.encode()]] for text in TRAIN]
BAD = {
    "no_eod": (NO_EOD, {}, None, r"no token is .* \(id 256\).*--append-eod.*Pythia"),
    "not_at_end": ([*NO_EOD[:3], *as_documents(["x"])], {}, None, "3 of 4 documents do not end"),
    "id": ([[[300, EOD]]], {}, None, r"id 300 is not in the vocabulary of bytes \(257 ids\)"),
    "empty": ([], {}, None, "empty, there is no token in it"),
    "magic": (as_documents("ab"), {}, ("idx", lambda d: b"X" + d[1:]), "not an index"),
    "cut_idx": (as_documents("ab"), {}, ("idx", lambda d: d[:-8]), "its header asks for"),
    "nothing": (as_documents("ab"), {}, ("idx", lambda d: b""), "not an index"),
    "float": (as_documents("ab"), {}, ("idx", lambda d: d[:17] + b"\6" + d[18:]), "dtype code 6"),
    "cut_bin": (as_documents("ab"), {}, ("bin", lambda d: d[:-2]), "lists 4 tokens, x.bin has 3"),
    "odd_bin": (as_documents("ab"), {}, ("bin", lambda d: d[:-1]), "not a whole number of tokens"),
    "other_dtype": (as_documents("ab"), {"code": INT32}, None, "holds int32 tokens, .* uint16"),
    "marks": (as_documents("ab"), {"marks": [0, 2, 1]}, None, "do not lead from 0 to 2"),
    "marks_short": (as_documents("ab"), {"marks": [0, 1]}, None, "do not lead from 0 to 2"),
    "pointers": (
        as_documents("ab"),
        {},
        ("idx", lambda d: d[:42] + d[50:58] + d[42:50] + d[58:]),
        "sequence 0 does not lie behind",
    ),
    "empty_document": ([*as_documents("a"), [[]], *as_documents("b")], {}, None, "1 is empty"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_pairs_are_one_clear_error_and_leave_nothing(tmp_path, pairs, name):
    documents, options, change, message = BAD[name]
    train = megatron_files.write(tmp_path / "x", documents, **options)
    if change:
        damage(train, *change)
    with pytest.raises(UserError, match=message) as error:
        run(tmp_path / "out", [pairs[0], train], pairs[1])
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()
    assert not [p for p in tmp_path.iterdir() if p.name.endswith(".tmp")]


def test_tokens_after_the_last_eod_are_refused(tmp_path, pairs):
    train = megatron_files.write(tmp_path / "x", [[[*encoded("a"), 98]]])
    with pytest.raises(UserError, match="1 tokens follow the last"):
        run(tmp_path / "out", train, pairs[1], "--documents", "eod")


def test_another_tokenizer_with_the_same_eod_is_noticed(tmp_path, pairs):
    """Ids and EOD fit; only decoding and encoding again tells the two apart."""
    folder = run(tmp_path / "first", *pairs)
    settings = json.loads((folder / "tokenizer" / "tokenizer.json").read_text())
    vocab = settings["model"]["vocab"]
    vocab["<|endoftext|>"], vocab["at"] = EOD, EOD + 1
    settings["model"]["merges"] = [["a", "t"]]  # words that these texts are full of
    (tmp_path / "other.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=r"documents are encoded otherwise by .*other\.json"):
        run(tmp_path / "out", *pairs, tokenizer=str(tmp_path / "other.json"))


def neox_ids(path):
    """As GPT-NeoX's HFTokenizer encodes: the library, no settings; EOD is id 0."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    return lambda text: [*tokenizer.encode(text).ids, 0], lambda text: normalize("NFC", text)


def mistral_ids(path):
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_file=str(path))
    return lambda text: [*processor.encode(text), 2], lambda text: text


@pytest.mark.parametrize(
    ("name", "code", "made"),
    [
        ("gpt_neox_20b.json", UINT16, neox_ids),
        pytest.param("mistral_7b_v1.model", INT32, mistral_ids, marks=pytest.mark.long),
    ],
)
def test_bytes_of_text_are_counted_exactly_without_decoding(
    tmp_path, shared_data, monkeypatch, capsys, name, code, made
):
    from data_prep.sources.documents import Reading
    from data_prep.sources.open import open_source

    path = shared_data / "tokenizers" / name
    source = open_source("slimpajama", str(shared_data / "slimpajama_sample"), Reading())
    texts = [d.text for d in source.read(source.parts[0])][:100]
    encode, normalized = made(path)
    train, held = (
        megatron_files.write(tmp_path / split, [[encode(text)] for text in chosen], code)
        for split, chosen in (("train", texts), ("held", ["x"]))
    )
    folder = run(tmp_path / "out", train, held, tokenizer=str(path))
    manifest = json.loads((folder / "manifest.json").read_text())
    expected = sum(len(normalized(text).encode()) for text in texts)
    assert manifest["splits"]["train"]["bytes"] == expected
    assert "decoding all documents" not in capsys.readouterr().out
    real = validate.bytes_per_token  # with a table that is wrong, all documents are decoded
    monkeypatch.setattr(validate, "bytes_per_token", lambda *given: real(*given) + 1)
    folder = run(tmp_path / "decoded", train, held, tokenizer=str(path))
    assert "decoding all documents" in capsys.readouterr().out
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["splits"]["train"]["bytes"] == expected
