"""Nothing goes but what a preparation wrote: copies, moves, crafted and stale files, strangers."""

import json
import os
import shutil

import pytest

from cat_lm.core.errors import UserError
from data_prep.assemble.output_folder import OutputFolder
from tests.prepared_data import digests
from tests.unit.test_data_selection import flags as set_flags


@pytest.fixture
def begun(tmp_path, sets, prepare):
    """A preparation whose parts are all made and whose shards are not."""
    return prepare(tmp_path / "begun", *set_flags(sets, "--stage", "encode"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, sets, prepare):
    return digests(prepare(tmp_path_factory.mktemp("whole") / "out", *set_flags(sets)))


def no_encoding(monkeypatch):
    def refuse(*_):
        raise AssertionError("a part was made again")

    monkeypatch.setattr("data_prep.encode.job.encode_unit", refuse)


@pytest.mark.parametrize("more", [(), ("--seed", 1, "--overwrite")])
def test_copy_continues_with_its_own_parts_and_leaves_the_original(
    tmp_path, sets, prepare, begun, whole, monkeypatch, more
):
    copy, before = tmp_path / "copy", digests(begun)
    shutil.copytree(begun, copy)
    if not more:
        no_encoding(monkeypatch)
    prepare(copy, *set_flags(sets, *more))
    assert digests(begun) == before
    assert (digests(copy) == whole) == (not more)
    os.rename(begun, tmp_path / "moved")
    prepare(tmp_path / "moved", *set_flags(sets))
    assert digests(tmp_path / "moved") == whole


def test_copy_shares_no_scratch_folder(tmp_path, sets, prepare, whole):
    arguments = set_flags(sets, "--scratch", tmp_path / "s")
    out = prepare(tmp_path / "out", *arguments, "--stage", "encode")
    before = digests(tmp_path / "s")
    shutil.copytree(out, tmp_path / "copy")
    prepare(tmp_path / "copy", *arguments)
    assert digests(tmp_path / "copy") == whole
    assert digests(tmp_path / "s") == before
    prepare(out, *arguments)
    assert digests(out) == whole and not list((tmp_path / "s").iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scratch": 7}, "scratch is 7"),
        ({"identity": []}, "identity is []"),
        ({"program": "another"}, 'program is "another"'),
        ({"format": 2}, "format is 2, must be 1: another version of cat_lm wrote it"),
    ],
)
def test_record_of_another_shape_is_one_line(sets, prepare, begun, change, message):
    path = begun / "unfinished/preparation.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    before = digests(begun)
    with pytest.raises(UserError) as raised:
        prepare(begun, *set_flags(sets, "--overwrite"))
    assert message in str(raised.value) and "\n" not in str(raised.value)
    assert {**before, **digests(begun)} == {**digests(begun), **before}


def test_overwriting_keeps_what_the_manifest_does_not_list(tmp_path, sets, prepare):
    out = prepare(tmp_path / "out", *set_flags(sets, "--shard-tokens", "5K"))
    strangers = ("notes.txt", ".swap.tmp", ".folder.tmp/x", "tokenizer/mine.json", "train-x.bin")
    strangers += ("train-00777.bin", "packing/mine/plan.json")
    for name in strangers:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("mine")
    old = {path.name for path in out.glob("train-0*.idx")}
    prepare(out, *set_flags(sets, "--sets", "Small", "--overwrite"))
    assert [(out / name).read_text() for name in strangers] == ["mine"] * len(strangers)
    assert {path.name for path in out.glob("train-0*.idx")} < old


def test_file_that_new_shards_would_replace_is_refused(sets, prepare, begun, whole):
    (begun / "train-00000.idx").write_text("mine")
    with pytest.raises(UserError, match=r"train-00000\.idx is not of this preparation and would"):
        prepare(begun, *set_flags(sets))
    assert (begun / "train-00000.idx").read_text() == "mine"
    (begun / "train-00000.idx").unlink()
    prepare(begun, *set_flags(sets))
    assert digests(begun) == whole


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


@pytest.mark.parametrize("name", ["chapter.tex", "parts/chapter.tex", "parts/part-1.bin.mine"])
def test_what_others_put_among_the_parts_stays(sets, prepare, begun, whole, capsys, name):
    mine = begun / "unfinished" / name
    mine.write_text("mine")
    with pytest.raises(UserError, match=r"holds .*, which is not of a preparation; move it away"):
        prepare(begun, *set_flags(sets, "--seed", 1, "--overwrite"))
    prepare(begun, *set_flags(sets))
    assert "which is not of a preparation" in capsys.readouterr().out
    assert mine.read_text() == "mine"
    assert digests(begun).items() > whole.items()
