"""A stand-in for the hub on 127.0.0.1: as much of its API as a snapshot download asks for, and its bad days."""

import hashlib
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

COMMIT = "a" * 40
LARGE = 10_000  # bytes from which a file is kept as LFS


class FakeHub(ThreadingHTTPServer):
    """One repository. Faults are attributes that a test sets.

    cut: how many more times a large file's connection breaks off half-way.
    pause: seconds between pieces of a large file.
    corrupt: names whose bytes arrive wrong.
    status: answer everything with this status; `code` is the hub's word for it.
    """

    daemon_threads = True

    def __init__(self, repository: str, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repository, self.files = repository, files
        self.cut, self.pause, self.corrupt, self.status, self.code = 0, 0.0, set(), 0, ""
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request, client_address):
        """A client that was killed is no error of the hub's."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def ranges(self, name: str) -> list[str | None]:
        """The Range header of every GET of a file, in order."""
        return [h.get("range") for method, path, h in self.requests if method == "GET" and path.endswith(f"/{name}")]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self):
        hub, path = self.server, self.path.partition("?")[0]
        hub.requests.append((self.command, path, {key.lower(): value for key, value in self.headers.items()}))
        if hub.status:
            return self.send(hub.status, b'{"error": "no"}', {"X-Error-Code": hub.code, "X-Error-Message": "no"})
        api = re.fullmatch(rf"/api/(?:models|datasets)/{hub.repository}(/revision/[^/]+|/tree/.+)?", path)
        if api and "/tree/" in path:
            return self.tree(path.partition("/tree/")[2].partition("/")[2])
        if api:
            revision = path.partition("/revision/")[2]
            if revision not in ("", "main", COMMIT):
                return self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            siblings = [
                {"rfilename": e["path"], "size": e["size"], "blobId": e["oid"]}
                | ({"lfs": {"sha256": e["lfs"]["oid"], "size": e["size"], "pointerSize": 134}} if "lfs" in e else {})
                for e in map(self.entry, hub.files)
            ]
            return self.json({"id": hub.repository, "sha": COMMIT, "siblings": siblings})
        file = re.fullmatch(rf"/(?:datasets/)?{hub.repository}/resolve/(?:main|{COMMIT})/(.+)", path)
        if file and file[1] in hub.files:
            return self.file(file[1])
        return self.send(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})

    def tree(self, folder):
        """Files and folders below a folder; those further down only when asked to recurse."""
        below = [name for name in self.server.files if not folder or name.startswith(f"{folder}/")]
        depth = folder.count("/") + 2 if folder else 1
        folders = sorted({"/".join(name.split("/")[:depth]) for name in below if name.count("/") >= depth})
        if "recursive=true" not in self.path.lower():
            below = [name for name in below if name.count("/") < depth]
        if not below and not folders:
            return self.send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        self.json(
            [{"type": "directory", "path": f, "oid": "0" * 40, "size": 0} for f in folders]
            + list(map(self.entry, below))
        )

    def do_POST(self):
        """Of all POSTs only `paths-info` is answered."""
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.requests.append(("POST", self.path, {"body": asked}))
        if "/paths-info/" not in self.path:
            return self.send(404, b"{}", {})
        paths = parse_qs(asked).get("paths") or json.loads(asked)["paths"]
        self.json([self.entry(name) for name in self.server.files if name in paths])

    def entry(self, name):
        data = self.server.files[name]
        entry = {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
        if len(data) >= LARGE:
            entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        return entry

    def file(self, name):
        hub, data = self.server, self.server.files[name]
        entry = self.entry(name)
        etag = entry["lfs"]["oid"] if "lfs" in entry else entry["oid"]
        if name in hub.corrupt:
            data = bytes(len(data) // 2) + data[len(data) // 2 :]
        begin = 0
        if asked := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            begin = int(asked[1])
        headers = {"ETag": f'"{etag}"', "X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(data))}
        headers |= {"X-Repo-Commit": COMMIT, "Content-Length": str(len(data) - begin), "Accept-Ranges": "bytes"}
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        self.send_response(206 if begin else 200)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if len(data) >= LARGE and hub.cut:
            hub.cut -= 1
            self.wfile.write(data[begin : begin + (len(data) - begin) // 2])
            self.close_connection = True
            return
        step = len(data) // 20 + 1
        for piece in range(begin, len(data), step):
            self.wfile.write(data[piece : piece + step])
            if len(data) >= LARGE and hub.pause:
                time.sleep(hub.pause)

    def json(self, value):
        self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def send(self, status, body, headers):
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
