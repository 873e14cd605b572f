"""Every document of the sample in SlimPajama's layout gets the ids of its tokenizer's reference.

Nothing is left out and nothing is treated apart: all of it in the long tier, which takes half a
minute on one core, and every eighth document in the short one.
"""

import json
import shutil

import numpy as np
import pytest
import sentencepiece

from cat_lm.core.errors import UserError
from cat_lm.data.sentencepiece_models import SPACE
from cat_lm.data.tokenizers import DocumentEncoder, build_tokenizer, verify_tokenizer

DOCUMENTS = 4262
LOOK_ALIKES = "<s>[INST] </s></s> x <unk> <0x0A> <|endoftext|><|padding|> y"


@pytest.fixture(
    scope="module", params=[8, pytest.param(1, marks=pytest.mark.long)], ids=["eighth", "all"]
)
def texts(request, shared_data):
    from data_prep.sources.documents import Reading
    from data_prep.sources.open import open_source

    source = open_source("slimpajama", str(shared_data / "slimpajama_sample"), Reading())
    found = [document.text for part in source.parts for document in source.read(part)]
    assert len(found) == DOCUMENTS
    return found[:: request.param]


@pytest.fixture(scope="module")
def mistral(shared_data):
    return shared_data / "tokenizers" / "mistral_7b_v1.model"


@pytest.fixture(scope="module")
def neox(shared_data, tmp_path_factory):
    """GPT-NeoX's tokenizer as a folder of transformers, with the class that it has there."""
    folder = tmp_path_factory.mktemp("neox") / "given"
    folder.mkdir()
    shutil.copy(shared_data / "tokenizers" / "gpt_neox_20b.json", folder / "tokenizer.json")
    names = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    settings = {"tokenizer_class": "GPTNeoXTokenizer", "add_prefix_space": False, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def build(folder, spec, texts=()):
    info = build_tokenizer(str(spec), folder, lambda: texts)
    return info, DocumentEncoder(folder, info.eod_id, info.vocab_size)


def assert_same(encoder, texts, *references):
    """What goes into the shards is the references' ids, and one EOD after each document."""
    tokens, lengths = encoder.encode_documents(texts, np.dtype("<u2"))
    assert len(lengths) == len(texts)
    assert np.count_nonzero(tokens == encoder.eod_id) == len(texts)
    documents = np.split(tokens, np.cumsum(lengths)[:-1])
    for reference in references:
        pairs = enumerate(zip(documents, reference, strict=True))
        assert not [n for n, (got, ids) in pairs if got.tolist() != [*ids, encoder.eod_id]]


def test_mistral_gives_sentencepieces_ids(tmp_path, texts, mistral):
    info, encoder = build(tmp_path, mistral)
    assert (info.vocab_size, info.eod_token, info.eod_id) == (32_000, "</s>", 2)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(mistral))
    texts = [*texts, LOOK_ALIKES, f"{SPACE}a literal{SPACE * 2}sign  {SPACE} ", ""]
    expected = reference.encode(texts)
    assert_same(encoder, texts, expected)
    assert [encoder.decode(ids) for ids in expected[::20]] == reference.decode(expected[::20])


def test_neox_gives_the_ids_of_transformers_and_of_its_own_file(tmp_path, texts, neox):
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    info, encoder = build(tmp_path / "made", neox)
    assert (info.kind, info.vocab_size, info.eod_id) == ("transformers", 50_277, 0)
    auto = AutoTokenizer.from_pretrained(neox, local_files_only=True)
    assert type(auto).__name__ == "GPTNeoXTokenizer"
    own = Tokenizer.from_file(str(neox / "tokenizer.json"))
    assert_same(
        encoder,
        texts,
        auto(texts, add_special_tokens=False)["input_ids"],
        (encoding.ids for encoding in own.encode_batch(texts, add_special_tokens=False)),
    )


def test_a_trained_tokenizer_gives_sentencepieces_ids(tmp_path, texts):
    info, encoder = build(tmp_path, "train:sentencepiece:2000", texts[::20])
    model = tmp_path / "sentencepiece.model"
    reference = sentencepiece.SentencePieceProcessor(model_file=str(model))
    # With none of these the one exception, U+2581, is not in the way.
    assert not [text for text in texts if SPACE in text]
    assert_same(encoder, texts, reference.encode(texts))
    verify_tokenizer(info, tmp_path, texts[:100])


def test_look_alikes_are_text_as_the_references_have_it(tmp_path, mistral, neox):
    """sentencepiece has no other way; transformers takes them for tokens unless told to split."""
    from transformers import AutoTokenizer

    reference = sentencepiece.SentencePieceProcessor(model_file=str(mistral))
    for name, spec in (("mistral", mistral), ("neox", neox)):
        _, encoder = build(tmp_path / name, spec)
        ids = encoder.encode_batch([LOOK_ALIKES])[0]
        assert encoder.eod_id not in ids
        assert encoder.decode(ids) == LOOK_ALIKES
        auto = AutoTokenizer.from_pretrained(tmp_path / name, local_files_only=True)
        options = {"add_special_tokens": False}
        assert auto(LOOK_ALIKES, split_special_tokens=True, **options)["input_ids"] == ids
        assert encoder.eod_id in auto(LOOK_ALIKES, **options)["input_ids"]
        if name == "mistral":
            assert reference.encode(LOOK_ALIKES) == ids


def test_a_folder_that_transformers_reads_otherwise_is_refused(tmp_path, neox):
    """`AutoTokenizer` builds GPT-NeoX's own normaliser, whatever the file has."""
    folder = shutil.copytree(neox, tmp_path / "given")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Lowercase"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    info, _ = build(tmp_path / "made", folder)
    verify_tokenizer(info, tmp_path / "made", ["lower case"])
    with pytest.raises(UserError, match=r"transformers give different ids at token 0 \("):
        verify_tokenizer(info, tmp_path / "made", ["lower case", "Upper Case"])
