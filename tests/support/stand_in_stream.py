"""A small process in place of a benchmark's server: tells of each prompt twice in a stream, and refuses more than 100 tokens.

It tells the second time once it was asked for FIRST_READ.

python tests/support/stand_in_stream.py PORT
"""

import json
import sys
import threading

import stand_in_server

FIRST_READ = "/first_read"
first_read = threading.Event()


class Handler(stand_in_server.Handler):
    def do_GET(self):
        if self.path == FIRST_READ:
            first_read.set()
        super().do_GET()

    def do_POST(self):
        body = self.body()
        if not body.get("stream"):
            self.answer([{"body": body} for _ in body["input_ids"]])
            return
        self.begin()
        if body["sampling_params"]["max_new_tokens"] > 100:
            self.event({"error": {"message": "too long"}})
            return
        for index in (1, 0):
            self.event({"index": index, "meta_info": {"completion_tokens": 1 + index}})
        if not first_read.wait(60):
            return
        for index in (0, 1):
            self.event({"index": index, "body": body})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, data: dict) -> None:
        self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")
        self.wfile.flush()


if __name__ == "__main__":
    stand_in_server.listening(int(sys.argv[1]), Handler).serve_forever()
