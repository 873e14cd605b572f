"""What a probe in the source calls: it notes the test that reaches the line.

It imports nothing that a program might look for in `sys.modules`, and never fails or prints.
"""

from os import O_APPEND, O_CREAT, O_WRONLY, close, environ, write
from os import open as open_file

FOLDER = "CAT_LM_FAULT_HITS"  # the variable that names the folder of the notes
UNKNOWN = "?"  # no test: what pytest imports while it collects
_noted: set[tuple[str, str]] = set()


def hit(name: str) -> None:
    """Note once in a process that the test under way reaches the fault `name`."""
    try:
        # Subprocesses and ranks inherit the variable that pytest sets.
        key = (name, environ.get("PYTEST_CURRENT_TEST", UNKNOWN))
        if key in _noted:
            return
        _noted.add(key)
        note = open_file(f"{environ[FOLDER]}/hits", O_WRONLY | O_APPEND | O_CREAT, 0o666)
        write(note, f"{name}\t{key[1]}\n".encode())
        close(note)
    except (OSError, KeyError, ValueError):
        return
