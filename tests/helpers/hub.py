"""A model hub on this machine: repositories in a folder, served to the real ``huggingface_hub`` client.

``root/models/OWNER/NAME/REVISION/...`` and ``root/datasets/...`` hold the files of a repository; a revision's commit is
the hash of them. Files of weights are sent as the hub sends them, from another address that a redirect names.

::

    with serving(root) as hub:
        hub.add("acme/tiny-1.5B", folder)
        subprocess.run(command, env=hub.environment(home))    # a process of its own
        hub.use(monkeypatch, home)                            # this process
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from tests.patience import WAIT_SECONDS

_LARGE = (".safetensors", ".gguf", ".parquet")


class Hub:
    """What the server serves, how it misbehaves, and what it saw.

    Attributes:
        gated: repositories whose files it gives to nobody; ``private``: to nobody who does not bring ``token``.
        cut: file name -> after how many bytes its connection is cut, each time anew; ``cuts``: how often at most.
        status: an answer to everything, such as 503; ``silent``: it takes requests and never answers.
        pushed: repository -> path -> content, as commits brought them.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.url = root, ""
        self.gated: set[str] = set()
        self.private: set[str] = set()
        self.token = "hf_loopbackloopbackloopbackloop"
        self.cut: dict[str, int] = {}
        self.cuts = math.inf
        self.status: int | None = None
        self.silent = False
        self.created: dict[str, bool] = {}
        self.pushed: dict[str, dict[str, bytes]] = {}
        self.seen: list[tuple[str, str, str]] = []
        self.closing = threading.Event()
        self._objects: dict[str, bytes] = {}

    def add(
        self, name: str, files: Path | dict[str, str | bytes], *, revision: str = "main", kind: str = "models"
    ) -> str:
        """A repository of a folder's files, or of names and contents; gives the commit."""
        place = self._place(name, revision, kind)
        shutil.rmtree(place, ignore_errors=True)
        if isinstance(files, Path):
            shutil.copytree(files, place)
        else:
            for path, content in files.items():
                (place / path).parent.mkdir(parents=True, exist_ok=True)
                (place / path).write_bytes(content.encode() if isinstance(content, str) else content)
        return self.commit(name, revision, kind)

    def commit(self, name: str, revision: str = "main", kind: str = "models") -> str:
        """The commit that a revision names."""
        place = self._place(name, revision, kind)
        parts = [f"{path.relative_to(place)}:{_etag(path)}" for path in sorted(place.rglob("*")) if path.is_file()]
        return hashlib.sha1("\n".join(parts).encode()).hexdigest()

    def _place(self, name: str, revision: str, kind: str) -> Path:
        return self.root / kind / name / revision.replace("/", "%2F")

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """The variables of a process that takes this for the hub, with an empty cache in ``home``."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        return kept | {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_ETAG_TIMEOUT": f"{WAIT_SECONDS:g}",  # a busy machine is no hub that does not answer
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "LIMBECK_CACHE": str(home / "limbeck"),
            **more,
        }

    def use(self, patch: pytest.MonkeyPatch, home: Path) -> None:
        """Make this process take it for the hub; the client has read its environment long ago."""
        from huggingface_hub import constants

        from limbeck.utils import hub

        patch.setattr(constants, "ENDPOINT", self.url)
        template = self.url + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        patch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)  # whatever the tests were started with
        patch.setattr(hub, "ASK_SECONDS", WAIT_SECONDS)  # as above
        patch.delenv("HF_TOKEN", raising=False)
        hub.forget()

    def use_data(self, patch: pytest.MonkeyPatch, home: Path) -> None:
        """The same with the package that reads data sets, which has settings of its own."""
        import datasets

        self.use(patch, home)
        patch.setattr(datasets.config, "HF_ENDPOINT", self.url)
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", home / "datasets")

    def asked(self, method: str, part: str) -> list[str]:
        """The paths of requests so far with ``part`` in them."""
        return [path for verb, path, _ in self.seen if verb == method and part in path]


def _etag(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        self._route()

    do_HEAD = do_POST = do_PUT = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass

    # -- answers -------------------------------------------------------------------------------------------------------

    def _send(self, status: int, body: bytes | dict[str, Any] | list[Any] = b"", **headers: str) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._send(status, {"error": message}, X_Error_Code=code, X_Error_Message=message)

    def _body(self) -> bytes:
        if self.headers.get("transfer-encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline().strip() or b"0", 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("content-length") or 0))

    # -- requests ------------------------------------------------------------------------------------------------------

    def _route(self) -> None:
        hub, parts = self.hub, urlsplit(self.path)
        path = unquote(parts.path).strip("/")
        body = self._body()
        if path == "api/agent-harnesses":
            # the client asks this once a process, for its own statistics
            return self._refuse(404, "", "nothing of that kind here")
        hub.seen.append((self.command, path, self.headers.get("authorization") or ""))
        if hub.silent:
            hub.closing.wait()
            self.close_connection = True
            return
        if hub.status is not None:
            return self._send(hub.status, {"error": "as you like"})
        if path.startswith("cdn/"):
            return self._content(hub.root / path.removeprefix("cdn/"))
        if path == "api/whoami-v2":
            return self._send(200, {"name": "acme", "type": "user", "auth": {"accessToken": {"role": "write"}}})
        if path == "api/validate-yaml":
            return self._send(200, {"errors": [], "warnings": []})
        if path.startswith("lfs/"):
            hub._objects[path.removeprefix("lfs/")] = body
            return self._send(200)
        if self.command in ("POST", "PUT") and self._push(path, body):
            return None
        return self._read(path, body, parse_qs(parts.query))

    def _read(self, path: str, body: bytes, query: dict[str, list[str]]) -> None:
        hub = self.hub
        kind, found = self._repository(path)
        if found is None:
            # the hub does not tell a stranger which repositories are private and which are not there
            return self._refuse(401, "RepoNotFound", "Repository not found")
        name, rest = found
        known = self.headers.get("authorization") == f"Bearer {hub.token}"
        if self.headers.get("authorization") and not known:
            return self._refuse(401, "", "Invalid credentials in Authorization header")
        if name in hub.private and not known:
            return self._refuse(401, "RepoNotFound", "Repository not found")
        api = path.startswith("api/")
        if name in hub.gated and not (api and not rest):
            return self._refuse(403 if known else 401, "GatedRepo", f"Access to model {name} is restricted.")
        action, _, inner = rest.partition("/")
        revisions = {one.name.replace("%2F", "/"): one for one in (hub.root / kind / name).iterdir()}
        commits = {hub.commit(name, one.name, kind): one for one in revisions.values()}
        if action in ("", "revision"):
            wanted, inner = inner or "main", ""
        else:
            wanted = next((one for one in (*revisions, *commits) if f"{inner}/".startswith(f"{one}/")), inner)
            inner = inner.removeprefix(wanted).strip("/")
        place = revisions.get(wanted) or commits.get(wanted)
        if place is None:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {wanted}")
        commit = hub.commit(name, place.name.replace("%2F", "/"), kind)
        if api and action in ("", "revision"):
            return self._send(200, self._info(name, commit, place))
        if api and action == "tree":
            return self._tree(place, inner, "recursive" in query)
        if api and action == "paths-info":
            names = json.loads(body)["paths"]
            return self._send(200, [self._entry(place, one) for one in names if (place / one).exists()])
        if action != "resolve":
            return self._refuse(404, "", f"no {action} here")
        file = place / inner
        if not file.is_file():
            return self._send(
                404, b"", X_Error_Code="EntryNotFound", X_Error_Message="Entry not found", X_Repo_Commit=commit
            )
        headers = {"X_Repo_Commit": commit, "ETag": f'"{_etag(file)}"', "Accept_Ranges": "bytes"}
        if file.suffix in _LARGE:
            # another host by its name, to which a client must not send its token
            where = f"{hub.url.replace('127.0.0.1', 'localhost')}/cdn/{file.relative_to(hub.root)}"
            size = str(file.stat().st_size)
            return self._send(302, b"", Location=where, X_Linked_Etag=headers["ETag"], X_Linked_Size=size, **headers)
        return self._content(file, **headers)

    def _repository(self, path: str) -> tuple[str, tuple[str, str] | None]:
        """Kind, and name and what follows it, of a repository that is there."""
        path = path.removeprefix("api/")
        kind = "datasets" if path.startswith("datasets/") else "models"
        parts = path.removeprefix(f"{kind}/").split("/")
        for count in (2, 1):
            name = "/".join(parts[:count])
            if count <= len(parts) and any((self.hub.root / kind / name / one).is_dir() for one in ("main",)):
                return kind, (name, "/".join(parts[count:]))
        return kind, None

    def _info(self, name: str, commit: str, place: Path) -> dict[str, Any]:
        files = [str(path.relative_to(place)) for path in sorted(place.rglob("*")) if path.is_file()]
        rows = [{"rfilename": one, "size": (place / one).stat().st_size, "blobId": _etag(place / one)} for one in files]
        return {"id": name, "modelId": name, "sha": commit, "private": name in self.hub.private, "siblings": rows}

    def _entry(self, place: Path, name: str) -> dict[str, Any]:
        path = place / name
        if path.is_dir():
            return {"type": "directory", "path": name, "size": 0, "oid": "0" * 40}
        size, oid = path.stat().st_size, _etag(path)
        large = {"lfs": {"oid": oid, "size": size, "pointerSize": 100}} if path.suffix in _LARGE else {}
        return {"type": "file", "path": name, "size": size, "oid": oid[:40], **large}

    def _tree(self, place: Path, inner: str, recursive: bool) -> None:
        folder = place / inner
        if not folder.exists():
            return self._refuse(404, "EntryNotFound", f"{inner} does not exist")
        found = sorted(folder.rglob("*") if recursive else folder.iterdir())
        return self._send(200, [self._entry(place, str(path.relative_to(place))) for path in found])

    def _content(self, file: Path, **headers: str) -> None:
        data = file.read_bytes()
        start = 0
        asked = self.headers.get("range")
        status = 200
        if asked:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first or 0), int(last) + 1 if last else len(data)
            headers["Content_Range"] = f"bytes {start}-{end - 1}/{len(data)}"
            data, status = data[start:end], 206
        limit = self.hub.cut.get(file.name)
        if limit is None or self.command == "HEAD" or self.hub.cuts < 1:
            return self._send(status, data, Content_Length=str(len(data)), **headers)
        self._send(status, data[:limit], Content_Length=str(len(data)), **headers)
        self.wfile.flush()
        self.hub.cuts -= 1
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    # -- pushing -------------------------------------------------------------------------------------------------------

    def _push(self, path: str, body: bytes) -> bool:
        hub = self.hub
        if path == "api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted.get('organization') or 'acme'}/{wanted['name']}"
            if not self._may_write():
                return True
            hub.created[name] = bool(wanted.get("private")) or wanted.get("visibility") == "private"
            self._send(200, {"url": f"{hub.url}/{name}", "name": name, "id": name})
        elif "/preupload/" in path:
            files = [
                {
                    "path": one["path"],
                    "uploadMode": "lfs" if one["path"].endswith(_LARGE) else "regular",
                    "shouldIgnore": False,
                }
                for one in json.loads(body)["files"]
            ]
            self._send(200, {"files": files})
        elif path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                {"oid": one["oid"], "size": one["size"], "actions": {"upload": {"href": f"{hub.url}/lfs/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            self._send(200, {"transfer": "basic", "objects": objects})
        elif "/commit/" in path:
            if not self._may_write():
                return True
            name = "/".join(path.removeprefix("api/models/").split("/")[:2])
            for line in body.decode().splitlines():
                item = json.loads(line)
                value = item["value"]
                if item["key"] == "file":
                    hub.pushed.setdefault(name, {})[value["path"]] = base64.b64decode(value["content"])
                elif item["key"] == "lfsFile":
                    hub.pushed.setdefault(name, {})[value["path"]] = hub._objects[value["oid"]]
            address = f"{hub.url}/{name}/commit/{'1' * 40}"
            self._send(200, {"commitUrl": address, "commitOid": "1" * 40, "success": True})
        else:
            return False
        return True

    def _may_write(self) -> bool:
        if self.headers.get("authorization") == f"Bearer {self.hub.token}":
            return True
        self._refuse(401, "", f"Invalid credentials: {self.headers.get('authorization')}")
        return False


@contextmanager
def serving(root: Path) -> Iterator[Hub]:
    """The hub that serves the repositories of a folder, on a free port of the loopback address."""
    hub = Hub(root)

    class Listener(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # clients go as they like, and some connections are cut on purpose

    listener = Listener(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    listener.daemon_threads = True
    hub.url = f"http://127.0.0.1:{listener.server_address[1]}"
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.closing.set()
        listener.shutdown()
        listener.server_close()
        thread.join()
