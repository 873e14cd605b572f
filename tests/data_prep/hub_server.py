"""A stand-in of the Hub on the loopback: one repository, answering well and badly.

It is a data set and a model by the same name, so that both kinds have the same files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "owner/name"


class FakeHub(ThreadingHTTPServer):
    """Answers what huggingface_hub asks of a repository; `trouble` comes first.

    `trouble` holds, by path, actions for the next requests of that path: a status with headers, or
    "break", which ends the connection in the middle of the body.
    """

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.files = files
        self.listed = {}  # contents whose checksums are listed instead of those of `files`
        self.trouble = {}
        self.asked = Counter()
        self.tokens = set()  # that came with a request
        self.commit = COMMIT  # of its branch main
        self.ranges = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = unquote(urlparse(self.path).path)
        self.server.asked[path] += 1
        self.server.tokens.add(self.headers.get("Authorization"))
        own = re.sub("^(/api/models|(/api)?/datasets)?/", "", path)
        own = f"{own}/revision/main" if own == NAME else own
        kind, _, rest = own.removeprefix(f"{NAME}/").partition("/")
        key = rest.partition("/")[2] if kind == "resolve" else kind
        trouble = self.server.trouble.get(key) or []
        self.action = trouble.pop(0) if trouble else None
        if isinstance(self.action, tuple):
            self.answer(b"trouble", *self.action)
        elif kind == "revision":
            known = rest in ("v1", "main", COMMIT, self.server.commit)
            sha = self.server.commit if rest in ("main", self.server.commit) else COMMIT
            body = {"id": NAME, "sha": sha, "siblings": []}
            self.answer(json.dumps(body).encode(), 200) if known else self.missing("Revision")
        elif kind == "tree":
            self.tree(rest.partition("/")[2])
        elif kind == "resolve" and key in self.server.files:
            assert rest.startswith(COMMIT)
            self.file(self.server.files[key])
        elif kind == "resolve":
            self.missing("Entry")
        else:
            self.missing("Repo")

    def tree(self, folder):
        entries = []
        for name, data in sorted(self.server.files.items(), reverse=True):
            if not folder or name.startswith(f"{folder}/"):
                digest = hashlib.sha256(self.server.listed.get(name, data)).hexdigest()
                lfs = {"oid": digest, "size": len(data), "pointerSize": 130}
                entry = {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                entries.append(
                    {**entry, "lfs": lfs} if name.endswith(("zst", "parquet")) else entry
                )
        self.answer(json.dumps(entries).encode(), 200) if entries else self.missing("Entry")

    def file(self, data):
        first, last = 0, len(data) - 1
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(match[1]), min(int(match[2] or last), last)
        self.server.ranges.append((first, last))
        etag = hashlib.sha256(data).hexdigest()
        headers = {"Content-Range": f"bytes {first}-{last}/{len(data)}", "ETag": f'"{etag}"'}
        headers["X-Repo-Commit"] = COMMIT
        self.answer(data[first : last + 1], 206 if "Range" in self.headers else 200, headers)

    def missing(self, what):
        found = {"X-Repo-Commit": COMMIT} if what == "Entry" else {}  # of which it is absent
        words = {"X-Error-Code": f"{what}NotFound", "X-Error-Message": "no such"}
        self.answer(b"{}", 404, found | words)

    def answer(self, body, status, headers=None):
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.action == "break":
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()
        elif self.command == "GET":
            self.wfile.write(body)


@contextlib.contextmanager
def serving(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Serves these files as the repository `NAME`, to the Hub's own client in this process."""
    from huggingface_hub import constants

    with FakeHub(files) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setenv("HF_ENDPOINT", server.url)  # for other processes
        for name in ("HF_TOKEN", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.delenv(name, raising=False)
        template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield server
        server.shutdown()
