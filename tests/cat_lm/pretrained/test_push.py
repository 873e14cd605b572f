"""`cat_lm.export --push`, against a stand-in of the Hub on the loopback."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from cat_lm import export
from cat_lm.core.errors import UserError


class Hub(ThreadingHTTPServer):
    """Takes the files of one repository in the commits themselves."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.files: dict[str, bytes] = {}
        self.created: list[dict[str, Any]] = []
        self.refuses = False
        self.url = f"http://127.0.0.1:{self.server_port}"


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.server.refuses:
            self.answer({"error": "no"}, 403)
        elif self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            self.answer({"url": f"{self.server.url}/owner/name"})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif self.path.endswith("/preupload/main"):
            wanted = [file["path"] for file in json.loads(body)["files"]]
            regular = {"uploadMode": "regular", "shouldIgnore": False}
            self.answer({"files": [{"path": path, **regular} for path in wanted]})
        elif self.path.endswith("/commit/main"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.server.files[line["value"]["path"]] = content
            self.answer(
                {
                    "commitUrl": f"{self.server.url}/owner/name/commit/{0:040d}",
                    "commitOid": "0" * 40,
                }
            )
        else:
            self.answer({}, 404)

    def answer(self, values: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(values).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants

    with Hub() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HF_TOKEN", "hf_test")
        yield server
        server.shutdown()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "model/README.md").write_text("---\ntags: [cat]\n---\n")
    (tmp_path / "model/model.safetensors").write_bytes(b"\0\1" * 999)
    return tmp_path / "model"


def test_push_uploads_every_file(hub, folder):
    assert export.push(folder, "owner/name", private=True) == f"{hub.url}/owner/name"
    assert hub.files == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert hub.created[0]["name"] == "name" and "private" in json.dumps(hub.created[0])


@pytest.mark.parametrize("repository", ["owner/name", "not a name"])
def test_refused_push_is_one_line_that_names_the_export(hub, folder, repository):
    hub.refuses = True
    with pytest.raises(UserError) as refused:
        export.push(folder, repository)
    line = str(refused.value)
    assert line.startswith(f"--push {repository}: ") and str(folder) in line
    assert "\n" not in line and not hub.files
