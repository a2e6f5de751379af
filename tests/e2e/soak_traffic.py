"""The soak run's requests: templates drawn from a seed, an HTTP client of SGLang's server, and clients
that keep it busy."""

from __future__ import annotations

import itertools
import json
import math
import random
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection, HTTPException

from soak_answers import Record, Template, judge_answer
from workloads import VOCAB

LONGEST_PROMPT, LONGEST_OUTPUT = 12000, 512
PREFIXES = (64, 640, 2500, 6000)  # tokens; a page, and lengths on both sides of index_topk = 2048
EXTREMES = ((1, 1), (1, 512), (64, 64), (2048, 256), (2049, 256), (12000, 1), (12000, 512))  # (prompt, output) tokens
CLIENTS, CLIENTS_STEP = (1, 8, 64, 64, 16, 64, 64, 32, 4, 64), 6.0
"""Clients at work, for so many seconds each. One cycle is a minute, so that every minute has the same mix. Eight clients
before 64 let SGLang's estimate of the tokens to come decay, and twice 64 in a row let the admitted requests outgrow it."""
SHARES = {"finished": 0.95, "aborted": 0.025, "closed": 0.025}  # "aborted" by /abort_request, "closed" by closing the stream
SECONDS_PER_TOKEN = 0.001  # somewhat less than under load, so that most requests to take back are still under way
REQUEST_SECONDS = 60.0
FAILURES = (OSError, HTTPException, RuntimeError, ValueError, KeyError)


def make_templates(seed: int, count: int = 80) -> list[Template]:
    """Log-uniform prompt lengths and a few extremes; every third begins with one of the common prefixes."""
    rng = random.Random(seed)
    prefixes = [tuple(rng.choices(range(2, VOCAB), k=size)) for size in PREFIXES]
    extremes = iter(EXTREMES)
    templates = []
    for index in range(count):
        prefix = prefixes[index // 3 % len(prefixes)] if index % 3 == 0 else ()
        tail = round(math.exp(rng.uniform(0, math.log(LONGEST_PROMPT - len(prefix)))))
        new_tokens = rng.randint(1, LONGEST_OUTPUT)
        if not prefix:
            tail, new_tokens = next(extremes, (tail, new_tokens))
        templates.append(Template(index, prefix + tuple(rng.choices(range(2, VOCAB), k=tail)), new_tokens))
    return templates


def clients_at(seconds: float) -> int:
    return CLIENTS[int(seconds / CLIENTS_STEP) % len(CLIENTS)]


class Client:
    """Calls one server, each time over a connection of its own, so that closing one takes back one request."""

    def __init__(self, port: int):
        self.port = port

    def _send(self, path: str, body: dict | None, timeout: float) -> HTTPConnection:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        method, data = ("POST", json.dumps(body)) if body else ("GET", None)
        connection.request(method, path, data, {"Content-Type": "application/json"})
        return connection

    def call(self, path: str, body: dict | None = None, timeout: float = REQUEST_SECONDS) -> bytes:
        connection = self._send(path, body, timeout)
        try:
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"{path} answered {response.status}: {data[:300].decode(errors='replace')}")
        return data

    def generate(self, body: dict, timeout: float = REQUEST_SECONDS) -> dict:
        return json.loads(self.call("/generate", body, timeout))

    def stream(self, body: dict, seconds: float) -> dict | None:
        """The last chunk, which has all tokens; None where `seconds` were over before it and the connection was closed."""
        try:
            return self.timed(body, seconds)[0]
        except TimeoutError:
            return None

    def timed(self, body: dict, seconds: float = REQUEST_SECONDS) -> tuple[dict, float]:
        """(the last chunk of a stream, seconds to the first)."""
        began = time.monotonic()
        chunks = self.chunks(body, seconds)
        first = next(chunks)
        to_first = time.monotonic() - began
        return deque(itertools.chain([first], chunks), maxlen=1).pop(), to_first

    def chunks(self, body: dict, seconds: float) -> Iterator[dict]:
        """Every chunk of a stream, each with all tokens so far; raises TimeoutError where `seconds` are over before [DONE]."""
        closing = time.monotonic() + seconds
        connection = self._send("/generate", body | {"stream": True}, REQUEST_SECONDS)
        socket, response, last = connection.sock, None, None
        try:
            socket.settimeout(max(closing - time.monotonic(), 0.001))
            response = connection.getresponse()
            while line := response.readline():
                if line.startswith(b"data: [DONE]") and last:
                    return
                if line.startswith(b"data: {"):
                    last = json.loads(line[6:])
                    yield last
                socket.settimeout(max(closing - time.monotonic(), 0.001))
        finally:
            connection.close()
            if response is not None:
                response.close()  # it holds the socket open after the connection let go of it
        raise RuntimeError(f"the stream ended without [DONE], status {response.status}, after {str(last)[:300]}")


def request_body(prompt: list[int], new_tokens: int, rid: str) -> dict:
    """SGLang aborts every request whose rid starts with the given one, so all rids must have the same length."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    return {"rid": rid, "input_ids": prompt, "sampling_params": sampling}


class Traffic:
    """Clients that each send the next request when the last one is over; `clients_at` says how many are at work."""

    def __init__(self, client: Client, seed: int):
        self.records: list[Record] = []
        self._client = client
        self._seed = seed
        self._numbers = itertools.count()
        self._stop = threading.Event()
        self._busy = [False] * max(CLIENTS)
        self._threads = [threading.Thread(target=self._work, args=(i,), daemon=True) for i in range(max(CLIENTS))]

    def start(self, templates: list[Template], references: dict[int, list[int]]) -> None:
        """Ask for the templates that have a reference."""
        self._references = references
        self._templates = [t for t in templates if t.index in references]
        self._started = time.monotonic()
        for thread in self._threads:
            thread.start()

    def in_flight(self) -> int:
        return sum(self._busy)

    def drain(self, until: float) -> None:
        """Send nothing new, and wait for what is under way."""
        self._stop.set()
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0))

    def _work(self, number: int) -> None:
        rng = random.Random(f"{self._seed} {number}")
        while not self._stop.is_set():
            if number >= clients_at(time.monotonic() - self._started):
                self._stop.wait(0.05)
                continue
            self._busy[number] = True
            record = self._request(rng)
            self.records.append(record)
            self._busy[number] = False
            if record.kind == "failed":
                self._stop.wait(0.5)

    def _request(self, rng: random.Random) -> Record:
        template = rng.choice(self._templates)
        body = request_body(list(template.prompt), template.new_tokens, f"soak-{next(self._numbers):010d}")
        wanted = rng.choices(list(SHARES), list(SHARES.values()))[0]
        delay = rng.uniform(0, SECONDS_PER_TOKEN * template.new_tokens)
        start = time.monotonic()
        try:
            answer, first = self._ask(body, wanted, delay)
            fields = judge_answer(template.new_tokens, self._references[template.index], answer, wanted)
            fields |= {"first": first} if fields["kind"] == "finished" else {}
        except FAILURES as error:
            fields = {"kind": "failed", "message": f"{type(error).__name__}: {error}"}
        return Record(template.index, start, time.monotonic(), wanted, **fields)

    def _ask(self, body: dict, wanted: str, delay: float) -> tuple[dict | None, float | None]:
        """(the answer, seconds to its first token where it was let run); every request streams, for that time."""
        if wanted == "closed":
            return self._client.stream(body, delay), None
        timer = threading.Timer(delay, self._abort, (body["rid"],))
        if wanted == "aborted":
            timer.start()
        try:
            return self._client.timed(body)
        finally:
            timer.cancel()

    def _abort(self, rid: str) -> None:
        with suppress(*FAILURES):  # the request then finishes, and does not count as aborted
            self._client.call("/abort_request", {"rid": rid})
