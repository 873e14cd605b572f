"""Tokenizers: the ids of the reference, every text given back, and EOD only where it was put."""

import io
import json

import numpy as np
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from cat_lm.core.errors import UserError
from cat_lm.data.sentencepiece_models import SentencePieceModel, train_model
from cat_lm.data.tokenizers import (
    DocumentEncoder,
    build_tokenizer,
    verify_tokenizer,
)
from tests.conftest import REPOSITORY, generated_text

HARD_TEXTS = [
    "x",
    " ",
    "\n",
    "  two  spaces \n\n\t\ttabs\r\nand   a   tail   ",
    "</s><s><unk><|endoftext|> are text in a program",
    "1234567890 3.14 0x1F",
    "naïve Straße 漢字かな한글 \U0001f600\U0001f469‍\U0001f680 e\u0301",
    "\0 and \x7f and \ufeff",
    "a" * 1000 + " " * 333 + "b",
    "_" * 77 + "\u2581 is a block \u2581\u2581",
]


def project_text():
    """Real text that is in every checkout: the project's own source."""
    files = sorted((REPOSITORY / "cat_lm").rglob("*.py"))
    return [file.read_text(encoding="utf-8") for file in files]


def build(tmp_path, spec, texts=(), **options):
    info = build_tokenizer(str(spec), tmp_path / "tokenizer", lambda: texts, **options)
    return info, DocumentEncoder(tmp_path / "tokenizer", info.eod_id, info.vocab_size)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return build(tmp_path_factory.mktemp("trained"), "train:sentencepiece:600", project_text())


@pytest.fixture(scope="module")
def reference():
    return SentencePieceModel(train_model(project_text(), 600), "again").processor


def test_a_trained_tokenizer_has_its_size_and_end(trained):
    info, _ = trained
    assert (info.kind, info.vocab_size, info.eod_token) == ("sentencepiece", 600, "<|endoftext|>")


# Characters of the project's text and others; readers refuse halves of surrogate pairs.
TEXTS = st.text(
    st.sampled_from(" \n\tab(_'1é漢<|>s") | st.characters(exclude_categories=("Cs",)), max_size=60
)
TEXTS |= st.sampled_from([*project_text()[:20], *HARD_TEXTS])


@given(TEXTS)
def test_a_trained_tokenizer_gives_sentencepieces_ids_and_the_text_back(trained, reference, text):
    _, encoder = trained
    ids = encoder.encode_batch([text])[0]
    assert encoder.decode(ids) == text
    # A literal U+2581 is a space to sentencepiece; here it stays what it is.
    if "\u2581" not in text:
        assert ids == reference.encode(text)


@pytest.mark.parametrize(
    ("vocab", "texts", "message"),
    [
        (100_000, generated_text(50), "too high"),
        (300, ["".join(map(chr, range(0x4E00, 0x5000))) * 3], "smaller than required"),
        (400, [""], "no text to train"),
        (400, ["\0"], "no text to train"),
    ],
)
def test_a_vocabulary_that_does_not_fit_the_text_is_refused(tmp_path, vocab, texts, message):
    with pytest.raises(UserError, match=rf"train:sentencepiece.*{message}"):
        build(tmp_path, f"train:sentencepiece:{vocab}", texts)


@pytest.fixture(scope="module")
def bytes_(tmp_path_factory):
    return build(tmp_path_factory.mktemp("bytes"), "bytes")


@given(TEXTS)
def test_tokens_of_bytes_are_the_texts_bytes(bytes_, text):
    info, encoder = bytes_
    assert (info.vocab_size, info.eod_id) == (257, 256)
    ids = encoder.encode_batch([text])[0]
    assert ids == list(text.encode())
    assert encoder.decode(ids) == text


@pytest.mark.parametrize("spec", ["bytes", "train:sentencepiece:600"])
def test_what_looks_like_a_special_token_is_text(tmp_path, spec):
    info, encoder = build(tmp_path, spec, project_text())
    text = f"print('{info.eod_token}</s>')"
    tokens, lengths = encoder.encode_documents([text, "", text], np.dtype("<u2"))
    assert (tokens == info.eod_id).nonzero()[0].tolist() == (np.cumsum(lengths) - 1).tolist()
    assert lengths[1] == 1
    assert encoder.decode(tokens[: lengths[0] - 1]) == text
    assert info.convention.startswith("one EOD after each document, no BOS")
    nothing, lengths = encoder.encode_documents([], np.dtype("<u2"))
    assert (nothing.dtype, len(nothing), len(lengths)) == (np.dtype("<u2"), 0, 0)


@pytest.mark.parametrize("spec", ["bytes", "train:sentencepiece:600"])
def test_transformers_loads_the_folder_and_agrees(tmp_path, spec):
    from transformers import AutoTokenizer

    info, encoder = build(tmp_path, spec, project_text())
    loaded = AutoTokenizer.from_pretrained(tmp_path / "tokenizer", local_files_only=True)
    assert len(loaded) == info.vocab_size
    assert loaded.eos_token_id == info.eod_id
    loaded.save_pretrained(tmp_path / "again")
    again = AutoTokenizer.from_pretrained(tmp_path / "again", local_files_only=True)
    for text in [*HARD_TEXTS, project_text()[0]]:
        if "<" in text:  # transformers takes special tokens in a text for what they look like
            continue
        ids = encoder.encode_batch([text])[0]
        assert loaded(text)["input_ids"] == ids  # nothing is added
        assert again(text)["input_ids"] == ids
        assert loaded.decode(ids) == text


def unigram_model(path, **options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter("\n".join(generated_text(200)).split("\n")),
        model_writer=model,
        vocab_size=380,
        byte_fallback=True,
        minloglevel=2,
        hard_vocab_limit=False,
        **options,
    )
    path.write_bytes(model.getvalue())
    return path


@pytest.mark.parametrize("normalization", ["nmt_nfkc", "identity"])
def test_names_of_pieces_in_a_text_are_spelled_out_as_sentencepiece_does(tmp_path, normalization):
    """`tokenizers` takes them for the pieces; "＜" becomes "<" by NFKC."""
    path = unigram_model(tmp_path / "x.model", normalization_rule_name=normalization)
    info, encoder = build(tmp_path, path)
    names = ["<s>", "</s>", "<unk>", "<0x0A>", "＜s＞", "＜0x0A＞", "\n", "漢", "\u2581 "]
    texts = [
        f"{before}{name}{after}" for name in names for before in ("", "a ") for after in ("", "b")
    ]
    texts = ["plain text", *texts, "", "more of it"]
    verify_tokenizer(info, tmp_path / "tokenizer", texts)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(path))
    assert encoder.encode_batch(texts) == reference.encode(texts)
    tokens, lengths = encoder.encode_documents(texts, np.dtype("uint16"))
    assert (tokens[np.cumsum(lengths) - 1] == encoder.eod_id).all()


def test_u2581_is_a_space_to_a_given_model_and_itself_to_a_trained_one(tmp_path, trained):
    """The one exception: what is trained here gives every text back, sentencepiece does not."""
    text = "\u2581a \u2581 b\u2581\u2581"
    _, encoder = trained
    assert encoder.decode(encoder.encode_batch([text])[0]) == text
    model = tmp_path / "given.model"
    model.write_bytes(train_model(project_text(), 600))
    info, encoder = build(tmp_path, model)
    verify_tokenizer(info, tmp_path / "tokenizer", [text, *HARD_TEXTS])
    ids = encoder.encode_batch([text])[0]
    assert ids == sentencepiece.SentencePieceProcessor(model_file=str(model)).encode(text)
    assert encoder.decode(ids) == text.replace("\u2581", " ")


def other_kinds():
    """Tokenizers of other models' kinds, trained on a little text, each with a template."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    special = ["[UNK]", "[CLS]", "</s>"]
    lower = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    kinds = {
        "wordpiece": (models.WordPiece(unk_token="[UNK]"), trainers.WordPieceTrainer, lower),
        "unigram": (models.Unigram(), trainers.UnigramTrainer, lower),
        "bytelevel": (models.BPE(), trainers.BpeTrainer, None),
    }
    for name, (model, trainer, normalizer) in kinds.items():
        tokenizer = Tokenizer(model)
        if normalizer:
            tokenizer.normalizer = normalizer
        tokenizer.pre_tokenizer = {
            "wordpiece": pre_tokenizers.BertPreTokenizer(),
            "unigram": pre_tokenizers.Metaspace(),
            "bytelevel": pre_tokenizers.ByteLevel(add_prefix_space=True),
        }[name]
        unknown = {"unk_token": "[UNK]"} if name == "unigram" else {}
        tokenizer.train_from_iterator(
            generated_text(100),
            trainer(vocab_size=300, special_tokens=special, show_progress=False, **unknown),
        )
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A </s>", special_tokens=[("[CLS]", 1), ("</s>", 2)]
        )
        tokenizer.enable_truncation(8)
        yield name, tokenizer


def test_other_kinds_of_transformers_tokenizers_give_transformers_ids(tmp_path):
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    texts = [*generated_text(30, seed=1), *HARD_TEXTS, "Ünïcode \u2460 [CLS] x", ""]
    for name, tokenizer in other_kinds():
        tokens = {"unk_token": "[UNK]", "cls_token": "[CLS]", "eos_token": "</s>"}
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens).save_pretrained(
            tmp_path / name
        )
        info = build_tokenizer(str(tmp_path / name), tmp_path / f"{name}-made", list)
        encoder = DocumentEncoder(tmp_path / f"{name}-made", info.eod_id, info.vocab_size)
        verify_tokenizer(info, tmp_path / f"{name}-made", texts)
        reference = AutoTokenizer.from_pretrained(tmp_path / name, local_files_only=True)
        options = {"add_special_tokens": False, "split_special_tokens": True}
        assert encoder.encode_batch(texts) == reference(texts, **options)["input_ids"]
        assert max(map(len, encoder.encode_batch(texts))) > 8


def test_models_without_an_exact_fast_tokenizer_are_refused(tmp_path):
    path = unigram_model(tmp_path / "x.model", user_defined_symbols=["<mask>"])
    with pytest.raises(UserError, match="it has user-defined pieces"):
        build(tmp_path, path)
    path = unigram_model(tmp_path / "y.model", treat_whitespace_as_suffix=True)
    with pytest.raises(UserError, match="it marks spaces at the end"):
        build(tmp_path, path)


def test_verification_notices_other_ids(tmp_path):
    info, _ = build(tmp_path, "train:sentencepiece:600", project_text())
    folder = tmp_path / "tokenizer"
    texts = project_text()
    verify_tokenizer(info, folder, texts)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    merges = tokenizer["model"]["merges"]
    whole = (folder / "tokenizer.json").read_text()
    tokenizer["model"]["merges"] = merges[5:] + merges[:5]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match="give different ids at token"):
        verify_tokenizer(info, folder, texts)
    (folder / "tokenizer.json").write_text(whole)
    tokenizer["model"]["merges"] = merges
    tokenizer["decoder"] = None
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match="does not give back the text"):
        verify_tokenizer(info, folder, texts)


def template_tokenizer(folder, eos_token="<|endoftext|>", add_bos=True):
    """A folder as transformers saves one, whose template adds BOS to every text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocab = {"<unk>": 0, "<s>": 1, eos_token: 2, "the": 3, "cat": 4}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<unk>", "<s>", eos_token])
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    tokenizer.enable_truncation(2)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_a_transformers_folder_loses_its_template_and_truncation(tmp_path):
    from transformers import AutoTokenizer

    folder = template_tokenizer(tmp_path / "given", "<end>")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<end>"}, "bos_token": "<s>", "add_bos_token": True})
    )
    info, encoder = build(tmp_path, folder)
    assert (info.eod_token, info.eod_id, info.vocab_size) == ("<end>", 2, 5)
    assert encoder.encode_batch(["the cat the cat"]) == [[3, 4, 3, 4]]
    loaded = AutoTokenizer.from_pretrained(tmp_path / "tokenizer", local_files_only=True)
    assert loaded("the cat the")["input_ids"] == [3, 4, 3]
    assert (loaded.bos_token_id, loaded.eos_token_id) == (1, 2)


def test_the_end_of_document_is_found_named_or_asked_for(tmp_path):
    folder = template_tokenizer(tmp_path / "a")
    file = folder / "tokenizer.json"
    assert build(tmp_path, file)[0].eod_id == 2
    assert build(tmp_path, file, eod_token="<s>")[0].eod_id == 1
    with pytest.raises(UserError, match=r"<no> not in its vocabulary.*--eod-token"):
        build(tmp_path, file, eod_token="<no>")
    other = template_tokenizer(tmp_path / "b", "<fin>") / "tokenizer.json"
    with pytest.raises(UserError, match="no end-of-document token"):
        build(tmp_path, other)


def test_an_end_of_document_that_is_also_text_is_refused(tmp_path):
    file = template_tokenizer(tmp_path / "a") / "tokenizer.json"
    _, encoder = build(tmp_path, file, eod_token="cat")
    with pytest.raises(UserError, match="end-of-document id 4 for ordinary text"):
        encoder.encode_documents(["the cat"], np.dtype("<u2"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b"{", "not a tokenizer.json"),
        ("tokenizer.json", b"\xff\xfe", "is not UTF-8 text"),
        ("config.json", b"{}", "not a tokenizer.json"),
        ("x.model", b"", "not a sentencepiece model"),
        ("x.model", b"garbage", "not a sentencepiece model"),
    ],
)
def test_files_that_are_no_tokenizer_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{name}.*{message}|{message}"):
        build(tmp_path, tmp_path / name)
