"""A web server on the loopback that serves a folder, and fails as often as a test wants."""

from __future__ import annotations

import contextlib
import http.server
import random
import re
import threading


class Handler(http.server.BaseHTTPRequestHandler):
    """Files with ranges; every so often an error, half a body, or a lost connection."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        server = self.server
        path = server.folder / self.path.lstrip("/").split("/", 1)[1]
        with server.lock:
            server.requests.append((path.name, self.headers.get("Range")))
            trouble = server.random.random() < server.trouble
            kind = server.random.choice(("error", "half", "lost"))
        if server.status:
            return self.send_error(server.status)
        if trouble and kind != "half":
            if kind == "error":
                return self.send_error(503)
            self.close_connection = True
            return None
        if not path.is_file():
            return self.send_error(404)
        data, status = path.read_bytes(), 200
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            data, status = data[int(wanted[1]) : int(wanted[2]) + 1], 206
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if trouble:
            self.close_connection = True
            data = data[: len(data) // 2]
        self.wfile.write(data)
        return None

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def served(folder, trouble=0.0, status=None):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.folder, server.trouble, server.status = folder, trouble, status
        server.random, server.requests, server.lock = random.Random(0), [], threading.Lock()
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server, f"http://127.0.0.1:{server.server_address[1]}/data"
        finally:
            server.shutdown()
            thread.join()
