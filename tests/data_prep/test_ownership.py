"""Nothing goes but what a preparation wrote: copies, records of others, files of users."""

import errno
import json
import os
import shutil

import pytest

from cat_lm.core.errors import UserError
from data_prep.assemble.output_folder import OutputFolder
from tests.data_prep.helpers import made, set_flags
from tests.prepared_data import digests


@pytest.fixture
def begun(tmp_path, sets, prepare):
    """A preparation whose parts are all made and whose shards are not."""
    return prepare(tmp_path / "begun", *set_flags(sets, "--stage", "encode"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, sets, prepare):
    return made(prepare(tmp_path_factory.mktemp("whole") / "out", *set_flags(sets)))


def test_copy_continues_with_its_own_parts_and_leaves_the_original(
    tmp_path, sets, prepare, begun, whole, monkeypatch
):
    copy, before = tmp_path / "copy", digests(begun)
    shutil.copytree(begun, copy)
    monkeypatch.setattr("data_prep.encode.job.encode_unit", None)
    prepare(copy, *set_flags(sets))
    assert digests(begun) == before and made(copy) == whole


def test_copy_shares_no_scratch_folder(tmp_path, sets, prepare, whole):
    arguments = set_flags(sets, "--scratch", tmp_path / "s")
    out = prepare(tmp_path / "out", *arguments, "--stage", "encode")
    before = digests(tmp_path / "s")
    shutil.copytree(out, tmp_path / "copy")
    prepare(tmp_path / "copy", *arguments)
    assert made(tmp_path / "copy") == whole and digests(tmp_path / "s") == before
    prepare(out, *arguments)
    assert made(out) == whole and not list((tmp_path / "s").iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [({"identity": []}, "identity is []"), ({"format": 2}, "format is 2, must be 1: another ver")],
)
def test_record_of_another_shape_is_one_line(sets, prepare, begun, change, message):
    path = begun / "unfinished/preparation.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    before = made(begun)
    with pytest.raises(UserError) as raised:
        prepare(begun, *set_flags(sets, "--overwrite"))
    assert message in str(raised.value) and "\n" not in str(raised.value)
    assert made(begun) == before


def test_overwriting_keeps_what_the_manifest_does_not_list(tmp_path, sets, prepare):
    out = prepare(tmp_path / "out", *set_flags(sets, "--shard-tokens", "5K"))
    users = ("notes.txt", ".swap.tmp", ".folder.tmp/x", "tokenizer/mine.json", "train-00777.bin")
    users += ("packing/mine/plan.json", "unfinished/chapter.tex", "unfinished/parts/part-1.mine.x")
    for name in users[:-2]:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("mine")
    prepare(out, *set_flags(sets, "--sets", "Small", "--overwrite", "--stage", "encode"))
    for name in users[-2:]:
        (out / name).write_text("mine")
    old = {path.name for path in out.glob("train-0*.idx")}
    prepare(out, *set_flags(sets, "--sets", "Small", "--overwrite"))
    assert [(out / name).read_text() for name in users] == ["mine"] * len(users)
    assert {path.name for path in out.glob("train-0*.idx")} < old


def test_file_that_new_shards_would_replace_is_refused(sets, prepare, begun, whole):
    (begun / "train-00000.idx").write_text("mine")
    with pytest.raises(UserError, match=r"train-00000\.idx is not of this preparation and would"):
        prepare(begun, *set_flags(sets))
    assert (begun / "train-00000.idx").read_text() == "mine"
    (begun / "train-00000.idx").unlink()
    prepare(begun, *set_flags(sets))
    assert made(begun) == whole


@pytest.mark.parametrize("scratch", [False, True])
def test_folder_of_others_in_the_way_is_refused(tmp_path, sets, prepare, scratch):
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "chapter.tex").write_text("years of work")
    more = ("--scratch", tmp_path / "s") if scratch else ()
    folder = OutputFolder.of(tmp_path / "out", tmp_path / "s" if scratch else None)
    place = folder.work if scratch else folder.staging
    place.parent.mkdir()
    for link in (False, True):
        place.symlink_to(thesis) if link else shutil.copytree(thesis, place)
        with pytest.raises(UserError, match="was not made by this program; move it away"):
            prepare(tmp_path / "out", *set_flags(sets, *more))
        assert (place / "chapter.tex").exists()
        place.unlink() if link else shutil.rmtree(place)


@pytest.mark.parametrize("calls", [1, 9, 24])
def test_full_disk_stops_cleanly_and_the_same_command_continues(
    tmp_path, sets, prepare, monkeypatch, expected, calls
):
    """While a part is written, between the stages, and while a shard is."""
    from tests.data_prep.helpers import WISHES

    arguments, flushed, real = set_flags(sets, *WISHES), [], os.fsync

    def full(handle):
        flushed.append(handle)
        if len(flushed) == 3 * calls:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises((UserError, OSError)) as raised:
        prepare(tmp_path / "out", *arguments)
    assert "disk is full" in str(raised.value) or raised.value.errno == errno.ENOSPC
    assert not list((tmp_path / "out").rglob("*.tmp"))
    monkeypatch.undo()
    prepare(tmp_path / "out", *arguments)
    assert made(tmp_path / "out") == expected
