"""What small processes in place of servers have in common: they are healthy, and answer requests with JSON."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    """`do_POST` is up to each of them."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def body(self) -> dict:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def answer(self, data: Any) -> None:
        self.begin()
        self.wfile.write(json.dumps(data).encode())

    def begin(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()

    def log_message(self, *arguments):
        pass


def listening(port: int, handler: type[Handler]) -> ThreadingHTTPServer:
    """On `port`, not serving yet."""
    return ThreadingHTTPServer(("127.0.0.1", port), handler)
