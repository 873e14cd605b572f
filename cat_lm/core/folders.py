"""Output folders: checks of their paths, locks, temporary folders and atomic replacement.

Output is written under temporary names and renamed into place. An existing folder is replaced only
if a record lists every file in it; a file that no record lists is never deleted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from cat_lm.core.errors import UserError, describe_os_error, file_error
from cat_lm.core.files import give_usual_mode, sync_directory, write_text

MARK = ".cat_lm.json"  # marks a temporary folder as this program's
WAIT_SECONDS = 0.2  # seconds between attempts to take a lock
_MARK_TEXT = '{"format":1,"program":"cat_lm","temporary":true}\n'
# Matches s3://, file:/, a::s3:// and user@host:. `Path` merges double slashes and drops "./".
_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]+"
_ADDRESS = re.compile(rf"(?:\./+)*(?:(?:{_SCHEME}::)*{_SCHEME}:/|[^/@:]+@[^/@:]+:)")


# Checks of output paths


def path_problem(text: str) -> str | None:
    """Return why a text cannot be the path of a file, folder or model; None where it can."""
    # A text of quotes only is a shell's rest of an argument that was meant to be empty.
    if not text.strip("\"' ") or text != text.strip():
        return "is no path"
    if any(ord(character) < 32 for character in text):
        return "is no path: it has control characters in it"
    return None


def output_problem(text: str) -> str | None:
    """Return why a path cannot be written to; None where it may be possible."""
    if _ADDRESS.match(text):
        return "is an address; results are written to folders of this machine alone"
    if text == "-":
        return "is no path: results are written to files, not to the standard output"
    return path_problem(text)


def check_output(out: Path | str, flag: str = "--out") -> None:
    """Check, before any work is done, that `out` can be a folder to write to.

    Raises UserError where it or a folder above it is a file, may not be written to, or is no path.
    """
    _check_place(out, Path(out).absolute(), f"{flag} {out}", "a folder")


def check_file(path: Path | str) -> None:
    """Check, before any work is done, that a file can be written to `path` at the end of it.

    Raises UserError where it is a folder or a device, or lies where no file can be made.
    """
    if os.path.lexists(path) and not os.path.isfile(path):
        what = "a folder" if os.path.isdir(path) else "no regular file"
        raise UserError(f"{path}: is {what}; give a file")
    _check_place(path, Path(path).absolute().parent, str(path), "a file in a folder")


def _check_place(path: Path | str, folder: Path, name: str, wanted: str) -> None:
    if problem := output_problem(str(path)):
        raise UserError(f"{name!r}: {problem}; give {wanted}")
    place = folder
    while True:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(place)  # Raises for names that are too long.
            break
        place = place.parent
    if not os.path.isdir(place):
        which = "is a file" if place == Path(path).absolute() else f"{place} is a file"
        raise UserError(f"{name}: {which}; give {wanted}")
    # os.access allows root /proc and /sys, where no file can be made.
    is_virtual = place.parts[1:2] in (("proc",), ("sys",))
    if is_virtual or not os.access(place, os.W_OK | os.X_OK):
        raise UserError(f"{name}: {place} may not be written to")


# Locks, which the kernel releases when the process that holds them ends in any way


class Busy(Exception):
    """Another process holds the lock."""


class Lock(io.FileIO):
    """An open lock file; the lock is held until every process that has it open closes it or ends.

    On a file system without locks `error` is set, and the lock excludes nobody.
    """

    error: OSError | None = None


def take_lock(path: Path, *, shared: bool = False, wait: bool = True) -> Lock:
    """Lock a file, which is made if it is missing, and return the lock.

    Args:
        shared: allow other shared holders at the same time.
        wait: wait until another holder is done; otherwise raise `Busy`.
    """
    kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    while True:
        lock = Lock(path, "a+")  # On NFS, shared locks need reading, and exclusive ones writing.
        try:
            fcntl.flock(lock, kind)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                lock.close()
                raise Busy from None
            lock.error = error
            return lock
        # The previous holder may have removed or renamed the file that was opened above.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                return lock
        lock.close()
        if not wait:
            raise Busy


def wait_for_lock(path: Path, progress: Callable[[str], object], what: str) -> Lock:
    """Wait for a lock and return it; call `progress` with the text `what` while waiting."""
    while True:
        try:
            return take_lock(path, wait=False)
        except Busy:
            progress(what)
            time.sleep(WAIT_SECONDS)


# Temporary folders, in which output is written before it is renamed into place


def temporary_name(place: Path, suffix: str) -> Path:
    """Return the path of this process's temporary folder beside `place`: `.NAME.PROCESS.SUFFIX`."""
    return place.with_name(f".{place.name}.{_process_namespace()}-{os.getpid()}.{suffix}")


def list_leftovers(place: Path, suffix: str) -> list[Path]:
    """List the temporary folders that any process has left beside `place`."""
    # The host has no dot in it: `.model.v2.HOST-1-2.tmp` belongs to `model.v2`, not to `model`.
    named = re.compile(rf"\.{re.escape(place.name)}\.[^.]+-\d+\.{suffix}")
    found = (path for path in place.parent.iterdir() if named.fullmatch(path.name))
    return sorted(path for path in found if is_ours(path))


def has_owner_ended(folder: Path) -> bool:
    """Return True if a temporary folder's process ran on this host and has ended."""
    host, _, process = folder.stem.rpartition("-")
    if not host.endswith(f".{_process_namespace()}") or not process.isdecimal():
        return False
    try:
        os.kill(int(process), 0)
    except (OSError, OverflowError) as error:
        return isinstance(error, ProcessLookupError)
    return False


def _process_namespace() -> str:
    """Return HOST-NAMESPACE, where the namespace (a container's, say) numbers the processes."""
    namespace = re.sub(r"\D", "", os.readlink("/proc/self/ns/pid"))
    return f"{socket.gethostname().replace('.', '_')}-{namespace}"


def make_temporary(folder: Path) -> None:
    """Make a temporary folder, or reuse with its files one that a killed process has left.

    Raises UserError where something else has this name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not is_ours(folder):
        raise _not_ours(folder)
    if not is_marked(folder):
        write_text(folder / MARK, _MARK_TEXT)


def is_marked(folder: Path) -> bool:
    """Return True if a folder has the marker of this program's temporary folders."""
    return not folder.is_symlink() and (folder / MARK).is_file()


def is_ours(folder: Path) -> bool:
    """Return True if a folder has the marker, or is empty because a kill came before the marker."""
    if is_marked(folder):
        return True
    if folder.is_symlink() or not folder.is_dir():
        return False
    return all(path.name.startswith(f".{MARK}") for path in folder.iterdir())


def empty_temporary(folder: Path) -> None:
    """Empty a temporary folder except for its marker. Raises UserError for other folders."""
    if not is_ours(folder):
        raise _not_ours(folder)
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MARK:
            path.unlink()


def remove_temporary(folder: Path) -> None:
    """Delete a temporary folder, its marker last; do nothing where there is none.

    Raises UserError where something else has this name, or the folder cannot be removed.
    """
    if not os.path.lexists(folder):
        return
    try:
        empty_temporary(folder)
        (folder / MARK).unlink(missing_ok=True)
        folder.rmdir()
    except OSError as error:
        text = f"{folder}: cannot be removed ({describe_os_error(error)})"
        raise file_error(text, error) from None


def _not_ours(folder: Path) -> UserError:
    return UserError(
        f"{folder}: stands where temporary files go, and was not made by this program; move it away"
    )


# Atomic replacement of folders


def _list_nothing(folder: Path) -> Collection[str]:
    return ()


@contextmanager
def atomic_folder(
    out: Path, listing: Callable[[Path], Collection[str]] = _list_nothing, flag: str = "OUT"
) -> Iterator[Path]:
    """Yield an empty folder that replaces `out` when the block ends without an error.

    Args:
        listing: given a folder, returns the relative paths of the files that its record lists; an
            `out` with other files is not replaced.
        flag: the command-line option in error messages.

    Raises:
        UserError: `out` holds anything else, another command writes to it, or it cannot be written.
    """
    from safetensors import SafetensorError

    place = Path(os.path.realpath(out))  # Replace the folder that a link points to, not the link.
    named = f"{flag} {out}"
    holder = temporary_name(place, "tmp")
    new, old = holder / "new", holder / "old"
    try:
        with _lock_output(place, listing, named):
            _check_listed(place, listing, named)
            make_temporary(holder)
            try:
                new.mkdir()
                yield new
                _publish(new)
                if place.exists():
                    shutil.copymode(place, new)
                    os.replace(place, old)
                _check_listed(old, listing, named)  # A file may have been added meanwhile.
                os.replace(new, place)
                sync_directory(place.parent)
            finally:
                if old.exists() and not place.exists():
                    os.replace(old, place)
                with contextlib.suppress(UserError):  # The next attempt removes it.
                    remove_temporary(holder)
    except OSError as error:
        text = f"{named}: cannot be written: {describe_os_error(error)}"
        raise file_error(text, error) from error
    except SafetensorError as error:  # It is no OSError, not even for a full disk.
        raise UserError(f"{named}: cannot be written: {error}") from error


@contextmanager
def _lock_output(
    place: Path, listing: Callable[[Path], Collection[str]], named: str
) -> Iterator[None]:
    """Lock an output folder, and remove what killed commands have left beside it.

    Without the lock, the later of two commands would silently replace the output of the earlier
    one.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    path = place.with_name(f".{place.name}.writing")
    try:
        lock = take_lock(path, wait=False)
    except Busy:
        raise UserError(f"{named}: another command is writing to it") from None
    with lock:
        try:
            for left in list_leftovers(place, "tmp"):
                # Without locks, the folder may belong to a command that is still running.
                if lock.error is None or has_owner_ended(left):
                    _restore_and_remove(left, place, listing, named)
            yield
        finally:
            path.unlink(missing_ok=True)


def _restore_and_remove(
    left: Path, place: Path, listing: Callable[[Path], Collection[str]], named: str
) -> None:
    """Remove the folder of a killed command, and first move an earlier result in it back."""
    old = left / "old"
    if old.is_dir():
        with contextlib.suppress(OSError):
            place.rmdir()  # Succeeds only if it is empty.
        if not place.exists():
            os.replace(old, place)
        # A result in `place` is the newer one: the kill came after the second rename.
        _check_listed(place, listing, named)
    remove_temporary(left)


def _check_listed(place: Path, listing: Callable[[Path], Collection[str]], named: str) -> None:
    if not place.exists():
        return
    found = files_below(place)
    if found and (others := sorted(found - set(listing(place)))):
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise UserError(
            f"{named}: holds {others[0]}{more}, which is not of an earlier result; move it away"
        )


def files_below(folder: Path) -> set[str]:
    """Return the relative paths of all files, links and empty folders (these end in /)."""
    found = set()
    for parent, folders, files in os.walk(folder):
        inner = Path(parent).relative_to(folder)
        links = [name for name in folders if (Path(parent) / name).is_symlink()]
        found |= {str(inner / name) for name in (*files, *links)}
        if not folders and not files and inner != Path():
            found.add(f"{inner}/")
    return found


def _publish(folder: Path) -> None:
    """Flush a folder to disk, and give its files the permissions of new files."""
    for path in (*folder.rglob("*"), folder):
        if path.is_symlink():
            continue
        if path.is_dir() or path.stat().st_nlink == 1:  # A hard link is also another file.
            give_usual_mode(path)
        if path.is_dir():
            sync_directory(path)
        else:
            with open(path, "rb") as stream:
                os.fsync(stream.fileno())
