"""A `python` for commands that scripts, torchrun and SLURM start: forked instead of started anew.

Of a command that trains for a second, nine tenths of the work are an interpreter's imports.
`served_python` is an executable file that takes an interpreter's place. It hands its command line,
folder, environment, input and outputs to a server that is forked from the process that has imported
everything (tests/commands.py) and forks from itself for every command. Signals go on to the
command, its exit code or signal comes back, and KILL to the one kills the other.

What differs: the command's parent is the server, and its session its own; STOP does not reach it.
Tests of those, and one of each kind of launcher, start interpreters.
"""

from __future__ import annotations

import contextlib
import marshal
import multiprocessing
import multiprocessing.connection
import os
import selectors
import shlex
import signal
import socket
import sys
import tempfile
import weakref
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from tests import commands

CLIENT = Path(__file__).with_name("served_client.py")


@contextlib.contextmanager
def served_python() -> Iterator[str]:
    """Path of the executable. Where there is a GPU, whose driver no fork survives, an interpreter.

    Leaving it kills what still runs.
    """
    if torch.cuda.is_available():
        yield sys.executable
        return
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        address, python = Path(folder) / "socket", Path(folder) / "python"
        listener.bind(str(address))
        listener.listen(64)
        words = shlex.join([sys.executable, "-IS", str(CLIENT), str(address)])
        python.write_text(f'#!/bin/sh\nexec {words} "$0" "$@"\n', encoding="utf-8")
        python.chmod(0o755)
        server = commands.preloaded().Process(target=_Server.serve, args=(listener,))
        server.start()
        # Python's end would wait for what a failed test has left behind.
        weakref.finalize(server, server.kill)
        try:
            yield str(python)
        finally:
            server.terminate()
            server.join()


class _Server:
    """Runs commands, each in a process of its own."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.running: dict[socket.socket, BaseProcess] = {}
        self.ready = selectors.DefaultSelector()

    @classmethod
    def serve(cls, listener: socket.socket) -> None:
        """Answer until the test's process ends or sends TERM."""
        server = cls(listener)
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit())
        try:
            server._loop()
        finally:
            for process in server.running.values():
                process.kill()

    def _loop(self) -> None:
        self.ready.register(self.listener, selectors.EVENT_READ)
        test = multiprocessing.parent_process().sentinel
        self.ready.register(test, selectors.EVENT_READ)
        while True:
            for key, _ in self.ready.select():
                if key.fileobj is self.listener:
                    self._begin(self.listener.accept()[0])
                elif key.fileobj == test:
                    return
                elif key.data in self.running:  # else its client has gone in this same round
                    self._end(key.data)

    def _begin(self, client: socket.socket) -> None:
        try:
            size, streams, *_ = socket.recv_fds(client, 8, 3)
            with client.makefile("rb") as given:
                request = marshal.loads(given.read(int.from_bytes(size, "big")))
        except (OSError, EOFError, ValueError):  # killed while it asked
            client.close()
            return
        process = multiprocessing.get_context("fork").Process(
            target=self._run, args=(client, streams, *request)
        )
        process.start()
        for stream in streams:
            os.close(stream)
        self.running[client] = process
        for one in (client, process.sentinel):
            self.ready.register(one, selectors.EVENT_READ, client)
        self._tell(client, process.pid)

    def _end(self, client: socket.socket) -> None:
        """The command has ended, or whom it was run for: both have, after this."""
        process = self.running.pop(client)
        for one in (client, process.sentinel):
            self.ready.unregister(one)
        if not multiprocessing.connection.wait([process.sentinel], timeout=0):
            process.kill()
        process.join()
        self._tell(client, process.exitcode)
        client.close()

    @staticmethod
    def _tell(client: socket.socket, number: int) -> None:
        with contextlib.suppress(OSError):  # killed meanwhile, which shows in the loop
            client.sendall(number.to_bytes(8, "big", signed=True))

    def _run(
        self,
        client: socket.socket,
        streams: list[int],
        words: list[str],
        folder: str,
        variables: dict[str, str],
        python: str,
        ignored: list[int],
    ) -> None:
        """Be the command, in its own process."""
        # Who waits for a connection's end must not wait for this process.
        for one in (self.listener, client, *self.running, self.ready):
            one.close()
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        if words[0] == "-u":
            words = words[1:]
            sys.stdout.reconfigure(line_buffering=True)
        commands.be_python(words, folder, variables, streams, python)
