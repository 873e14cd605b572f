"""627 billion tokens, as sparse files: opened and read with few open files and little memory."""

import json
import resource
import subprocess
import sys

import pytest

from cat_lm.core.errors import UserError
from cat_lm.data.opening import open_corpus
from cat_lm.data.shards import CODES, HEADER, MAGIC, VERSION, index_bytes, token_dtype
from tests.prepared_data import bare_manifest, random_documents, write_prepared

SHARDS, TOKENS, DOCUMENTS = 1254, 500_000_000, 500_000

READ = """
import resource, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
from cat_lm.data import TrainLoader, open_corpus
corpus = open_corpus(sys.argv[1], "train")
loader = TrainLoader(corpus, 2048, 256, seed=0)
middle = loader.samples_per_epoch // 256 // 2
for step in range(middle, middle + 20):
    loader.batch(step)
read = sum("_mapping" in shard.opened.__dict__ for shard in corpus.shards)
# Not ru_maxrss: a process begins with that of the one that started it.
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM:"))
print(read, int(peak.split()[1]) / 1024)
"""


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sparse")
    header = HEADER.pack(MAGIC, VERSION, CODES[token_dtype(50_277)], DOCUMENTS, DOCUMENTS + 1)
    shards = []
    for number in range(SHARDS):
        name = f"train-{number:05d}"
        with open(folder / f"{name}.bin", "wb") as stream:
            stream.truncate(2 * TOKENS)
        with open(folder / f"{name}.idx", "wb") as stream:
            stream.write(header)
            stream.truncate(index_bytes(DOCUMENTS))
        shards.append({"name": name, "documents": DOCUMENTS, "tokens": TOKENS, "bytes": 1})
    (folder / "manifest.json").write_text(json.dumps(bare_manifest(shards, 50_277)))
    return folder


def test_it_is_read_in_the_middle_with_few_files_allowed(sparse):
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < SHARDS + 256:
        pytest.skip("the hard limit of open files is too low for so many shards")
    done = subprocess.run(
        [sys.executable, "-c", READ, str(sparse)], capture_output=True, text=True, check=True
    )
    read, megabytes = map(float, done.stdout.split())
    assert read > 0.9 * SHARDS  # so many that 256 files would not have done
    assert megabytes < 200


def test_a_shard_that_is_not_as_listed_is_found_when_opening(tmp_path):
    folder = write_prepared(tmp_path, random_documents(50, 40), shard_tokens=50)
    bad = sorted(folder.glob("train-*.bin"))[-2]
    bad.write_bytes(bad.read_bytes()[:-2])
    with pytest.raises(UserError, match=rf"{bad.name}: documents, tokens, dtype are"):
        open_corpus(folder, "train")
