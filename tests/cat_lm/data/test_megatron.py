"""Shards are Megatron's and GPT-NeoX's format: by the description, and by their peers' readers."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from cat_lm.data.shards import Shard
from tests.cat_lm.data import megatron_files
from tests.prepared_data import write_shards

DOCUMENTS = [[5, 6, 7, 0], [0], [9, 0], [*range(1, 300), 0]]


def deepspeed_reader():
    """DeepSpeed's copy of Megatron's reader; the file alone, its package takes long to import.

    It has codes of its own for unsigned types (6 is its uint16, 8 its uint64), where Megatron and
    GPT-NeoX agree on 8 for uint16: only int32 can be exchanged with it.
    """
    folder = importlib.util.find_spec("deepspeed").submodule_search_locations[0]
    path = Path(folder) / "runtime/data_pipeline/data_sampling/indexed_dataset.py"
    spec = importlib.util.spec_from_file_location("deepspeed_indexed_dataset", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def megatron_reader():
    """Megatron-core's own, which is not among the project's requirements."""
    try:
        import megatron.core.datasets.indexed_dataset as module
    except ImportError as error:
        pytest.skip(f"needs megatron-core (pip install megatron-core): {error}")
    return module


def prepared(folder, dtype):
    write_shards(folder, "train", DOCUMENTS, dtype)
    return folder / "train-00000"


DTYPES = pytest.mark.parametrize(("dtype", "code"), [("<u2", 8), ("<i4", 4)])


@DTYPES
def test_shards_are_read_by_the_description_alone(tmp_path, dtype, code):
    assert megatron_files.read(prepared(tmp_path, dtype)) == ([[d] for d in DOCUMENTS], code)


def test_deepspeeds_copy_of_megatrons_reader_reads_shards(tmp_path):
    module = deepspeed_reader()
    dataset = module.MMapIndexedDataset(str(prepared(tmp_path, "<i4")), skip_warmup=True)
    assert [dataset[i].tolist() for i in range(len(dataset))] == DOCUMENTS
    assert dataset.doc_idx.tolist() == [0, 1, 2, 3, 4]
    assert dataset.dtype == np.int32


@DTYPES
def test_megatron_cores_reader_reads_shards(tmp_path, dtype, code):
    module = megatron_reader()
    for mmap in (True, False):
        dataset = module.IndexedDataset(str(prepared(tmp_path, dtype)), mmap=mmap)
        assert [dataset[i].tolist() for i in range(len(dataset))] == DOCUMENTS
        assert dataset.document_indices.tolist() == [0, 1, 2, 3, 4]
        assert dataset.index.dtype == np.dtype(dtype).type


def test_what_deepspeeds_writer_writes_is_read_here(tmp_path):
    """GPT-NeoX's builder is of the same ancestry; here documents of several sequences too."""
    import torch

    module = deepspeed_reader()
    builder = module.MMapIndexedDatasetBuilder(str(tmp_path / "x.bin"), dtype=np.int32)
    documents = [[[1, 2], [3, 0]], [[4, 0]], [[5], [6], [0]]]
    for document in documents:
        for sequence in document:
            builder.add_item(torch.tensor(sequence))
        builder.end_document()
    builder.finalize(str(tmp_path / "x.idx"))
    shard = Shard(tmp_path / "x")
    assert (shard.num_documents, shard.num_sequences) == (3, 6)
    found = [
        shard.tokens[slice(*ends)].tolist() for ends in zip(*shard.documents(0, 3), strict=True)
    ]
    assert found == [[1, 2, 3, 0], [4, 0], [5, 6, 0]]
    assert megatron_files.read(tmp_path / "x") == (documents, 4)


@DTYPES
def test_what_megatron_cores_writer_writes_is_read_here(tmp_path, dtype, code):
    import torch

    module = megatron_reader()
    builder = module.IndexedDatasetBuilder(str(tmp_path / "x.bin"), dtype=np.dtype(dtype).type)
    documents = [[[1, 2], [3, 0]], [[4, 0]]]
    for document in documents:
        tokens = torch.tensor([token for sequence in document for token in sequence])
        builder.add_document(tokens, [len(sequence) for sequence in document])
    builder.finalize(str(tmp_path / "x.idx"))
    shard = Shard(tmp_path / "x")
    found = [
        shard.tokens[slice(*ends)].tolist() for ends in zip(*shard.documents(0, 2), strict=True)
    ]
    assert found == [[1, 2, 3, 0], [4, 0]]
    assert megatron_files.read(tmp_path / "x") == (documents, code)
