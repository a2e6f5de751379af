"""Engines in processes of their own, side by side on the GPUs that this process sees."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

from endings import Exit, Followed

from nsa_backend.benchmarks.servers.process_trees import end_all
from nsa_backend.releases import generation_of, installed

NAMES_OF_DSA = {
    "--nsa-decode-backend": "--dsa-decode-backend",
    "--nsa-prefill-backend": "--dsa-prefill-backend",
    "--cuda-graph-bs": "--cuda-graph-bs-decode",
}
PORTS_APART = 20
"""Between engines side by side; what each has above its own is in ports.py."""
NCCL_PORT = 10
"""Above an engine's port: where its ranks meet. No engine beside it takes that one (tests/releases/test_side_by_side.py).
Unless told, SGLang looks for a free port and takes it half a minute later, when another engine may have it."""
PORTS = 2500
"""Between the ports of runs on different GPUs; the highest stays below those that Linux hands out."""


def spelled(words: list[str]) -> list[str]:
    """A server's options in the words of the installed SGLang, which both sides understand."""
    if generation_of(installed()).adapter == "nsa":
        return words
    # Of its own accord a server captures up to 58 sizes of prefill.
    return [*(NAMES_OF_DSA.get(word, word) for word in words), "--cuda-graph-bs-prefill", "128", "512"]


def first_device() -> int:
    """The first GPU that this process sees, counted over the machine."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return int(first) if first.isdigit() else 0


HANDED_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""Ports that Linux gives to whoever connects somewhere, first and last."""


def refuse_taken_ports(ports: list[int]) -> None:
    """Raise SystemExit where somebody listens on one of these, or may at any time.

    Runs with the same first GPU have the same ports by default. A port that Linux hands out may be somebody's when a server
    comes to it, minutes after this was asked.
    """
    first, last = map(int, HANDED_OUT.read_text().split()) if HANDED_OUT.exists() else (1 << 16, 1 << 16)
    if among := [port for port in ports if first <= port <= last]:
        raise SystemExit(f"port {among[0]} is one that this machine hands out to others: pass a --port {PORTS} below {first}")
    for port in ports:
        with socket.socket() as probe:
            probe.settimeout(1)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                raise SystemExit(
                    f"port {port} is taken, perhaps by another run: pass --port, {PORTS} apart from every other run's"
                )


def run_to_its_end(
    command: list[str], log: Path, environment: dict[str, str], seconds: float, exits: list[Exit] | None = None
) -> int | None:
    """Run a command with all that it starts, and end them all; returns its exit code, or None where `seconds` were over.

    An engine that hangs would otherwise keep its schedulers, and their memory, on the GPU. `exits` takes up the processes that
    ended before, as they ended.
    """
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        try:
            with Followed(process.pid, log, exits):
                return process.wait(seconds)
        except subprocess.TimeoutExpired:
            stream.write(f"\nended after {seconds:.0f} s without a result\n")
            return None
        finally:
            end_all(process)
