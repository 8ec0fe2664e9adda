"""A stand-in for any process of a run: an HTTP server that does what it is asked to.

`stub_process.py --port P [--ignore-term] [--exit CODE] [--life N]`

GET anything -> 200. POST /exit/<code> ends the process with that code. POST /launcher/groups
appends the body to `views.jsonl` in the directory of the test (`--dir`) and answers with the
content of `reply.json` there. `--exit` ends the process before it serves anything.
"""

from __future__ import annotations

import argparse
import os
import signal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_NO_WISH = b'{"relaunch": []}'


class _Handler(BaseHTTPRequestHandler):
    directory: Path

    def do_GET(self) -> None:
        self._answer(b"{}")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path.startswith("/exit/"):
            os._exit(int(self.path.removeprefix("/exit/")))
        with (self.directory / "views.jsonl").open("ab") as file:
            file.write(body + b"\n")
        reply = self.directory / "reply.json"
        self._answer(reply.read_bytes() if reply.exists() else _NO_WISH)

    def log_message(self, *args: object) -> None:
        pass

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    """Serve until told to end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dir", type=Path, default=Path())
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--exit", type=int)
    parser.add_argument("--life", type=int, default=0)
    args = parser.parse_args()
    if args.exit is not None:
        raise SystemExit(args.exit)
    if args.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _Handler.directory = args.dir
    server = ThreadingHTTPServer(("127.0.0.1", args.port), _Handler)
    print(f"serving as life {args.life}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
