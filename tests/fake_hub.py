"""A stand-in for the hub on 127.0.0.1: as much of its API as downloads and commits ask for, and its bad days."""

import base64
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
    license: what the card of the repository says.
    """

    daemon_threads = True

    def __init__(self, repository: str, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repository, self.files = repository, files
        self.cut, self.pause, self.corrupt, self.status, self.code = 0, 0.0, set(), 0, ""
        self.license: str | list[str] | None = None
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
            card = {"license": hub.license} if hub.license else {}
            return self.json({"id": hub.repository, "sha": COMMIT, "siblings": siblings, "cardData": card})
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


class WritableHub(FakeHub):
    """A hub with no repository, which makes one and takes commits from whoever has the token.

    objects: large files that arrived, by sha256; a file is part of the repository only after a commit.
    commits: what was said of each. created: the body of the request that made the repository.
    refused: sha256 of large files that do not get through.
    """

    def __init__(self, token: str) -> None:
        super().__init__("", {})
        self.RequestHandlerClass = _WritableHandler
        self.token, self.refused = token, set()
        self.objects: dict[str, bytes] = {}
        self.commits: list[dict] = []
        self.created: dict = {}


class _WritableHandler(_Handler):
    server: WritableHub

    def answer(self):
        if not self.authorized():
            return self.send(401, b"{}", {})
        super().answer()

    def authorized(self):
        return self.headers.get("Authorization") == f"Bearer {self.server.token}"

    def do_PUT(self):
        """A large file, at the address that the batch gave."""
        hub, data = self.server, self.body()
        hub.requests.append(("PUT", self.path, {key.lower(): value for key, value in self.headers.items()}))
        digest = hashlib.sha256(data).hexdigest()
        if digest in hub.refused:
            return self.send(400, b"{}", {})
        hub.objects[digest] = data
        self.send(200, b"", {})

    def do_POST(self):
        hub, body = self.server, self.body()
        hub.requests.append(("POST", self.path, {key.lower(): value for key, value in self.headers.items()}))
        if hub.status:
            return self.send(hub.status, b'{"error": "no"}', {})
        if not self.authorized():
            return self.send(401, b'{"error": "Invalid username or password."}', {})
        if self.path.endswith("/commit/main"):
            return self.commit([json.loads(line) for line in body.splitlines()])
        asked = json.loads(body)
        if self.path == "/api/repos/create":
            name = f"{asked['organization']}/{asked['name']}"
            known, hub.repository = hub.repository == name, name
            hub.created = hub.created or asked
            return self.send(409 if known else 200, json.dumps({"url": f"{hub.url}/{name}"}).encode(), {})
        if self.path == "/api/validate-yaml":
            assert asked["content"].startswith("---\n")
            return self.json({"errors": [], "warnings": []})
        if self.path == f"/api/models/{hub.repository}/preupload/main":
            return self.json({"files": [self.mode(file) for file in asked["files"]]})
        if self.path == f"/{hub.repository}.git/info/lfs/objects/batch":
            return self.json({"transfer": "basic", "objects": [self.place(it) for it in asked["objects"]]})
        self.send(404, b"{}", {})

    def body(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def mode(self, file):
        """How a file is to be sent; with the identity of the content that the repository has under its name."""
        data = self.server.files.get(file["path"])
        large = file["size"] >= LARGE
        git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest() if data is not None else None
        oid = hashlib.sha256(data).hexdigest() if data is not None and large else git
        return {
            "path": file["path"],
            "uploadMode": "lfs" if large else "regular",
            "shouldIgnore": False,
            "oid": oid,
        }

    def place(self, asked):
        """Where a large file is to be put, if it is not here."""
        known = {"oid": asked["oid"], "size": asked["size"]}
        if asked["oid"] in self.server.objects:
            return known
        return known | {"actions": {"upload": {"href": f"{self.server.url}/objects/{asked['oid']}?signature=secret"}}}

    def commit(self, lines):
        hub = self.server
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                hub.commits.append(value)
            elif line["key"] == "file":
                hub.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                hub.files[value["path"]] = hub.objects[value["oid"]]
        url = f"{hub.url}/{hub.repository}/commit/{COMMIT}"
        self.json({"commitUrl": url, "commitOid": COMMIT, "pullRequestUrl": None})
