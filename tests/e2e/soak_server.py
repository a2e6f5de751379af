"""The server of a soak run: its command, its side's environment, the memory that it takes."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent))
from engines import spelled
from soak_traffic import LONGEST_OUTPUT

from nsa_backend.benchmarks import servers

SIDES = {"ours": {"NSA_BACKEND_REQUIRED": "1", "NSA_BACKEND_DISABLE": "0"}, "builtin": {"NSA_BACKEND_DISABLE": "1"}}

ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""Each new record of the indexer's scores would take a segment of its own beside all the smaller ones."""

POOL_TOKENS = 57344
"""Less than what 64 random requests need (60000 to 90000 tokens, by the seed), so that SGLang admits more than fit and takes
some back; it still holds 30 to 50 requests at once, and four of the longest."""


def command(checkpoint: Path, port: int) -> list[str]:
    """The README's command with a small pool, small chunks, and graphs up to 64 requests.

    SGLang's indexer keeps a float32 score of every new token with every token of its batch: 448 MiB for chunks of 2048 over
    this pool, 112 MiB for chunks of 512. The largest comes late in a run, and would look like growth. A stream says its first
    token at once and the rest at its end, which leaves the clients time to be punctual.
    """
    return spelled([
        *servers.command(checkpoint, port), "--max-running-requests", "64", "--max-total-tokens", str(POOL_TOKENS),
        "--context-length", "16384", "--chunked-prefill-size", "512", "--cuda-graph-bs", "1", "2", "4", "8", "16", "32", "64",
        "--stream-interval", str(LONGEST_OUTPUT + 1), "--log-level-http", "warning",
    ])  # fmt: skip


def gpu_mib(gpu: str) -> int | None:
    query = ["nvidia-smi", "-i", gpu, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.SubprocessError, ValueError, IndexError):
        return int(subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.split()[0])
    return None


def host_mib(pid: int) -> float | None:
    """Resident memory of the server's processes; a page that they share counts in each."""
    total = 0
    with suppress(psutil.Error):
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            with suppress(psutil.Error):
                total += process.memory_info().rss
    return round(total / 2**20, 1) if total else None
