"""A hub on the loopback interface: one repository, and every way in which a download can go wrong."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TOKEN = "hf_secretsecretsecret"
COMMIT = "a" * 40
REPO = "owner/name"
LARGE = (".safetensors", ".bin")


def safetensors(values: int = 4) -> bytes:
    header = {"__metadata__": {"format": "mlx"}}
    spans = {"w": (0, 4 * values), "b": (4 * values, 4 * values + 4)}
    header |= {n: {"dtype": "F32", "shape": [(e - b) // 4], "data_offsets": [b, e]} for n, (b, e) in spans.items()}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(4 * values + 4)


def sharded(shards: int = 3) -> dict[str, bytes]:
    names = [f"model-{i:05d}-of-{shards:05d}.safetensors" for i in range(1, shards + 1)]
    index = {"metadata": {}, "weight_map": {f"layer.{i}": name for i, name in enumerate(names)}}
    whole = {"config.json": b'{"model_type": "llama"}', "model.safetensors.index.json": json.dumps(index).encode()}
    return whole | {name: safetensors(i + 1) for i, name in enumerate(names)}


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


class FakeHub(ThreadingHTTPServer):
    """Plays one repository. Weights are large files, known by their sha256; the others by their git id.

    `answer` (status, headers) makes every request fail that way. `cut` ends each answer for a weight file after that
    many bytes, or, with `hold`, only waits there; `ranges` False ignores the Range header, and `lie` sends these bytes
    instead of a file's own. `redirect` is another server that holds the weights, as on the real Hub.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        self.files = sharded() | {"modeling.py": b"raise SystemExit", "README.md": b"#", "pytorch_model.bin": b"pickle"}
        self.repos: dict[str, dict[str, bytes]] = {REPO: self.files}
        self.commit = COMMIT
        self.answer: tuple[int, dict[str, str]] | None = None
        self.cut: int | None = None
        self.ranges = True
        self.hold: threading.Event | None = None
        self.redirect: str | None = None
        self.lie: dict[str, bytes] = {}
        self.connections = 0
        self.asked: list[str] = []
        self.wanted: list[tuple[str, str | None]] = []
        self.authorisation: set[str | None] = set()

    def get_request(self) -> tuple[socket.socket, object]:
        self.connections += 1
        return super().get_request()

    def handle_error(self, *_: object) -> None:
        """A client that has left is no news."""


class Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.server.asked.append(path)
        self.server.authorisation.add(self.headers.get("Authorization"))
        if self.server.answer:
            status, headers = self.server.answer
            return self.send(status, b"secret server text", headers)
        for repo, files in self.server.repos.items():
            if path in (f"/api/models/{repo}/revision/main", f"/api/models/{repo}"):
                siblings = [self.sibling(name, data) for name, data in files.items()]
                body = {"id": repo, "sha": self.server.commit, "siblings": siblings}
                return self.send(200, json.dumps(body).encode())
            if path == f"/api/models/{repo}/tree/{self.server.commit}":
                tree = [{"type": "file", "path": n, "size": len(d), "oid": git_id(d)} for n, d in files.items()]
                return self.send(200, json.dumps(tree).encode())
            if path.startswith(f"/{repo}/resolve/{self.server.commit}/") and (name := path.rsplit("/", 1)[1]) in files:
                return self.file(name, files[name])
        self.send(404, b"", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def sibling(self, name: str, data: bytes) -> dict[str, object]:
        known = {"rfilename": name, "size": len(data), "blobId": git_id(data)}
        lfs = {"sha256": sha256(data), "size": len(data), "pointerSize": 130}
        return known | ({"lfs": lfs} if name.endswith(LARGE) else {})

    def file(self, name: str, data: bytes) -> None:
        large = name.endswith(LARGE)
        headers = {"ETag": f'"{sha256(data) if large else git_id(data)}"', "X-Repo-Commit": self.server.commit}
        asked = self.headers.get("Range")
        if self.command == "GET":
            self.server.wanted.append((name, asked))
        if large and self.server.redirect:
            headers |= {"X-Linked-Etag": f'"{sha256(data)}"', "X-Linked-Size": str(len(data))}
            return self.send(302, b"", headers | {"Location": self.server.redirect + self.path})
        data = self.server.lie.get(name, data)
        status, total = 200, len(data)
        if asked and self.server.ranges and (match := re.fullmatch(r"bytes=(\d+)-", asked)):
            start = int(match[1])
            if start >= total:
                return self.send(416, b"", {"Content-Range": f"bytes */{total}"})
            status, data = 206, data[start:]
            headers["Content-Range"] = f"bytes {start}-{total - 1}/{total}"
        self.send(status, data, headers, cut=self.server.cut if large else None)

    def send(self, status: int, body: bytes, headers: dict[str, str] | None = None, cut: int | None = None) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:cut])
            if cut is not None and cut < len(body):
                self.wfile.flush()
                if self.server.hold is not None:
                    self.server.hold.wait(60)
                self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def git_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def running() -> Iterator[FakeHub]:
    with FakeHub() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()
