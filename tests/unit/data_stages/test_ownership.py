"""Nothing goes but what a preparation wrote: copies, moves, crafted and stale files, strangers."""

import json
import os
import shutil

import pytest

from cat_lm.core.errors import UserError
from cat_lm.core.folders import MARK, make_temporary
from data_prep.common.unfinished import MAKING
from tests.prepared_data import digests
from tests.unit.test_data_selection import flags as set_flags


@pytest.fixture
def begun(tmp_path, sets, prepare):
    """A preparation whose parts are all made and whose shards are not."""
    return prepare(tmp_path / "begun", *set_flags(sets, "--stage", "encode"))


@pytest.fixture
def thesis(tmp_path):
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter.tex").write_text("years of work")
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory, sets, prepare):
    return digests(prepare(tmp_path_factory.mktemp("whole") / "out", *set_flags(sets)))


def no_encoding(monkeypatch):
    def refuse(*_):
        raise AssertionError("a part was made again")

    monkeypatch.setattr("data_prep.encode.job.encode_unit", refuse)


@pytest.mark.parametrize("more", [(), ("--seed", 1, "--overwrite")])
def test_a_copy_goes_on_with_its_own_parts_and_leaves_the_original(
    tmp_path, sets, prepare, begun, whole, monkeypatch, more
):
    copy, before = tmp_path / "copy", digests(begun)
    shutil.copytree(begun, copy)
    if not more:
        no_encoding(monkeypatch)
    prepare(copy, *set_flags(sets, *more))
    assert digests(begun) == before
    assert (digests(copy) == whole) == (not more)
    assert not (copy / "parts").exists()
    prepare(begun, *set_flags(sets))
    assert digests(begun) == whole


def test_a_folder_that_was_moved_goes_on(tmp_path, sets, prepare, begun, whole, monkeypatch):
    os.rename(begun, tmp_path / "moved")
    no_encoding(monkeypatch)
    prepare(tmp_path / "moved", *set_flags(sets))
    assert digests(tmp_path / "moved") == whole


def test_a_copy_shares_no_scratch_folder(tmp_path, sets, prepare, whole):
    arguments = set_flags(sets, "--scratch", tmp_path / "s")
    out = prepare(tmp_path / "out", *arguments, "--stage", "encode")
    before = digests(tmp_path / "s")
    shutil.copytree(out, tmp_path / "copy")
    prepare(tmp_path / "copy", *arguments)
    assert digests(tmp_path / "copy") == whole
    assert digests(tmp_path / "s") == before
    prepare(out, *arguments)
    assert digests(out) == whole and not list((tmp_path / "s").iterdir())


def test_a_marker_of_another_version_or_program_stays_and_is_refused(
    tmp_path, sets, prepare, whole, capsys
):
    crafted = json.dumps({"identity": {}, "work": "thesis"})
    stranger, out = tmp_path / "stranger", prepare(tmp_path / "out", *set_flags(sets))
    stranger.mkdir()
    for folder in (stranger, out):
        (folder / "unfinished.json").write_text(crafted)
    prepare(out, *set_flags(sets))
    assert "nothing to do" in capsys.readouterr().out
    for folder in (stranger, out):
        with pytest.raises(UserError, match=r"has no format, must be 1: .*; move it away$"):
            prepare(folder, *set_flags(sets, "--overwrite"))
        assert (folder / "unfinished.json").read_text() == crafted
    assert digests(out).items() > whole.items()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"files": ["../thesis/chapter.tex"]}, 'files.0 is "../thesis/chapter.tex"'),
        ({"files": ["packing/../notes.txt"]}, "files.0 is"),
        ({"files": ["notes.txt"]}, 'files.0 is "notes.txt"'),
        ({"scratch": 7}, "scratch is 7"),
        ({"identity": []}, "identity is []"),
        ({"program": "another"}, 'program is "another"'),
        ({"format": 2}, "format is 2, must be 1: another version of cat_lm wrote it"),
    ],
)
def test_a_marker_of_another_shape_is_one_line(sets, prepare, begun, thesis, change, message):
    marker = json.loads((begun / "unfinished.json").read_text())
    (begun / "unfinished.json").write_text(json.dumps(marker | change))
    (begun / "notes.txt").write_text("mine")
    before = digests(begun)
    del before[".prepare.lock"]  # empty, and ours
    with pytest.raises(UserError) as raised:
        prepare(begun, *set_flags(sets, "--overwrite"))
    assert message in str(raised.value) and "\n" not in str(raised.value)
    assert digests(begun) == before and list(thesis.iterdir())


def test_overwriting_keeps_and_names_what_the_manifest_does_not_list(
    tmp_path, sets, prepare, capsys
):
    out = prepare(tmp_path / "out", *set_flags(sets, "--shard-tokens", "5K"))
    strangers = ("notes.txt", ".swap.tmp", ".folder.tmp/x", "tokenizer/mine.json", "train-x.bin")
    for name in (*strangers, "train-00777.bin", "packing/mine/plan.json"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("mine")
    (out / "empty").mkdir()
    old = {path.name for path in out.glob("train-0*.idx")}
    capsys.readouterr()
    prepare(out, *set_flags(sets, "--sets", "Small", "--overwrite"))
    shown = capsys.readouterr().out
    assert "left: .folder.tmp, .swap.tmp, empty, notes.txt, packing and 3 more" in shown
    for name in (*strangers, "train-00777.bin", "packing/mine/plan.json"):
        assert (out / name).read_text() == "mine"
    assert (out / "empty").is_dir()
    assert {path.name for path in out.glob("train-0*.idx")} < old


def test_a_file_that_new_shards_would_replace_is_refused(tmp_path, sets, prepare, begun):
    (begun / "train-00000.idx").write_text("mine")
    with pytest.raises(UserError, match=r"train-00000\.idx is not of this preparation and would"):
        prepare(begun, *set_flags(sets))
    assert (begun / "train-00000.idx").read_text() == "mine"
    (begun / "train-00000.idx").unlink()
    prepare(begun, *set_flags(sets))


def test_a_folder_of_others_where_the_parts_go_is_refused(tmp_path, sets, prepare, thesis):
    from data_prep.encode.work_folder import WorkFolder

    place = WorkFolder.of(tmp_path / "out", tmp_path / "s").path
    shutil.copytree(thesis, place)
    with pytest.raises(UserError, match="was not made by this program; move it away"):
        prepare(tmp_path / "out", *set_flags(sets, "--scratch", tmp_path / "s"))
    assert (place / "chapter.tex").exists()
    (tmp_path / "s2").mkdir()
    place = WorkFolder.of(tmp_path / "out2", tmp_path / "s2").path
    place.symlink_to(thesis)
    with pytest.raises(UserError, match="was not made by this program"):
        prepare(tmp_path / "out2", *set_flags(sets, "--scratch", tmp_path / "s2"))
    assert (thesis / "chapter.tex").exists()


def test_what_others_put_among_the_parts_stays(sets, prepare, begun, whole, capsys):
    (begun / "parts" / "chapter.tex").write_text("mine")
    prepare(begun, *set_flags(sets))
    assert "chapter.tex is not of the preparation" in capsys.readouterr().out
    assert set(os.listdir(begun / "parts")) == {"chapter.tex", MARK}
    assert digests(begun).items() > whole.items()
    with pytest.raises(UserError, match="parts: holds files that are not of a preparation"):
        prepare(begun, *set_flags(sets, "--overwrite"))
    assert (begun / "parts/chapter.tex").read_text() == "mine"
    assert digests(begun).items() > whole.items()


def test_a_temporary_folder_of_that_name_is_no_tokenizer_of_ours(tmp_path, sets, prepare, begun):
    (begun / ".tokenizer.host.1.tmp").mkdir()
    (begun / ".tokenizer.host.1.tmp" / "x").write_text("mine")
    prepare(begun, *set_flags(sets))
    assert (begun / ".tokenizer.host.1.tmp" / "x").exists()


def test_what_only_has_the_name_of_an_unfinished_file_stays(tmp_path, sets, prepare, begun, whole):
    strangers = [
        begun / name for name in (".train-00000.bin.mine.tmp", ".manifest.json.12345678.tmp")
    ]
    for path in strangers:
        path.write_text("mine")
    (begun / MAKING).mkdir()
    (begun / MAKING / "mine").write_text("mine")
    with pytest.raises(UserError, match=r"making\.tmp: stands where temporary files go"):
        prepare(begun, *set_flags(sets))
    os.rename(begun / MAKING, tmp_path / "moved away")
    prepare(begun, *set_flags(sets))
    for path in strangers:
        assert path.read_text() == "mine"
        path.unlink()
    assert digests(begun) == whole


def test_what_a_kill_left_unfinished_goes(sets, prepare, begun, whole):
    make_temporary(begun / MAKING)
    (begun / MAKING / "train-00000.bin").write_text("half")
    prepare(begun, *set_flags(sets))
    assert digests(begun) == whole


def test_a_stranger_among_the_records_of_shards_stays(tmp_path, sets, prepare, begun, capsys):
    mine = begun / "parts/shards/mine.txt"
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    prepare(begun, *set_flags(sets, "--stage", "assemble"))
    assert mine.read_text() == "mine"
    assert "shards/mine.txt is not of the preparation: stays" in capsys.readouterr().out
