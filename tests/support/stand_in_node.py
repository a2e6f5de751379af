"""A small process in place of a node or of a server of a pair: writes down what it is asked, ends as its model path says.

NODE_SEEN names the file for what was seen. The model path is JSON: `fails at once` and `raises` name the node that ends before
and after it is ready, `seconds` the time before it has looked at its ports, `answers after` that before an answer, and `ranks`
the ranks that live beside it, each as [node, title, seconds, exit code].
"""

import json
import os
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import stand_in_server

RANK = "import sys, time; time.sleep(float(sys.argv[1])); sys.exit(int(sys.argv[2]))"
META = {"spec_correct_drafts_histogram": [0, 0, 0, 9], "cached_tokens": 0}


def write_down(row: list) -> None:
    with Path(os.environ["NODE_SEEN"]).open("a") as seen:
        seen.write(f"{json.dumps(row)}\n")


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def start_rank(title: str, seconds: float, code: int) -> None:
    titled = ["bash", "-c", f'exec -a sglang::{title} "$@"', "", sys.executable, "-c", RANK, str(seconds), str(code)]
    subprocess.Popen(titled)


def end() -> None:
    say("Traceback (most recent call last):\n  x\nKeyError: 'why'")
    os._exit(5)


class Handler(stand_in_server.Handler):
    def do_POST(self):
        body = self.body()
        write_down(["asked", self.server.role, body])
        time.sleep(self.server.answers_after)
        prompts = body["input_ids"]
        many = isinstance(prompts[0], list)
        given = [
            {"output_ids": [len(p)], "role": self.server.role, "meta_info": META} for p in (prompts if many else [prompts])
        ]
        self.answer(given if many else given[0])


def main(words: list[str]) -> None:
    option = dict(pairwise(words))
    node, asked = int(option.get("--node-rank", 0)), json.loads(option["--model-path"])
    told = {name: value for name, value in os.environ.items() if name.startswith(("NCCL", "GLOO"))}
    write_down([node, time.monotonic(), option, told, os.getpid()])
    if asked.get("fails at once") == node:
        raise ValueError("there is no such option")
    time.sleep(asked.get("seconds", 0))
    say(f"node {node} server_args=...")
    for who, *rank in asked.get("ranks", []):
        if who == node:
            start_rank(*rank)
    if asked.get("raises") == node:
        threading.Timer(3.0, end).start()
    if node:
        time.sleep(120)
    server = stand_in_server.listening(int(option["--port"]), Handler)
    server.answers_after, server.role = asked.get("answers after", 0), option.get("--disaggregation-mode", "alone")
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
