"""Folders: where output can go, locks, temporary folders, and folders that are whole or absent.

Output is written under temporary names and renamed into place. A folder is replaced where a record
in it lists all that it holds; nothing that is not listed is ever deleted.
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

MARK = ".cat_lm.json"  # the file that marks a temporary folder as this program's
WAIT_SECONDS = 0.2  # between looks whether another holder of a lock is done
_MARK_TEXT = '{"format":1,"program":"cat_lm","temporary":true}\n'
# s3://, file:/, a::s3://, user@host:; `Path` makes one slash of two, and takes "./" off.
_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]+"
_ADDRESS = re.compile(rf"(?:\./+)*(?:(?:{_SCHEME}::)*{_SCHEME}:/|[^/@:]+@[^/@:]+:)")


# Where output can go


def path_problem(text: str) -> str | None:
    """Return why a text can be no path of a file, a folder or a model; None where it can."""
    # Quotes alone are what a shell leaves of an argument that was meant to be empty.
    if not text.strip("\"' ") or text != text.strip():
        return "is no path"
    if any(ord(character) < 32 for character in text):
        return "is no path: it has control characters in it"
    return None


def output_problem(text: str) -> str | None:
    """Return why nothing can be written to a path; None where it may be possible."""
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
            os.lstat(place)  # which raises for names that are too long
            break
        place = place.parent
    if not os.path.isdir(place):
        which = "is a file" if place == Path(path).absolute() else f"{place} is a file"
        raise UserError(f"{name}: {which}; give {wanted}")
    # Root may write to /proc and /sys, and can make nothing there.
    is_virtual = place.parts[1:2] in (("proc",), ("sys",))
    if is_virtual or not os.access(place, os.W_OK | os.X_OK):
        raise UserError(f"{name}: {place} may not be written to")


# Locks, which the kernel releases when their holder ends, however it ends


class Busy(Exception):
    """Another process holds the lock."""


class Lock(io.FileIO):
    """The file of a lock that is held until all processes that have it open close it or end.

    `error` is that of a file system that knows no locks: the lock then holds nobody back.
    """

    error: OSError | None = None


def hold(path: Path, *, shared: bool = False, wait: bool = True) -> Lock:
    """Take the lock that a file stands for, which is made where it is not there.

    Args:
        shared: together with other holders of the kind.
        wait: until another's lock ends; else `Busy` is raised.
    """
    kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    while True:
        lock = Lock(path, "a+")  # NFS gives a shared lock to readers alone, the other to writers
        try:
            fcntl.flock(lock, kind)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                lock.close()
                raise Busy from None
            lock.error = error
            return lock
        # The holder before may have removed or renamed what was opened above.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                return lock
        lock.close()
        if not wait:
            raise Busy


def hold_patiently(path: Path, progress: Callable[[str], object], what: str) -> Lock:
    """Take a lock as soon as nobody else has it, and report meanwhile `what` is waited for."""
    while True:
        try:
            return hold(path, wait=False)
        except Busy:
            progress(what)
            time.sleep(WAIT_SECONDS)


# Temporary folders, in which files grow until they are whole and get their names by a rename


def own_name(place: Path, suffix: str) -> Path:
    """Return the temporary folder of this process beside a place: `.NAME.PROCESS.SUFFIX`."""
    return place.with_name(f".{place.name}.{_process_namespace()}-{os.getpid()}.{suffix}")


def left_beside(place: Path, suffix: str) -> list[Path]:
    """List the temporary folders of all processes beside a place."""
    # Without a dot: `.model.v2.HOST-1-2.tmp` is beside `model.v2`, not `model`.
    named = re.compile(rf"\.{re.escape(place.name)}\.[^.]+-\d+\.{suffix}")
    found = (path for path in place.parent.iterdir() if named.fullmatch(path.name))
    return sorted(path for path in found if is_ours(path))


def maker_is_gone(folder: Path) -> bool:
    """Return True if the process that `own_name` names was one of this host, and has ended."""
    host, _, process = folder.stem.rpartition("-")
    if not host.endswith(f".{_process_namespace()}") or not process.isdecimal():
        return False
    try:
        os.kill(int(process), 0)
    except (OSError, OverflowError) as error:
        return isinstance(error, ProcessLookupError)
    return False


def _process_namespace() -> str:
    """Return this host's name, and the namespace that numbers its processes, as of a container."""
    namespace = re.sub(r"\D", "", os.readlink("/proc/self/ns/pid"))
    return f"{socket.gethostname().replace('.', '_')}-{namespace}"


def make_temporary(folder: Path) -> None:
    """Make a temporary folder; one that a killed process left is taken with what is in it.

    Raises UserError where something else stands there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not is_ours(folder):
        raise _not_ours(folder)
    if not is_marked(folder):
        write_text(folder / MARK, _MARK_TEXT)


def is_marked(folder: Path) -> bool:
    """Return True if a folder is a temporary one of this program."""
    return not folder.is_symlink() and (folder / MARK).is_file()


def is_ours(folder: Path) -> bool:
    """Return True if a folder is marked, or a kill ended its making before the mark."""
    if is_marked(folder):
        return True
    if folder.is_symlink() or not folder.is_dir():
        return False
    return all(path.name.startswith(f".{MARK}") for path in folder.iterdir())


def empty_temporary(folder: Path) -> None:
    """Delete everything in a temporary folder but its mark. Raises UserError for another folder."""
    if not is_ours(folder):
        raise _not_ours(folder)
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MARK:
            path.unlink()


def remove_temporary(folder: Path) -> None:
    """Delete a temporary folder, the mark last; nothing where there is none.

    Raises UserError where something else stands there, or where it cannot be removed.
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


# Folders that are whole or absent


def _nothing(folder: Path) -> Collection[str]:
    return ()


@contextmanager
def atomic_folder(
    out: Path, listing: Callable[[Path], Collection[str]] = _nothing, flag: str = "OUT"
) -> Iterator[Path]:
    """Yield an empty folder that takes the place of `out` when the block ends without an error.

    Args:
        listing: the relative paths that a folder's record says were written by its command; an
            `out` that holds nothing else is replaced.
        flag: names the option in messages.

    Raises:
        UserError: `out` holds anything else, another command writes to it, or it cannot be written.
    """
    from safetensors import SafetensorError

    place = Path(os.path.realpath(out))  # of a link, the folder that it points to is replaced
    named = f"{flag} {out}"
    holder = own_name(place, "tmp")
    new, old = holder / "new", holder / "old"
    try:
        with _claimed(place, listing, named):
            _check_listed(place, listing, named)
            make_temporary(holder)
            try:
                new.mkdir()
                yield new
                _publish(new)
                if place.exists():
                    shutil.copymode(place, new)
                    os.replace(place, old)
                _check_listed(old, listing, named)  # again: a file may have come meanwhile
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
    except SafetensorError as error:  # which is no OSError, not even for a full disk
        raise UserError(f"{named}: cannot be written: {error}") from error


@contextmanager
def _claimed(place: Path, listing: Callable[[Path], Collection[str]], named: str) -> Iterator[None]:
    """Hold the lock of a place, and clear what killed commands left beside it.

    Without the lock the later of two commands would silently replace what the earlier one has made.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    path = place.with_name(f".{place.name}.writing")
    try:
        lock = hold(path, wait=False)
    except Busy:
        raise UserError(f"{named}: another command is writing to it") from None
    with lock:
        try:
            for left in left_beside(place, "tmp"):
                # Where the file system has no locks, another command may be at work.
                if lock.error is None or maker_is_gone(left):
                    _clear(left, place, listing, named)
            yield
        finally:
            path.unlink(missing_ok=True)


def _clear(left: Path, place: Path, listing: Callable[[Path], Collection[str]], named: str) -> None:
    """Remove what a killed command left, after an earlier result in it is back in its place."""
    old = left / "old"
    if old.is_dir():
        with contextlib.suppress(OSError):
            place.rmdir()  # if it is empty
        if not place.exists():
            os.replace(old, place)
        # A result that is there is the newer one: the kill came after the second rename.
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
    """List all files, links and empty folders by their relative names; those of folders end in /"""
    found = set()
    for parent, folders, files in os.walk(folder):
        inner = Path(parent).relative_to(folder)
        links = [name for name in folders if (Path(parent) / name).is_symlink()]
        found |= {str(inner / name) for name in (*files, *links)}
        if not folders and not files and inner != Path():
            found.add(f"{inner}/")
    return found


def _publish(folder: Path) -> None:
    """Flush everything to disk, with the permissions that newly made files would have."""
    for path in (*folder.rglob("*"), folder):
        if path.is_symlink():
            continue
        if path.is_dir() or path.stat().st_nlink == 1:  # A hard link is somebody's file, too.
            give_usual_mode(path)
        if path.is_dir():
            sync_directory(path)
        else:
            with open(path, "rb") as stream:
                os.fsync(stream.fileno())
