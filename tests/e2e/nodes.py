"""One deployment of several nodes on the GPUs of one machine: a node has a rank on each of them, so that ranks share GPUs.

NCCL refuses two ranks on one GPU of one host, and takes NCCL_HOSTID's word for what a host is. Between such hosts it goes
through sockets of this machine, and kernels of ranks on one GPU take turns: what comes out is right, no time means anything.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

from endings import POLL_SECONDS, TITLE, Followed, first_error, how_ended, state_of, titles_beneath
from pd_servers import command
from waves import generate

from nsa_backend.benchmarks.servers.process_trees import end_all
from nsa_backend.benchmarks.servers.server import SIDE_BY_SIDE, STARTING, call, wait_until_ready

HOST = "127.0.0.1"
MOST_NODES = 4
NCCL, MEETING = 4, 5
"""Ports of a deployment above those of its nodes: one that SGLang asks for, and does not take where it is told where its ranks
meet; and that place."""
AFTER_MEETING = (1, 2, 3, 4, 5, 6, 13)
"""Above where the ranks meet: SGLang's processes, and on the last the nodes, of a deployment with DP attention."""
LOOKED_AT_PORTS = "server_args="
"""What a node logs once it has seen that the ports above are free (`PortArgs.init_new`). With DP attention every node looks,
and the first takes them: one that looks later, on the same machine, waits for half a minute and ends."""
ANSWERING = 900.0  # seconds that a wave may take
SETTLING = 3.0  # seconds after a failed request in which a node that ended is taken for its cause
LAST_LINES = 40


def environment_of(node: int) -> dict[str, str]:
    """What a node is started with beside the environment of this process."""
    hosts = {"NCCL_HOSTID": f"node{node}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return hosts | SIDE_BY_SIDE  # a rank's share of its GPU's memory is what the others have left


def arguments_of(arguments: dict[str, Any], nodes: int) -> list[dict[str, Any]]:
    """Arguments of each node, the one that answers first; `arguments` are those of one server with as many ranks."""
    assert nodes <= MOST_NODES
    port = arguments["port"]
    common = arguments | {"nnodes": nodes, "dist_init_addr": f"{HOST}:{port + MEETING}", "nccl_port": port + NCCL}
    return [common | {"node_rank": node, "port": port + node} for node in range(nodes)]


class Node:
    """A process of SGLang's and all that it starts, followed; what it says goes to this process's output and to its log."""

    def __init__(self, number: int, arguments: dict[str, Any], log: Path):
        """Start it. Does not wait."""
        self.log, self._began = log, time.monotonic()
        log.write_bytes(b"")
        self._process = subprocess.Popen(
            command(arguments), start_new_session=True, env=os.environ | environment_of(number),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._copying = threading.Thread(target=self._copy, daemon=True)
        self._copying.start()
        self._followed = Followed(self._process.pid, log)
        self._followed.__enter__()

    def _copy(self) -> None:
        with self.log.open("wb", buffering=0) as log:
            for line in self._process.stdout:
                log.write(line)
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()

    def said(self, words: str) -> bool:
        return words in self.log.read_text(errors="replace")

    def ended(self) -> str | None:
        """How the node, or a rank of it, ended; None while they run. A node may live on without a rank, waiting for another.

        Its process is not reaped here: who follows this process too is to see how it ended.
        """
        state, status = state_of(self._process.pid)
        gone = [one for one in self._followed.exits if one.name.startswith(TITLE)]
        if gone:  # what a rank starts has its title for a moment, and the rank lives on
            titles = titles_beneath(self._process.pid)
            gone = [one for one in gone if one.name not in titles]
        if state not in ("Z", "X", "") and not gone:
            return None
        told = f"{gone[0].name} ended first: {gone[0].how()}" if gone else how_ended(status)
        return f"{told}, after {time.monotonic() - self._began:.0f} s"

    def last_words(self) -> tuple[str, list[str]]:
        """(the first error in its log, or nothing; its last lines), once it has been ended."""
        log = self.log.read_text(errors="replace")
        return first_error(log), log.splitlines()[-LAST_LINES:]

    def end(self) -> None:
        """End it and all that it started; its log is whole then. Once ended its number may be another process's."""
        if self._process.returncode is not None:
            return
        self._followed.__exit__()
        end_all(self._process)
        self._copying.join(SETTLING)


class Nodes:
    """A deployment within a `with` block, which starts all of its nodes and ends them."""

    def __init__(self, arguments: dict[str, Any], nodes: int, logs: Path):
        """`arguments` are those of one server with all ranks; the log of node 1 is `logs` with .node1.log for its suffix."""
        self.port, self._logs = arguments["port"], logs
        self._arguments = arguments_of(arguments, nodes)
        self._nodes: dict[int, Node] = {}

    def __enter__(self) -> Nodes:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for node in self._nodes.values():
            node.end()

    def _start(self, seconds: float = STARTING) -> None:
        """The first node starts last, once the others have looked at the ports that it takes.

        Raises:
            RuntimeError: a node ended.
            TimeoutError: one has not got so far.
        """
        for number in range(1, len(self._arguments)):
            self._begin(number)
        deadline = time.monotonic() + seconds
        for number, node in list(self._nodes.items()):
            while not node.said(LOOKED_AT_PORTS):
                self._look()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"node {number} did not log '{LOOKED_AT_PORTS}' within {seconds:.0f} s")
                time.sleep(POLL_SECONDS)
        self._begin(0)

    def _begin(self, number: int) -> None:
        self._nodes[number] = Node(number, self._arguments[number], self._logs.with_suffix(f".node{number}.log"))

    def _look(self) -> None:
        """Raise RuntimeError with the last lines of the nodes that have ended, if one has; all of them are ended then."""
        ended = {number: how for number, node in self._nodes.items() if (how := node.ended()) is not None}
        if not ended:
            return
        time.sleep(2 * POLL_SECONDS)  # who follows this process is to see them end before the others
        self.__exit__()
        told, lines = [], []
        for number, how in ended.items():
            error, last = self._nodes[number].last_words()
            told.append(f"node {number} of {len(self._arguments)}: {how}{': ' if error else ''}{error}")
            lines += [f"The last lines of node {number}:", *last]
        raise RuntimeError("\n".join(["; ".join(told), *lines]))

    def wait(self, seconds: float = STARTING) -> None:
        """Until it answers; raises RuntimeError where a node ends first, TimeoutError where it takes too long."""
        self._unless_a_node_ends(partial(wait_until_ready, self.port, None, seconds))

    def generate(self, wave: list[list[int]], sampling: dict | list[dict], ranks: list[int] | None = None) -> list[dict]:
        """Answers of one batch, or where its requests choose their DP ranks, of requests that are sent at once."""
        ask = partial(call, self.port, "/generate", timeout=ANSWERING)
        return self._unless_a_node_ends(partial(generate, ask, wave, sampling, ranks))

    def _unless_a_node_ends(self, ask: Callable[[], Any]) -> Any:
        """What `ask` returns, or its error; RuntimeError as soon as a node ends: its peers wait for it in a collective."""
        found: Future = Future()

        def run() -> None:
            try:
                found.set_result(ask())
            except BaseException as error:  # raised where it is asked for
                found.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        while not found.done():
            self._look()
            wait([found], POLL_SECONDS)
        deadline = time.monotonic() + SETTLING
        while found.exception() is not None and time.monotonic() < deadline:
            self._look()
            time.sleep(POLL_SECONDS)
        return found.result()
