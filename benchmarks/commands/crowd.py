"""More long requests at once than tensor parallel has room for: what a deployment that divides their KV does with them.

    python -m nsa_backend.benchmarks.commands.crowd OUT.json --checkpoint v3.2-tp8-20-layers --requests 16 --length 131072

One server of ours after the other, first of --dcp-size 2, then of tensor parallel 2, with the same share of memory, is asked
for all requests at once. A row says how many tokens its pool holds, how many requests it decoded at the same time, how many it
took back for want of room, and when the first tokens came. OUT.json is written after every server.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from nsa_backend.benchmarks.checkpoints import ranks
from nsa_backend.benchmarks.commands.rank_serve import CONTEXT, PORT, STARTING
from nsa_backend.benchmarks.reports.report import environment, write_report
from nsa_backend.benchmarks.servers import parallel, server_options
from nsa_backend.benchmarks.servers.generation import prompts
from nsa_backend.benchmarks.servers.pairs import meeting
from nsa_backend.benchmarks.servers.parallel import Parallel
from nsa_backend.benchmarks.servers.server import Server, retracted
from nsa_backend.benchmarks.servers.sides import checkpoint_of

RUNNING = re.compile(r"Decode batch.*?#running-req: (\d+)")
STEPS = 3

Start = Callable[[Parallel], AbstractContextManager[Server]]


def start(args: argparse.Namespace, folder: Path, deployment: Parallel) -> Server:
    """A server that has no room but its share of memory, and keeps no prompt. Does not wait."""
    path = checkpoint_of(args.checkpoint, folder, deployment.gpus)
    options = [
        *server_options.decode_graphs({1, args.requests}), "--disable-radix-cache", *deployment.options(), *meeting(args.port),
        "--mem-fraction-static", str(args.memory), "--context-length", str(CONTEXT),
        "--max-running-requests", str(args.requests),
    ]  # fmt: skip
    return Server("auto", path, args.port, STEPS, folder / f"{deployment}.log", *options)


def measured(server: Server, args: argparse.Namespace, deployment: Parallel) -> dict:
    """A row of one deployment."""
    server.wait(STARTING)
    asked = prompts(args.requests, args.length)
    server.streamed(asked[:1], args.tokens)  # compiles what its lengths need
    found = server.streamed(asked, args.tokens)
    answered = [len(answer["output_ids"]) for answer in found.answers]
    log = server.log.read_text(errors="replace")
    return {
        "checkpoint": args.checkpoint,
        "parallel": str(deployment),
        "requests": args.requests,
        "length": args.length,
        "tokens": args.tokens,
        "pool_tokens": server.pool_tokens(),
        "answered_whole": answered.count(args.tokens),
        "decoded_at_once": max(map(int, RUNNING.findall(log)), default=0),
        "retracted": retracted(log),
        "first_token_s": [round(second, 2) for second in sorted(found.first_seconds)],
        "seconds": round(found.seconds, 2),
    }


def run(args: argparse.Namespace, started: Start) -> list[dict]:
    """A row a deployment, in their order."""
    deployments = [parallel.parsed(word) for word in args.parallel]
    head = {"environment": environment(max(one.gpus for one in deployments)), "command": shlex.join(sys.argv)}
    rows: list[dict] = []
    for deployment in deployments:
        with started(deployment) as server:
            rows.append(measured(server, args, deployment))
        print(rows[-1], flush=True)
        write_report(args.out, head | {"rows": rows})
    return rows


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--checkpoint", default="v3.2-tp8-20-layers", help=f"one of {', '.join(ranks.RANKS)}, or of fewer layers"
    )
    parser.add_argument("--parallel", nargs="+", default=["dcp2", "tp2"])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--length", type=int, default=131072, help="prompt tokens of each")
    parser.add_argument("--tokens", type=int, default=129, help="new tokens of each")
    parser.add_argument("--memory", type=float, default=0.45, help="share of a GPU for weights and pool")
    parser.add_argument("--port", type=int, default=PORT)
    return parser.parse_args(words)


def main() -> None:
    args = parsed()
    with tempfile.TemporaryDirectory(prefix="nsa-bench-") as folder:
        run(args, partial(start, args, Path(folder)))


if __name__ == "__main__":
    main()
