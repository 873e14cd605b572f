"""Commands write over what an earlier run of theirs wrote, and over nothing else."""

from __future__ import annotations

import json

import pytest

from cat_lm.core.errors import UserError
from cat_lm.core.outputs import PICTURES, claim_file, claim_outputs, result_files, write_result
from eval.common.provenance import provenance

NAMES = ["sweep.csv", *result_files("sweep", *PICTURES)]


@pytest.mark.parametrize("name", ["sweep.json", *NAMES])
def test_what_nobody_listed_is_not_replaced(tmp_path, name):
    for text in ("mine", "{}", '{"command": "make"}'):
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match=rf"--out .*: {name} is not of an earlier run"):
            claim_outputs(tmp_path, "sweep.json", NAMES)
        assert [path.name for path in tmp_path.iterdir()] == [name]
        assert (tmp_path / name).read_text() == text


def test_what_an_earlier_run_listed_is_replaced(tmp_path):
    claim_outputs(tmp_path / "out", "sweep.json", ["sweep.csv"])
    for name in ("sweep.json", "sweep.csv"):
        (tmp_path / "out" / name).write_text("half")
    claim_outputs(tmp_path / "out", "sweep.json", ["sweep.csv", "sweep.png"])
    (tmp_path / "out/sweep.png").write_text("picture")
    claim_outputs(tmp_path / "out", "sweep.json", ["sweep.png"])
    (tmp_path / "out/sweep.svg").write_text("mine")
    with pytest.raises(UserError, match=r"sweep\.svg is not of an earlier run"):
        claim_outputs(tmp_path / "out", "sweep.json", NAMES)
    # Another command's listing says nothing.
    with pytest.raises(UserError, match=r"sweep\.csv is not of an earlier run"):
        claim_outputs(tmp_path / "out", "report.json", ["sweep.csv"])


@pytest.mark.parametrize("inside", [True, False])
def test_a_result_speaks_for_itself_alone(tmp_path, inside):
    result = {"rows": [], **(provenance() if inside else {"provenance": provenance()})}
    (tmp_path / "sweep.json").write_text(json.dumps(result))
    (tmp_path / "sweep.csv").write_text("length,loss\n")
    with pytest.raises(UserError, match=r"sweep\.csv is not of an earlier run"):
        claim_outputs(tmp_path, "sweep.json", NAMES)
    claim_outputs(tmp_path, "sweep.json")
    claim_file(tmp_path / "sweep.json", "--json")
    (tmp_path / "link.json").symlink_to("sweep.json")
    for name in ("sweep.csv", "link.json"):
        with pytest.raises(UserError, match=f"--json .*{name}: holds no earlier result"):
            claim_file(tmp_path / name, "--json")


def test_a_damaged_listing_or_another_version_s_lists_nothing(tmp_path):
    claim_outputs(tmp_path, "sweep.json")
    (listing,) = tmp_path.iterdir()
    whole = json.loads(listing.read_text())
    (tmp_path / "sweep.json").write_text("mine")
    for wrong in ({"files": 3}, {"format": 2}):
        listing.write_text(json.dumps(whole | wrong))
        with pytest.raises(UserError, match=r"sweep\.json is not of an earlier run"):
            claim_outputs(tmp_path, "sweep.json")


def test_result_replaces_its_own_file_and_no_other(tmp_path):
    path, target = tmp_path / "plan.json", tmp_path / "mine.json"
    for days in (1, 2):
        write_result(path, "--json", "python -m launch.doctor", {"days": days})
    assert json.loads(path.read_text())["days"] == 2
    target.write_text("{}")
    path.unlink()
    path.symlink_to(target)
    for kept in (target, path):
        with pytest.raises(UserError, match=r"--json .*holds no earlier result"):
            write_result(kept, "--json", "python -m launch.doctor", {})
    write_result(tmp_path / "measured.json", "--json", "python -m eval.speed", {"days": 1})
    with pytest.raises(UserError, match=r"--json .*holds no earlier result of `python -m launch\."):
        write_result(tmp_path / "measured.json", "--json", "python -m launch.doctor", {})
    assert path.is_symlink() and target.read_text() == "{}"
