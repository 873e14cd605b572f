"""The `.bin/.idx` format by its public description, written and read without the project's code.

`.idx`, little endian: 9 bytes "MMIDIDX", 0, 0; uint64 version 1; uint8 code of the token's type;
uint64 number of sequences S; uint64 number of document marks D; int32[S] tokens of each sequence;
int64[S] byte offset of each in the .bin; int64[D] first sequence of each document, and last S.
"""

import struct
from itertools import accumulate, pairwise
from pathlib import Path

KINDS = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}  # code: struct's letter


def read(prefix):
    """A pair as a list of documents, each a list of sequences, each a list of ids; and its code."""
    index, data = (Path(f"{prefix}.{kind}").read_bytes() for kind in ("idx", "bin"))
    assert index[:9] == b"MMIDIDX\x00\x00"
    assert struct.unpack_from("<Q", index, 9) == (1,)
    (code,) = struct.unpack_from("<B", index, 17)
    (sequences,) = struct.unpack_from("<Q", index, 18)
    (marks,) = struct.unpack_from("<Q", index, 26)
    lengths = struct.unpack_from(f"<{sequences}i", index, 34)
    pointers = struct.unpack_from(f"<{sequences}q", index, 34 + 4 * sequences)
    starts = struct.unpack_from(f"<{marks}q", index, 34 + 12 * sequences)
    assert len(index) == 34 + 12 * sequences + 8 * marks
    assert starts[-1] == sequences
    found = [
        list(struct.unpack_from(f"<{length}{KINDS[code]}", data, pointer))
        for length, pointer in zip(lengths, pointers, strict=True)
    ]
    return [found[first:last] for first, last in pairwise(starts)], code


def write(prefix, documents, code=8, marks=None):
    """Writes documents (lists of sequences of ids); `marks` in place of the right ones."""
    sequences = [sequence for document in documents for sequence in document]
    tokens = [token for sequence in sequences for token in sequence]
    data = struct.pack(f"<{len(tokens)}{KINDS[code]}", *tokens)
    size = struct.calcsize(KINDS[code])
    lengths = [len(sequence) for sequence in sequences]
    pointers = [size * start for start in accumulate([0, *lengths])][:-1]
    if marks is None:
        marks = list(accumulate([0, *(len(document) for document in documents)]))
    index = struct.pack("<9sQBQQ", b"MMIDIDX", 1, code, len(sequences), len(marks))
    index += struct.pack(f"<{len(lengths)}i", *lengths)
    index += struct.pack(f"<{len(lengths)}q", *pointers)
    index += struct.pack(f"<{len(marks)}q", *marks)
    prefix.with_name(prefix.name + ".bin").write_bytes(data)
    prefix.with_name(prefix.name + ".idx").write_bytes(index)
    return prefix
