"""How commands end: one line, the exit code, and who says it."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest

from cat_lm.core.errors import TemporaryError, UserError, command, file_error, shared_error

FULL = "No space left on device"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("key=1: must be 2"), 2, "error: key=1: must be 2"),
        (OSError(errno.ENOSPC, FULL, "a/b"), 2, "error: a/b: the disk is full"),
        (OSError(errno.ENOSPC, FULL), 2, "error: standard output: the disk is full"),
        (PermissionError(errno.EACCES, "Permission denied", "a"), 2, "error: a: no permission"),
        (OSError(errno.ESTALE, "Stale file handle", "a"), 75, "error: a: Stale file handle"),
        (OSError(errno.ESTALE, "Stale file handle"), 75, "error: OSError: Stale file handle"),
        (ConnectionResetError(errno.ECONNRESET, "reset"), 75, "error: ConnectionResetError: "),
        (TemporaryError("not all ranks met"), 75, "error: not all ranks met"),
        (file_error("a: gone", OSError(errno.EIO, "x")), 75, "error: a: gone"),
        (file_error("a: gone", OSError(errno.ENOENT, "x")), 2, "error: a: gone"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_command_ends_in_one_line(error, code, line, capsys):
    @command
    def main():
        raise error

    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    printed = capsys.readouterr().err
    assert printed.startswith(line) and len(printed.splitlines()) == 1


@pytest.mark.parametrize(("temporary", "code"), [(False, 2), (True, 75)])
@pytest.mark.parametrize(("rank", "printed"), [("0", "error: no data\n"), ("1", "")])
def test_error_that_all_ranks_share_is_said_once(
    rank, printed, temporary, code, monkeypatch, capfd
):
    def fails():
        raise shared_error("no data", temporary)

    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(SystemExit) as ended:
        command(fails)()
    assert ended.value.code == code and capfd.readouterr().err == printed


@pytest.mark.parametrize("full", ["stdout", "stderr"])
def test_full_disk_of_a_stream_changes_no_exit_code(full):
    body = "print('x')" if full == "stdout" else "raise UserError('y')"
    code = "from cat_lm.core.errors import UserError, command\n"
    code += f"@command\ndef main():\n    {body}\nmain()\n"
    with open("/dev/full", "w") as stream:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, full: stream}
        done = subprocess.run([sys.executable, "-c", code], **streams, text=True)
    assert done.returncode == 2
    if full == "stdout":
        assert done.stderr == "error: standard output: the disk is full\n"
