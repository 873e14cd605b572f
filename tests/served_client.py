"""In the place of an interpreter: has its command run by the server of tests/served.py.

`CLIENT SOCKET PYTHON WORDS …`, where PYTHON WORDS is the command line that was given. Started for
every command, it imports little. It passes signals on and ends as its command ends, by the same
signal if need be. What is no command of this project is run by the interpreter itself.
"""

import marshal
import os
import signal
import socket
import sys

ROOMS = ("cat_lm", "data_prep", "eval", "launch", "tests")
PASSED_ON = ("HUP", "INT", "QUIT", "TERM", "USR1", "USR2")


def is_served(words: list[str]) -> bool:
    """Tell whether the server knows how to run it: our modules, train.py and torchrun."""
    if words[:1] == ["-u"]:
        words = words[1:]
    if words[:1] == ["-m"] and len(words) > 1:
        return words[1].partition(".")[0] in ROOMS or words[1] == "torch.distributed.run"
    return words[:1] == ["train.py"]


def main(address: str, python: str, *words: str) -> None:
    """Run the command; does not return."""
    if not is_served(list(words)):
        os.execv(sys.executable, [sys.executable, *words])
    early: list[int] = []
    process = None

    def pass_on(number: int, frame: object) -> None:
        if process is None:
            early.append(number)
        else:
            os.kill(process, number)

    ignored = []
    for name in PASSED_ON:
        number = signal.Signals[f"SIG{name}"].value
        if signal.getsignal(number) == signal.SIG_IGN:
            ignored.append(number)
        else:
            signal.signal(number, pass_on)
    server = socket.socket(socket.AF_UNIX)
    server.connect(address)
    given = marshal.dumps((list(words), os.getcwd(), dict(os.environ), python, ignored))
    socket.send_fds(server, [len(given).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(given)
    process = _number(server)
    while early:
        os.kill(process, early.pop(0))
    code = _number(server)
    if code >= 0:
        os._exit(code)
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)


def _number(server: socket.socket) -> int:
    told = b""
    while len(told) < 8:
        part = server.recv(8 - len(told))
        if not part:
            sys.exit("the server of tests/served.py has gone")
        told += part
    return int.from_bytes(told, "big", signed=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
