"""Sampled rounds in one CUDA graph beside SGLang's three: do tokens come as often, and are as many drafts accepted?

    python tests/e2e/sampled_rounds.py OUT.json [--requests 2000] [--steps 3] [--port 32000] [--parallel tp2]

Many requests of one prompt, each a few tokens long, so that whole outputs can be counted: by top-k, by top-p, by both, and with
greedy requests among them. Verification of three graphs is SGLang's own path, so where the two
sides' outputs come equally often, a graph samples what SGLang samples. Accept lengths are compared on longer outputs. Exits
with 1 where a side differs beyond chance (once in ten thousand runs), or where no sampled round was one graph.
"""

import argparse
import json
import math
import os
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory

from engines import spelled
from replays import replayed
from workloads import prompts

from nsa_backend.benchmarks.checkpoints import faithful
from nsa_backend.benchmarks.reports.report import environment
from nsa_backend.benchmarks.servers.generation import accept_length
from nsa_backend.benchmarks.servers.parallel import ONE_GPU, Parallel, parsed
from nsa_backend.benchmarks.servers.server import THREE_GRAPHS, Server, call

SIDES = ("ours", THREE_GRAPHS)
SIZES = ["--cuda-graph-bs", "1", "2", "4", "8", "--max-total-tokens", "65536"]
BATCH, SHORT, LONG = 8, 5, 65  # requests at once; tokens of outputs that are counted, and of those whose rounds are
SAMPLING = {
    "top-k": ({"temperature": 1.0, "top_k": 3},),
    "top-p": ({"temperature": 0.3, "top_p": 0.3},),
    "both": ({"temperature": 0.7, "top_k": 4, "top_p": 0.8},),
    "greedy ones too": ({"temperature": 1.0, "top_k": 2}, {"temperature": 0}),
}
"""Sampling parameters of one request of a batch after the other."""
SAMPLED = "sampled requests"


def answers_of(port: int, prompt: list[int], sampling: tuple[dict, ...], tokens: int, requests: int) -> list[tuple[int, dict]]:
    """(which of `sampling`, answer) of so many requests, `BATCH` at once or one fewer, for padding."""
    found = []
    while len(found) < requests:
        size = BATCH - (len(found) // BATCH % 2)
        which = [number % len(sampling) for number in range(size)]
        parameters = [sampling[one] | {"max_new_tokens": tokens, "ignore_eos": True} for one in which]
        answers = call(port, "/generate", {"input_ids": [prompt] * size, "sampling_params": parameters})
        found += zip(which, answers, strict=True)
    return found


def difference(one: Counter, other: Counter) -> tuple[float, int]:
    """(chi-square, degrees of freedom) of two samples of outputs; those that came fewer than ten times are one kind."""
    together = one + other
    kinds = [kind for kind, count in together.items() if count >= 10]
    rare = [sum(count for kind, count in side.items() if together[kind] < 10) for side in (one, other)]
    counts = [(one[kind], other[kind]) for kind in kinds] + ([tuple(rare)] if sum(rare) >= 10 else [])
    a, b = (sum(side) for side in zip(*counts, strict=True))
    chi_square = sum((x * math.sqrt(b / a) - y * math.sqrt(a / b)) ** 2 / (x + y) for x, y in counts)
    return chi_square, len(counts) - 1


def by_chance(chi_square: float, freedom: int) -> bool:
    """Whether it stays below what one sample in ten thousand exceeds (Wilson and Hilferty)."""
    if freedom == 0:  # one kind on both sides
        return True
    spread = 2 / (9 * freedom)
    return chi_square < freedom * (1 - spread + 3.719 * math.sqrt(spread)) ** 3


def compared(ports: dict[str, int], prompt: list[int], name: str, requests: int) -> dict:
    """One row: how the outputs of both sides are distributed, and their accept lengths."""
    outputs = {side: [Counter() for _ in SAMPLING[name]] for side in SIDES}
    accept = {}
    for side, port in ports.items():
        for which, answer in answers_of(port, prompt, SAMPLING[name], SHORT, requests):
            outputs[side][which][tuple(answer["output_ids"])] += 1
        long = answers_of(port, prompt, SAMPLING[name], LONG, max(requests // 10, 2 * BATCH))
        accept[side] = [accept_length(answer["meta_info"]["spec_correct_drafts_histogram"]) for _, answer in long]
    found = [difference(*(outputs[side][which] for side in SIDES)) for which in range(len(SAMPLING[name]))]
    error = math.sqrt(sum(stdev(of_side) ** 2 / len(of_side) for of_side in accept.values()))
    apart = fmean(accept[SIDES[0]]) - fmean(accept[SIDES[1]])
    return {
        "sampling": name,
        "parameters": SAMPLING[name],
        "kinds of outputs": [[len(counter) for counter in outputs[side]] for side in SIDES],
        "chi_square": [round(chi_square, 2) for chi_square, _ in found],
        "freedom": [freedom for _, freedom in found],
        "accept": {side: round(fmean(of_side), 4) for side, of_side in accept.items()},
        "accept_apart": round(apart, 4),
        "accept_error": round(error, 4),
        "same": all(by_chance(*one) for one in found) and abs(apart) <= 4 * error,
    }


def started(work: Path, args: argparse.Namespace, resources: ExitStack) -> dict[str, Server]:
    """Both sides' servers, ready."""
    checkpoint = faithful.write(work / "checkpoint")
    parallel: Parallel = parsed(args.parallel) if args.parallel else ONE_GPU
    os.environ["NSA_BACKEND_SAMPLED_ROUNDS"] = "1"
    servers = {}
    for number, side in enumerate(SIDES):
        time.sleep(3 * number)  # each measures the free memory of the GPU when it starts
        options = [*spelled(SIZES), *parallel.options()]
        server = Server(side, checkpoint, args.port + 50 * number, args.steps, work / f"{side}.log", *options)
        servers[side] = resources.enter_context(server)
    for server in servers.values():
        server.wait()
    return servers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--requests", type=int, default=2000, help="of each side and each kind of sampling")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--port", type=int, default=32000)
    parser.add_argument("--parallel", help="GPUs of a server: tp2; one unless told")
    args = parser.parse_args()
    with ExitStack() as resources:
        servers = started(Path(resources.enter_context(TemporaryDirectory())), args, resources)
        ports = {side: server.port for side, server in servers.items()}
        rows = [compared(ports, prompts(1, 300)[0], name, args.requests) for name in SAMPLING]
        counted = {side: replayed(call(port, "/server_info")) for side, port in ports.items()}
    report = {"environment": environment(), "command": " ".join(sys.argv), "one_graph": counted, "rows": rows}
    args.out.write_text(json.dumps(report, indent=1))
    for row in rows:
        print(json.dumps(row))
    one_graph = {side: sum(counts.get(SAMPLED, 0) for counts in of_side) for side, of_side in counted.items()}
    return 0 if all(row["same"] for row in rows) and one_graph["ours"] and not one_graph[THREE_GRAPHS] else 1


if __name__ == "__main__":
    sys.exit(main())
