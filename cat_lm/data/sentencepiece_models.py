"""Train SentencePiece models, and convert them to fast tokenizers with the same ids."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cat_lm.core.errors import UserError
from cat_lm.core.readers import read_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer

EOD_PIECE = "<|endoftext|>"
SPACE = "\u2581"  # how SentencePiece writes a space inside its pieces
UNIGRAM, BPE = 1, 2
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
TRAINING_BLOCK = 4000  # characters; the trainer sees a block as one "sentence"


def train_model(texts: Iterable[str], vocab_size: int) -> bytes:
    """Train a BPE model with byte fallback, whose decoding restores every text exactly.

    It has no normalisation and no dummy prefix, keeps whitespace (runs of it become pieces) and
    splits digits; `<unk>` is id 0 and `<|endoftext|>` id 1. The same texts give the same model on
    every machine. Returns the serialized model. Raises `UserError` if the texts do not allow this
    `vocab_size`.
    """
    import sentencepiece

    model = io.BytesIO()
    blocks = list(_training_blocks(texts))
    if not blocks:
        raise UserError("train:sentencepiece: the source has no text to train a tokenizer on")
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(blocks),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            add_dummy_prefix=False,
            split_digits=True,
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            eos_piece=EOD_PIECE,
            max_sentence_length=4 * TRAINING_BLOCK + 4,  # bytes; longer blocks would be dropped
            num_threads=1,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        reason = " ".join(str(error).split()).rpartition("] ")[2]
        text = f"train:sentencepiece:{vocab_size}: the text does not allow it ({reason})"
        raise UserError(text) from None
    return model.getvalue()


def _training_blocks(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts in blocks that end at line ends and are not too long for the trainer.

    NUL is removed, since the trainer refuses it; byte pieces can encode it nevertheless.
    """
    for text in texts:
        block, size = [], 0
        for line in text.replace("\0", "").splitlines(keepends=True):
            for start in range(0, len(line), TRAINING_BLOCK):
                piece = line[start : start + TRAINING_BLOCK]
                if size + len(piece) > TRAINING_BLOCK:
                    yield "".join(block)
                    block, size = [], 0
                block.append(piece)
                size += len(piece)
        if block:
            yield "".join(block)


class SentencePieceModel:
    """A parsed SentencePiece `*.model` that can be converted to a fast tokenizer.

    Attributes: `serialized` (the file's bytes), `processor` (sentencepiece's tokenizer), `pieces`
    (text, score and type of each), `model_type`.
    Raises `UserError` for invalid models, and for those without an exact fast tokenizer.
    """

    def __init__(self, serialized: bytes, name: str) -> None:
        import sentencepiece
        from google.protobuf.message import DecodeError
        from sentencepiece import sentencepiece_model_pb2

        self.serialized = serialized
        proto = sentencepiece_model_pb2.ModelProto()
        try:
            proto.ParseFromString(serialized)
            if not proto.pieces:
                raise DecodeError("no pieces")
            self.processor = sentencepiece.SentencePieceProcessor(model_proto=serialized)
        except (DecodeError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"{name}: not a sentencepiece model ({reason})") from None
        self.pieces = [(piece.piece, piece.score, piece.type) for piece in proto.pieces]
        self._trainer, self._normalizer = proto.trainer_spec, proto.normalizer_spec
        self.model_type = self._trainer.model_type
        reasons = {
            "its type is neither BPE nor unigram": self.model_type not in (BPE, UNIGRAM),
            "it has user-defined pieces": any(kind == USER_DEFINED for _, _, kind in self.pieces),
            "it marks spaces at the end of pieces": self._trainer.treat_whitespace_as_suffix,
            "it does not escape spaces": not self._normalizer.escape_whitespaces,
        }
        for reason in (reason for reason, applies in reasons.items() if applies):
            raise UserError(
                f"{name}: {reason}, which has no exact fast tokenizer here; "
                "give a transformers tokenizer folder instead"
            )

    @classmethod
    def read(cls, path: Path) -> SentencePieceModel:
        return cls(read_bytes(path), str(path))

    def settings(self) -> dict[str, str]:
        """Return the special tokens by their keys in `tokenizer_config.json`."""
        own = self.processor
        ids = {"unk_token": own.unk_id(), "eos_token": own.eos_id(), "bos_token": own.bos_id()}
        return {key: self.pieces[index][0] for key, index in ids.items() if index >= 0}

    def special_pieces(self) -> list[str]:
        return [piece for piece, _, kind in self.pieces if kind in (UNKNOWN, CONTROL)]

    def fast_tokenizer(self, verbatim: bool = False) -> Tokenizer:
        """Return a `tokenizers.Tokenizer` that encodes texts to the same ids as this model.

        With `verbatim`, which is valid only for models of `train_model`, the pieces have real
        spaces instead of U+2581. A literal U+2581 in a text is then kept, while SentencePiece
        decodes it as a space. That is the only difference.
        """
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
        from tokenizers.models import BPE as Bpe
        from tokenizers.models import Unigram

        space = " " if verbatim else SPACE
        names = [piece.replace(SPACE, space) for piece, _, _ in self.pieces]
        unknown, fallback = self.processor.unk_id(), self._trainer.byte_fallback
        if self.model_type == BPE:
            model = Bpe(
                vocab={name: index for index, name in enumerate(names)},
                merges=self._merges(names),
                unk_token=names[unknown],
                fuse_unk=True,
                byte_fallback=fallback,
            )
        else:
            scores = [score for _, score, _ in self.pieces]
            vocab = list(zip(names, scores, strict=True))
            model = Unigram(vocab, unk_id=unknown, byte_fallback=fallback)
        tokenizer = Tokenizer(model)
        steps = [decoders.ByteFallback(), decoders.Fuse()]
        if not verbatim:
            tokenizer.normalizer = normalizers.Sequence(self._normalizers())
            steps.insert(0, decoders.Replace(SPACE, " "))
        if self._normalizer.add_dummy_prefix:
            steps.append(decoders.Strip(" ", 1, 0))
        tokenizer.decoder = decoders.Sequence(steps)
        # If no piece has a space after another character, no merge crosses the start of a run of
        # spaces. Texts can then be split there, and most words are found in the encoder's cache.
        if not any(re.search(f"[^{space}]{space}", name) for name in names):
            word = Regex(f"{space}*[^{space}]+|{space}+")
            tokenizer.pre_tokenizer = pre_tokenizers.Split(word, behavior="isolated")
        tokenizer.add_special_tokens(
            [AddedToken(piece, special=True, normalized=False) for piece in self.special_pieces()]
        )
        return tokenizer

    def _merges(self, names: list[str]) -> list[tuple[str, str]]:
        """Return every pair of pieces whose concatenation is a piece, in order of priority.

        SentencePiece ranks a merge by the score of the resulting piece. Among the pairs of one
        piece, a longer left part comes first, as the leftmost merge would.
        """
        mergeable = {
            name: (-score, index)
            for index, (name, (_, score, kind)) in enumerate(zip(names, self.pieces, strict=True))
            if kind == NORMAL
        }
        merges = sorted(
            (*rank, -cut, name[:cut], name[cut:])
            for name, rank in mergeable.items()
            for cut in range(1, len(name))
            if name[:cut] in mergeable and name[cut:] in mergeable
        )
        return [(left, right) for *_, left, right in merges]

    def _normalizers(self) -> list:
        from tokenizers import Regex, normalizers

        spec = self._normalizer
        steps = []
        if spec.precompiled_charsmap:
            steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
        if spec.remove_extra_whitespaces:
            # Strip spaces and U+2581 only, because sentencepiece keeps line ends.
            for pattern, content in ((rf"\A +|[ {SPACE}]+\z", ""), (" {2,}", " ")):
                steps.append(normalizers.Replace(Regex(pattern), content))
        if spec.add_dummy_prefix:
            steps.append(normalizers.Prepend(SPACE))
        steps.append(normalizers.Replace(" ", SPACE))
        return steps
