"""Look at a run's rollouts in a browser, while it goes on too: python -m hybrid_rl.view RUN prints an address to open.

The server listens on the loopback interface only. From another machine: --port 8765, and there
ssh -L 8765:127.0.0.1:8765 HOST.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from hybrid_rl.report.viewer import Unknown, Viewer
from hybrid_rl.run_folder.files import plain

FILES = Path(__file__).parent / "report"
PAGES = {"/": ("view.html", "text/html"), "/view.js": ("view.js", "text/javascript")}
POLICY = "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; connect-src 'self'"


class Handler(BaseHTTPRequestHandler):
    """Answers GET requests for the page and for JSON."""

    def __init__(self, viewer: Viewer, *arguments: object):
        self.viewer = viewer
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        """Answer one request; 404 for what there is not."""
        host = (self.headers.get("Host") or "").rpartition(":")[0]
        if host not in ("127.0.0.1", "localhost"):  # another site's name for this address
            self._answer(403, b"open this page by 127.0.0.1", "text/plain")
            return
        url = urlsplit(self.path)
        if url.path in PAGES:
            name, kind = PAGES[url.path]
            self._answer(200, (FILES / name).read_bytes(), kind)
            return
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        try:
            value = self._value(url.path, query)
        except (Unknown, ValueError, OSError) as error:
            self._answer(404, json.dumps({"error": str(error)}).encode(), "application/json")
        else:
            self._answer(200, json.dumps(plain(value), ensure_ascii=False).encode(), "application/json")

    def _value(self, path: str, query: dict[str, str]) -> object:
        if path == "/api/run":
            return self.viewer.run()
        if path == "/api/rows":
            return self.viewer.rows(query.get("file", ""), query.get("q", ""))
        if path == "/api/rollouts":
            return self.viewer.rollouts(query.get("file", ""), [int(row) for row in query.get("rows", "").split(",")])
        raise Unknown(f"there is nothing at {path}")

    def _answer(self, code: int, body: bytes, kind: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing for each request."""


def serve(folder: Path, port: int = 0) -> ThreadingHTTPServer:
    """Return the server for a run's folder, bound to a port of the loopback interface (0: any free one)."""
    server = ThreadingHTTPServer(("127.0.0.1", port), partial(Handler, Viewer(folder)))
    server.daemon_threads = True
    return server


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until Ctrl-C; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m hybrid_rl.view", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run, finished or not")
    parser.add_argument("--port", type=int, default=0, help="by default any free one")
    given = parser.parse_args(arguments)
    if not (given.run / "rollouts").is_dir():
        print(f"{parser.prog}: {given.run} is not the folder of a run (it has no rollouts/)", file=sys.stderr)
        return 1
    try:
        server = serve(given.run, given.port)
    except OSError as error:
        print(f"{parser.prog}: --port {given.port}: {error.strerror}", file=sys.stderr)
        return 1
    print(f"http://127.0.0.1:{server.server_port}/   (Ctrl-C ends it)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
