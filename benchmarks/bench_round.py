"""A whole speculative round (draft, verify, draft-extend) of a real engine, ours beside SGLang's built-in, in one run.

    python benchmarks/bench_round.py CHECKPOINT OUT.json [--batches 1 8] [--repeats 5]

Both engines live in processes of their own on the same GPU and answer in turns, so that noise of the machine meets both. A
round is timed from the outside: generation time less that of the first token, over the rounds that the accept histogram
counts. One profiled generation each gives launches and kernel time a round.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import zip_longest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench_common import accept_length, environment, print_table

TOKENS, PROMPT = 256, 300
BACKENDS = {"ours": "0", "builtin": "1"}


def serve(checkpoint: str, port: int, steps: int) -> None:
    """The worker: an engine that answers one JSON line with another."""
    import sglang

    engine = sglang.Engine(
        model_path=checkpoint, skip_tokenizer_init=True, grammar_backend="none", attention_backend="nsa",
        nsa_decode_backend="fa3", nsa_prefill_backend="flashmla_sparse", kv_cache_dtype="bfloat16",
        speculative_algorithm="EAGLE", speculative_num_steps=steps, speculative_eagle_topk=1,
        speculative_num_draft_tokens=steps + 1, mem_fraction_static=0.2, max_total_tokens=65536, max_running_requests=32,
        cuda_graph_bs=[1, 2, 4, 8], disable_radix_cache=True, random_seed=0, port=port, log_level="error",
    )  # fmt: skip
    answer({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        answer(generate(engine, request["batch"], request.get("profile")))
    engine.shutdown()


def generate(engine, batch: int, profile: str | None) -> dict:
    prompts = [[2 + (7 * i + 13 * r) % 2000 for i in range(PROMPT)] for r in range(batch)]
    first = timed(engine, prompts, 1)[0]
    if profile:
        engine.start_profile(output_dir=profile, activities=["CPU", "GPU"])
    total, answers = timed(engine, prompts, TOKENS)
    if profile:
        engine.stop_profile()
    histograms = [a["meta_info"]["spec_correct_drafts_histogram"] for a in answers]
    rounds = max(sum(h) for h in histograms)
    accepted = accept_length([sum(counts) for counts in zip_longest(*histograms, fillvalue=0)])
    return {
        "round_ms": 1e3 * (total - first) / rounds,
        "rounds": rounds,
        "accept": accepted,
        "tokens_per_s": batch * TOKENS / total,
    }


def timed(engine, prompts, tokens: int):
    started = time.perf_counter()
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    answers = engine.generate(input_ids=prompts, sampling_params=sampling)
    return time.perf_counter() - started, answers


def answer(message: dict) -> None:
    print("@" + json.dumps(message), flush=True)


class Worker:
    """One engine in a process of its own."""

    def __init__(self, backend: str, checkpoint: str, port: int, steps: int, logs: Path):
        command = [sys.executable, __file__, checkpoint, "-", "--serve", str(port), "--steps", str(steps)]
        self._log = (logs / f"round-{backend}.log").open("w")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env=os.environ | {"NSA_BACKEND_DISABLE": BACKENDS[backend]},
        )  # fmt: skip

    def read(self) -> dict:
        for line in self._process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        raise RuntimeError(f"the engine ended; see {self._log.name}")

    def ask(self, **request) -> dict:
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self.read()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=60)


def read_profile(folder: Path, rounds: int) -> dict:
    """Launches and kernel time a round from the trace that SGLang wrote."""
    (trace,) = folder.glob("*.trace.json.gz")
    with gzip.open(trace) as stream:
        events = json.load(stream)["traceEvents"]
    kernels = [e for e in events if e.get("cat") == "kernel"]
    calls = Counter(e["name"] for e in events if e.get("cat") == "cuda_runtime" or e.get("cat") == "cuda_driver")
    launches = sum(n for name, n in calls.items() if "LaunchKernel" in name)
    graphs = sum(n for name, n in calls.items() if "GraphLaunch" in name)
    waits = sum(n for name, n in calls.items() if "Synchronize" in name)
    return {
        "kernels": round(len(kernels) / rounds, 1),
        "kernel_us": round(sum(e["dur"] for e in kernels) / rounds, 1),
        "launch_calls": round(launches / rounds, 1),
        "graph_launches": round(graphs / rounds, 1),
        "synchronisations": round(waits / rounds, 1),
        "copies": round(sum(n for name, n in calls.items() if "Memcpy" in name) / rounds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("out", type=Path)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.checkpoint, args.serve, args.steps)
        return
    logs = Path(tempfile.mkdtemp())
    workers = {b: Worker(b, args.checkpoint, 31000 + 100 * i, args.steps, logs) for i, b in enumerate(BACKENDS)}
    for worker in workers.values():
        worker.read()
    rows = []
    for batch in args.batches:
        samples = {b: [] for b in workers}
        for repeat in range(args.repeats + 1):
            for backend, worker in workers.items():
                result = worker.ask(batch=batch)
                if repeat:  # the first warms up
                    samples[backend].append(result)
        row = {"batch": batch, "steps": args.steps}
        for backend, results in samples.items():
            times = [r["round_ms"] for r in results]
            folder = logs / f"profile-{backend}-{batch}"
            profiled = workers[backend].ask(batch=batch, profile=str(folder))
            row[backend] = {
                "round_ms": round(statistics.median(times), 3),
                "round_ms_min_max": [round(min(times), 3), round(max(times), 3)],
                "accept": round(statistics.median(r["accept"] for r in results), 3),
                "tokens_per_s": round(statistics.median(r["tokens_per_s"] for r in results), 1),
                "profile": read_profile(folder, profiled["rounds"]),
            }
        rows.append(row)
    for worker in workers.values():
        worker.close()
    report = {"environment": environment(), "rows": rows}
    args.out.write_text(json.dumps(report, indent=1))
    show(report)


def show(report: dict) -> None:
    """Configuration, then medians; the spread of a round is min to max over the repeats."""
    print(report["environment"])
    columns = ("batch", "backend", "round ms", "min-max", "accept", "tokens/s", *report["rows"][0]["ours"]["profile"])
    table = []
    for r in report["rows"]:
        for backend in BACKENDS:
            side = r[backend]
            spread = "{:.2f}-{:.2f}".format(*side["round_ms_min_max"])
            cells = (f"{side['round_ms']:.2f}", spread, f"{side['accept']:.2f}", side["tokens_per_s"])
            table.append((r["batch"], backend, *cells, *side["profile"].values()))
    print_table(columns, table)


if __name__ == "__main__":
    main()
