"""Which error of the system it was, where a library that wrote or read a file does not say it.

safetensors has the number in its text, or takes whatever keeps a file from being opened for its
absence; torch has it in its text; `shutil.copytree` lists texts. Whether an error may pass, and its
exit code, hang on the number.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cat_lm.core.errors import is_temporary

# safetensors' and Python's forms; torch's is a bare number, which the system's words must go with.
_NUMBERED = re.compile(r"\bos error (\d+)|\[Errno (\d+)\](?: [^':]*: '([^']+)')?")
_BARE = re.compile(r"\((\d+)\)")


def os_error(error: Exception, path: Path | str) -> OSError | None:
    """Return the system's error that a library's error on a file stands for, with the file's name.

    Returns:
        None where the system has no part in it, as where the content is damaged.
    """
    if isinstance(error, OSError) and error.errno is not None:
        error.filename = error.filename or str(path)
        return error
    if told := _told(str(error), path):
        return min(told, key=is_temporary)  # first what somebody must mend
    found = _found(path)
    if isinstance(error, FileNotFoundError):
        return found or OSError(errno.EAGAIN, "could not be opened, and now can be", str(path))
    # What was to be written need not be there.
    return None if isinstance(found, FileNotFoundError) else found


def _told(text: str, path: Path | str) -> list[OSError]:
    """List the errors that a text names, of `path` where it names no other file."""
    told = [(int(one or other), file) for one, other, file in _NUMBERED.findall(text)]
    bare = [int(number) for number in _BARE.findall(text)]
    bare = [number for number in bare if number in errno.errorcode]
    told += [(number, "") for number in bare if os.strerror(number) in text]
    return [
        OSError(number, os.strerror(number), file or str(path))
        for number, file in told
        if number in errno.errorcode
    ]


def _found(path: Path | str) -> OSError | None:
    """Return what keeps a file from being opened now."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except OSError as error:
        return error
    return None


@contextmanager
def causes_told(path: Path | str) -> Iterator[None]:
    """Raise the system's error, with a file's name, in the place of a library's inside."""
    try:
        yield
    except Exception as error:
        cause = os_error(error, path)
        if cause is None or cause is error:
            raise
        raise cause from error
