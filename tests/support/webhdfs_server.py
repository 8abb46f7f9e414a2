"""A WebHDFS server over a folder, for fsspec's own client: files are created empty and grow by appends, in order.

    with WebHdfsServer(folder) as server:
        server.uri("models/one")    --> "webhdfs://127.0.0.1:PORT/models/one"

It knows what fsspec uses: GETFILESTATUS, LISTSTATUS, OPEN, CREATE, APPEND, MKDIRS and DELETE. It names no versions.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

ROOT = "/webhdfs/v1"


class WebHdfsServer:
    """The server. `refuses(path, appended)` says, before each append, whether it fails."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.appends: Counter[str] = Counter()  # by path
        self.refuses: Callable[[str, int], bool] = lambda path, appended: False
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _do(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                body = self.rfile.read(length)
                url = urlsplit(self.path)
                asked = {name: values[0] for name, values in parse_qs(url.query).items()}
                code, headers, answer = server.answer(
                    self.command, unquote(url.path.removeprefix(ROOT)).strip("/"), asked, body, self.path
                )
                self.send_response(code)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_PUT = do_POST = do_DELETE = _do

            def log_message(self, *args: object) -> None:
                """Write no log."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._http.block_on_close = False
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)

    def uri(self, path: str) -> str:
        """Return the URI of a folder."""
        return f"webhdfs://127.0.0.1:{self._http.server_address[1]}/{path}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def answer(
        self, method: str, path: str, asked: dict[str, str], body: bytes, url: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body for a request."""
        file, op = self.folder / path, asked["op"].upper()
        if op in ("CREATE", "APPEND") and "data" not in asked:  # a name node sends clients to a data node
            return 307, {"Location": f"http://127.0.0.1:{self._http.server_address[1]}{url}&data=1"}, b""
        if op == "CREATE":
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"")
            return 201, {}, b""
        if op == "MKDIRS":
            file.mkdir(parents=True, exist_ok=True)
            return 200, {}, b'{"boolean": true}'
        if not file.exists():
            refused = {"exception": "FileNotFoundException", "message": f"no such file: {path}"}
            return 404, {}, json.dumps({"RemoteException": refused}).encode()
        if op == "APPEND":
            if self.refuses(path, self.appends[path]):
                return 503, {}, b""
            self.appends[path] += 1
            with file.open("ab") as stream:
                stream.write(body)
            return 200, {}, b""
        if op == "DELETE":
            file.unlink()
            return 200, {}, b'{"boolean": true}'
        if op == "GETFILESTATUS":
            return 200, {}, json.dumps({"FileStatus": _status(file, "")}).encode()
        if op == "LISTSTATUS":
            listed = [_status(one, one.name) for one in sorted(file.iterdir())]
            return 200, {}, json.dumps({"FileStatuses": {"FileStatus": listed}}).encode()
        if op == "OPEN":
            with file.open("rb") as stream:
                stream.seek(int(asked.get("offset", 0)))
                return 200, {}, stream.read(int(asked["length"]) if "length" in asked else -1)
        return 400, {}, b""


def _status(file: Path, name: str) -> dict[str, Any]:
    kind = "DIRECTORY" if file.is_dir() else "FILE"
    return {"pathSuffix": name, "type": kind, "length": 0 if file.is_dir() else file.stat().st_size}
