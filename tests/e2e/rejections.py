"""Look at every rejected draft: were the target's two best tokens there within the rounding of a bfloat16 logit?

    python tests/e2e/rejections.py OUT.json [--steps 3 8] [--lengths 300] [--requests 24] [--kv-cache-dtype fp8_e4m3]

The faithful checkpoint's drafts are right by construction, so a rejected one is either a tie that target and draft round apart
or a draft step that attended to wrong tokens. Requests are streamed one after another, which tells where each round ends; one
prefill of prompt and output, without speculation on the built-in backend, then tells how far the two best tokens are apart at
every position, and how far that prefill's own best token is above the output's: what another batch shape alone does to the
target (on FP8 KV also that a dense prefill, below 2048 tokens, reads keys before they are quantised). Exits with 1 where a
rejection is no tie, or where none was seen.
"""

import argparse
import json
import sys
import time
from collections import Counter
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

from engine_options import new_tokens
from engines import spelled
from soak_traffic import Client, request_body
from ties import TIE
from workloads import prompts

from nsa_backend.benchmarks.checkpoints import faithful
from nsa_backend.benchmarks.reports.report import environment
from nsa_backend.benchmarks.servers.server import Server

SIZES = ["--cuda-graph-bs", "1", "2", "4", "8", "16", "32", "--max-total-tokens", "65536", "--disable-radix-cache"]
KV_OPTIONS = {
    "bfloat16": [],
    "fp8_e4m3": ["--nsa-decode-backend", "flashmla_kv", "--nsa-prefill-backend", "flashmla_kv"],
}


def streamed(port: int, prompt: list[int], tokens: int) -> tuple[dict, list[int]]:
    """The last answer, and how many tokens there were at each chunk of the stream."""
    chunks = list(Client(port).chunks(request_body(prompt, tokens, uuid4().hex), 300))
    return chunks[-1], [chunk["meta_info"]["completion_tokens"] for chunk in chunks]


def rejected_positions(lengths: list[int], histogram: list[int], steps: int) -> list[int] | None:
    """Output positions at which a draft was rejected.

    A round that accepts k of `steps` drafts adds k + 1 tokens, the last of them the target's own, in place of draft k + 1 where
    k < `steps`. The last round may be cut by the limit on new tokens and is not judged.

    Args:
        lengths: tokens at each chunk of the stream; the first chunk is the prefill's token.
        histogram: SGLang's count of rounds by correct drafts.

    Returns:
        None where the stream joined rounds, so that its chunks are not the rounds that SGLang counted.
    """
    added = [after - before for before, after in pairwise(lengths)]
    if lengths[:1] != [1] or len(added) != sum(histogram) or not all(1 <= n <= steps + 1 for n in added):
        return None
    if not Counter(n - 1 for n in added[:-1]) <= Counter(dict(enumerate(histogram))):
        return None
    return [after - 1 for tokens, after in zip(added[:-1], lengths[1:-1], strict=True) if tokens <= steps]


def gaps(port: int, prompt: list[int], output: list[int]) -> tuple[list[float], list[float]]:
    """How far below the best token the second-best and the output's own are, in logits, at each output position."""
    asked = request_body(prompt + output, 1, uuid4().hex)
    asked |= {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    meta = Client(port).generate(asked, timeout=300)["meta_info"]
    best, own = meta["input_top_logprobs"], meta["input_token_logprobs"]
    if not len(best) == len(own) == len(prompt) + len(output):
        raise RuntimeError(f"{len(best)} and {len(own)} log-probabilities for {len(prompt) + len(output)} tokens")
    if [token for _, token, *_ in own[len(prompt) :]] != output:
        raise RuntimeError("the log-probabilities are not those of the output")
    pairs = zip(best[len(prompt) :], own[len(prompt) :], strict=True)
    found = [(round(first[0] - second[0], 4), round(first[0] - token[0], 4)) for (first, second), token in pairs]
    return [gap for gap, _ in found], [below for _, below in found]


def measure(ours: Server, plain: Server, steps: int, length: int, requests: int) -> dict:
    """One row of the report; `ours` drafts `steps` tokens, `plain` none."""
    everywhere, rejected, parted, joined, rounds = [], [], [], 0, 0
    for prompt in prompts(requests, length, step=9, seed=31):
        answer, lengths = streamed(ours.port, prompt, new_tokens(steps))
        histogram = answer["meta_info"]["spec_correct_drafts_histogram"]
        positions = rejected_positions(lengths, histogram, steps)
        if positions is None:
            joined += 1
            continue
        found, below = gaps(plain.port, prompt, answer["output_ids"])
        everywhere += found
        parted += [gap for gap in below if gap > 0]
        rejected += [found[p] for p in positions]
        rounds += sum(histogram)
    return {
        "steps": steps,
        "first_length": length,
        "requests": requests,
        "requests_whose_stream_joined_rounds": joined,
        "rounds": rounds,
        "rejections": len(rejected),
        "gaps": sorted(rejected),
        "ties_among_rejections": sum(gap < TIE for gap in rejected),
        "positions": len(everywhere),
        "ties_among_positions": sum(gap < TIE for gap in everywhere),
        "prefill_prefers_another": sorted(parted),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, nargs="+", default=[3, 8])
    parser.add_argument("--lengths", type=int, nargs="+", default=[300], help="of the first prompt; each next has 9 more")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--kv-cache-dtype", choices=list(KV_OPTIONS), default="bfloat16")
    parser.add_argument("--port", type=int, default=31000)
    args = parser.parse_args()
    with ExitStack() as open_servers:
        work = Path(open_servers.enter_context(TemporaryDirectory(prefix="nsa-rejections-")))
        checkpoint = faithful.write(work / "checkpoint")
        servers = []
        options = spelled([*SIZES, "--kv-cache-dtype", args.kv_cache_dtype, *KV_OPTIONS[args.kv_cache_dtype]])
        for number, (side, steps) in enumerate([("builtin", 0), *(("ours", n) for n in args.steps)]):
            if number:
                time.sleep(3)  # each measures the free memory of the GPU when it starts
            log = work / f"{side}-n{steps}.log"
            server = Server(side, checkpoint, args.port + 100 * number, steps, log, *options)
            servers.append(open_servers.enter_context(server))
        for server in servers:
            server.wait()
        plain, *ours = servers
        pairs = [(server, n, length) for server, n in zip(ours, args.steps, strict=True) for length in args.lengths]
        rows = [measure(server, plain, n, length, args.requests) for server, n, length in pairs]
    report = {"environment": environment(), "kv_cache_dtype": args.kv_cache_dtype, "tie": TIE, "rows": rows}
    args.out.write_text(json.dumps(report, indent=1))
    print(json.dumps(report))
    return 0 if all(r["rejections"] and r["ties_among_rejections"] == r["rejections"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
