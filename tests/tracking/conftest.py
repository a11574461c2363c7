"""A W&B server on loopback that understands as much of its language as a run needs, and can be told to misbehave.

`server.behave` is `ok`, `hang` (connections are accepted and never answered), `hang at the start of a run` (for that
alone), or an HTTP status to answer everything with; `server.stop()` makes it refuse connections. What was uploaded is
in `runs`, `history`, `files` and `artifacts`. Beside it, what an offline run wrote down is read back from its file.
"""

import json
import re
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import wandb
from wandb.proto import wandb_internal_pb2

KEY = "f00dfeed" * 5  # shaped like an API key, and nowhere else in the world
BLOCK = 32 * 1024


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "FakeServer"

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        starts_a_run = b"mutation UpsertBucket" in body
        if self.server.behave == "hang" or (self.server.behave == "hang at the start of a run" and starts_a_run):
            self.server.stopped.wait()
            self.close_connection = True
            return
        if self.server.behave.isdigit():
            self._answer({"error": "as told"}, int(self.server.behave))
            return
        if self.path.startswith("/graphql"):
            query = json.loads(body)
            name = re.search(r"(?:query|mutation)\s+(\w+)", query["query"])
            operation = name[1] if name else ""
            self.server.operations.append(operation)
            self._answer({"data": self.server.graphql(operation, query["query"], query.get("variables") or {})})
        elif self.path.endswith("/file_stream"):
            self.server.stream(self.path.split("/")[-2], json.loads(body))
            self._answer({})
        elif self.path.startswith("/storage/"):
            self.server.files[self.path.removeprefix("/storage/")] = body
            self._answer({})
        else:
            self._answer({})

    do_POST = do_GET = do_PUT = _serve

    def _answer(self, value: dict, status: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: Any) -> None: ...


class FakeServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behave = "ok"
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.operations: list[str] = []
        self.runs: dict[str, dict[str, Any]] = {}  # what was last said of a run, by its id
        self.history: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.exited: dict[str, int] = {}
        self.files: dict[str, bytes] = {}
        self.artifacts: list[dict[str, Any]] = []
        self.stopped = threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, *args: Any) -> None: ...  # clients that were killed

    def stop(self) -> None:
        """From now on connections are refused."""
        self.stopped.set()
        self.shutdown()
        self.server_close()

    def config(self, run_id: str) -> dict[str, Any]:
        """A run's configuration, without W&B's own."""
        config = json.loads(self.runs[run_id]["config"])
        return {key: value["value"] for key, value in config.items() if key != "_wandb"}

    def stream(self, run_id: str, update: dict[str, Any]) -> None:
        part = (update.get("files") or {}).get("wandb-history.jsonl")
        if part:
            lines = self.history[run_id]
            del lines[part["offset"] :]
            lines.extend(json.loads(line) for line in part["content"])
        if update.get("complete"):
            self.exited[run_id] = update["exitcode"]

    def graphql(self, operation: str, query: str, said: dict[str, Any]) -> dict[str, Any]:
        project = {"id": "p", "name": said.get("project") or "p", "entity": {"id": "e", "name": "someone"}}
        if operation == "UpsertBucket":
            run = self.runs.setdefault(said["name"], {})
            run.update({key: value for key, value in said.items() if value is not None})
            bucket = {"id": said["name"], "name": said["name"], "displayName": run.get("displayName", "")}
            bucket.update(description="", config="{}", sweepName=None, project=project, historyLineCount=0)
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if operation == "RunResumeStatus":
            return {"model": {**project, "bucket": self.resume_status(said["name"])}}
        if operation == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": f"{self.url}/storage/{name}"} for name in said["files"]]
            return {"createRunFiles": {"runID": said["run"], "uploadHeaders": [], "files": files}}
        if operation == "ArtifactType":
            return {"project": None}
        if operation == "CreateArtifact":
            self.artifacts.append(said["input"])
            artifact = {
                "id": str(len(self.artifacts)),
                "state": "PENDING",
                "artifactSequence": {"latestArtifact": None},
            }
            return {"createArtifact": {"artifact": artifact}}
        if operation in ("CreateArtifactManifest", "UpdateArtifactManifest"):
            file = {"id": "f", "uploadUrl": f"{self.url}/storage/manifest", "uploadHeaders": []}
            key = operation[0].lower() + operation[1:]
            return {key: {"artifactManifest": {"id": "m", "file": file}}}
        if operation == "CreateArtifactFiles":
            nodes = [
                {
                    "storagePath": spec["name"],
                    "uploadUrl": f"{self.url}/storage/artifact/{spec['name']}",
                    "uploadHeaders": [],
                    "uploadMultipartUrls": None,
                    "artifact": {"id": spec["artifactID"]},
                }
                for spec in said["input"]["artifactFiles"]
            ]
            return {"createArtifactFiles": {"files": {"edges": [{"node": node} for node in nodes]}}}
        if operation == "CommitArtifact":
            return {"commitArtifact": {"artifact": {"id": said["artifactID"], "digest": ""}}}
        if operation == "ServerFeaturesQuery":
            return {"serverInfo": {"features": []}}
        if operation == "Viewer" or "viewer" in query:
            return {"viewer": {"id": "u", "entity": "someone", "username": "someone", "email": "", "flags": "{}"}}
        return {}

    def resume_status(self, run_id: str) -> dict[str, Any] | None:
        if run_id not in self.runs:
            return None
        rows = self.history[run_id]
        return {
            "id": run_id,
            "name": run_id,
            "summaryMetrics": "{}",
            "displayName": self.runs[run_id].get("displayName", ""),
            "logLineCount": 0,
            "historyLineCount": len(rows),
            "eventsLineCount": 0,
            "historyTail": json.dumps([json.dumps(rows[-1])] if rows else []),
            "eventsTail": "[]",
            "config": self.runs[run_id].get("config", "{}"),
            "tags": self.runs[run_id].get("tags", []),
            "notes": "",
            "wandbConfig": json.dumps({"t": 1}),
        }


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    server = FakeServer()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as server:
        yield server


@pytest.fixture
def servers() -> Callable:
    """A further server, as a context manager."""
    return fake_server


@pytest.fixture
def key() -> str:
    return KEY


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nobody is logged in, and W&B's own settings are read anew."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no_netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path.parent / f"{tmp_path.name}_wandb"))
    wandb.teardown()
    yield
    wandb.teardown()


def records(path: Path) -> Iterator[Any]:
    """The records of a `.wandb` file: LevelDB's log format after a header of seven bytes."""
    content, position, parts = path.read_bytes(), 7, b""
    assert content[:4] == b":W&B"
    while position + 7 <= len(content):
        if BLOCK - position % BLOCK < 7:  # no room for a record's header: padding
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + 7])
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def read_offline(run_dir: Path) -> tuple[dict[str, Any], list[dict[str, Any]], Any]:
    (path,) = run_dir.glob("wandb/offline-run-*/run-*.wandb")  # one run a job
    config: dict[str, Any] = {}
    history, run = [], None
    for record in records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run = record.run
        updates = {"run": record.run.config.update, "config": record.config.update}.get(kind, [])
        config.update({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in updates})
        if kind == "history":
            items = record.history.item
            history.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
    return config, history, run


@pytest.fixture
def recorded() -> Callable:
    """Configuration, history and the run's own record of the one offline run in a run directory."""
    return read_offline


@pytest.fixture
def confusions() -> Callable:
    """Counts by (class, prediction) from the table behind the chart in W&B."""

    def read(run_dir: Path) -> dict[tuple[str, str], int]:
        (path,) = run_dir.glob("wandb/offline-run-*/files/media/table/confusion_matrix_table*.json")
        return {(actual, predicted): n for actual, predicted, n in json.loads(path.read_text())["data"]}

    return read
