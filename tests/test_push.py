"""Pushing to the hub, up to the requests: a server on the loopback interface stands in for the hub."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.test_run import ENVIRONMENT

REPO = "someone/model"


class Hub(BaseHTTPRequestHandler):
    """Answers what the hub's client asks for a repository whose files all go into the commit itself."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.got.append((self.path, self.headers.get("Authorization"), body))
        if self.path == "/api/repos/create":
            answer = {"url": f"{self.server.address}/{REPO}", "name": REPO}
        elif "/preupload/" in self.path:
            answer = {
                "files": [
                    {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for f in json.loads(body)["files"]
                ]
            }
        elif "/commit/" in self.path:
            answer = {
                "success": True,
                "commitOid": "ab" * 20,
                "commitUrl": f"{self.server.address}/{REPO}/commit/abab",
                "hookOutput": "",
            }
        else:
            answer = {}
        self.answer(answer)

    def do_GET(self):
        self.server.got.append((self.path, self.headers.get("Authorization"), b""))
        self.answer({"id": REPO, "sha": "cd" * 20, "siblings": [], "tags": []})

    def answer(self, value):
        text = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.got, server.address = [], f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def run(tmp_path) -> Path:
    final = tmp_path / "run" / "final"
    final.mkdir(parents=True)
    for name, content in {
        "config.json": b"{}",
        "model.safetensors": b"weights",
        "README.md": b"---\nlibrary_name: transformers\n---\n# card",
    }.items():
        (final / name).write_bytes(content)
    return final.parent


def push(*arguments: str, endpoint: str, token: str = "secret", home: Path) -> subprocess.CompletedProcess:
    environment = {
        **ENVIRONMENT,
        "HF_ENDPOINT": endpoint,
        "HF_TOKEN": token,
        "HF_HOME": str(home),
        "NO_PROXY": "127.0.0.1",
    }
    command = [sys.executable, "-m", "hybrid_rl.push", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_the_folder_is_committed(hub, run, tmp_path):
    result = push(str(run), REPO, endpoint=hub.address, home=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == f"{hub.address}/{REPO}/commit/abab"
    created = next(json.loads(body) for path, _, body in hub.got if path == "/api/repos/create")
    assert (created["name"], created["organization"]) == ("model", "someone")
    assert created.get("private") is True or created.get("visibility") == "private"
    commit = next(body for path, _, body in hub.got if "/commit/" in path)
    lines = [json.loads(line) for line in commit.splitlines()]
    files = {
        line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in lines if line["key"] == "file"
    }
    assert files == {file.name: file.read_bytes() for file in (run / "final").iterdir()}
    assert {who for path, who, _ in hub.got if "create" in path or "commit" in path} == {"Bearer secret"}


def test_what_cannot_be_pushed_is_one_line(run, tmp_path):
    nobody = "http://127.0.0.1:9"
    for arguments, token, expected in (
        ((str(tmp_path), REPO), "x", f"{tmp_path} holds no exported model"),
        ((str(run), "a/b/c"), "x", "a/b/c: "),
        ((str(run), REPO), "x", f"{REPO}: the hub did not take it: "),
    ):
        result = push(*arguments, endpoint=nobody, token=token, home=tmp_path)
        assert result.returncode == 1
        assert result.stderr.startswith(f"python -m hybrid_rl.push: {expected}"), result.stderr
        assert len(result.stderr.splitlines()) == 1
