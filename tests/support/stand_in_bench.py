"""Stand-ins of what benchmarks measure: servers whose rounds take what their side takes, and the traces that they leave.

`Server.seen` is the transcript of a run, and `HELD` what the servers hold of two GPUs, in MiB.
"""

from __future__ import annotations

import gzip
import json
import os
from itertools import pairwise
from pathlib import Path

from nsa_backend.benchmarks.servers.server import Streamed

KERNELS = {
    "attention": "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::Collective",
    "logits": "void deep_gemm::sm90_fp8_paged_mqa_logits<1u, 64u, 128u, 64u, true, false, 3u, 3u, 256u, 128u, 512u, float>(un",
    "top-k": "void sglang::topk_small_batch_cluster_kernel<true, (sglang::TopKMode)1, 16u, 1u>(sglang::TopKPagedParams)",
    "MoE": "fused_moe_kernel",
    "quantisation": "void sglang::per_token_group_quant_flat_kernel<sglang::QuantTrait<__nv_bfloat16, __nv_fp8_e4m3, 128u",
    "indexer": "void sglang::fast_hadamard_transform_kernel<sglang::FastHadamardKernelTraits<16, 7, __nv_bfloat16> >(HadamardP",
    "RoPE, norms, writes": "void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>(__nv_bfloat16*",
    "projections": "void deep_gemm::sm90_fp8_gemm_1d2d_impl<(cute::UMMA::Major)0, 0u, 0u, 0u, 1u, 16u, 16u",
    "rest": "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*",
}
"""What a rank of DeepSeek-V3.2 runs most of on an H200 with SGLang 0.5.23, as its profiler names it, by part."""

BETWEEN_RANKS = {
    "all-reduce": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "exchange": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
}
"""Of every layer of a server of several GPUs, and of the target's layers in decode context parallel."""

LOG = """
[10:00:00] nsa_backend: captured prefills of [64, 128] tokens whole, the largest of requests within 131072, in 1.2 s, 256 MiB
[2026-11-22 10:00:00] Capture target prefill CUDA graph end. elapsed=5.27 s, mem usage=2.02 GB, avail mem=60.11 GB.
[2026-11-22 10:00:03] Capture target verify CUDA graph begin. backend=full, num_tokens_per_req=4, avail mem=60.11 GB
[10:00:06] Capture target verify CUDA graph end. bs=[1, 2, 4, 8], elapsed=3.07 s, mem usage=-0.96 GB, avail mem=61.1 GB.
Capture cuda graph end. Time elapsed: 3.20 s. mem usage=0.51 GB. avail mem=60.00 GB.
[2026-11-22 10:00:09] nsa_backend: captured whole speculative rounds of [1, 2, 4, 8] greedy requests in 0.1 s, 48 MiB
[2026-11-22 10:00:19] nsa_backend: captured whole speculative rounds of [1] sampled requests in 0.0 s, -2 MiB
[10:00:19] nsa_backend: captured whole speculative rounds of [1, 2] greedy requests with log-probabilities in 1.5 s, 512 MiB
"""
"""What a server of ours says of its captures, one of them as SGLang 0.5.12 says it."""

HELD = [1024, 1024]
MANY_LAYERS = 10
ROUND_MS = {"ours": 10.0, "builtin": 12.0, "three_graphs": 11.0, "auto": 9.0}
POOL = 300_000  # tokens that a rank's rows hold
SHOWN = (
    "--tp-size", "--dp-size", "--dcp-size", "--max-total-tokens", "--nccl-port", "--load-format", "--mem-fraction-static",
    "--moe-runner-backend",
)  # fmt: skip


class Trace:
    """Events as SGLang's profiler writes them: a call on the host, then its kernels, of 1 to 4 `us` by their names."""

    def __init__(self, us: float = 2.0):
        self.events, self.now, self.calls, self.us = [], 0.0, 0, us

    def graph(self, *names: str) -> None:
        self.add("cudaGraphLaunch", names)

    def eager(self, *names: str) -> None:
        for name in names:
            self.add("cudaLaunchKernel", [name])

    def add(self, call: str, names: tuple[str, ...] | list[str] = ()) -> None:
        self.calls += 1
        what = {"args": {"correlation": self.calls}}
        for thread in (1, 2):
            self.events.append({"cat": "cuda_runtime", "name": call, "ts": self.now, "dur": 7.0, "tid": thread} | what)
        for name in names:
            took = self.us * (1 + len(name) % 4)
            self.events.append({"cat": "kernel", "name": name, "ts": self.now, "dur": took} | what)
            self.now += took + 0.5

    def generation(self, rounds: int, steps: int, layers: int, between: tuple[str, ...] = ()) -> Trace:
        """A prefill in pieces, whose attention is no part of a graph, or whole where there are many layers; then rounds.

        The target's layers run the kernels `between` ranks too.
        """
        for _ in range(layers + (steps > 0) if layers < MANY_LAYERS else 1):
            self.graph("gemm")
            self.eager("attend")
            self.graph("gemm", "gemm")
        layer = KERNELS.values()
        for _ in range(rounds):
            self.graph("metadata_kernel", "smxx_paged_mqa_logits_metadata")
            if steps > 1:
                self.graph("metadata_kernel", *[*layer, "sample"] * (steps - 1))
            self.eager("copy")
            self.graph("metadata_kernel", "embed", *[*layer, *between] * layers, "head")
            self.add("cudaStreamSynchronize")
            if steps:
                self.eager("copy", "tree")
                self.graph("metadata_kernel", *layer, "head")
        return self


def rounds_of(answers: list[dict], tokens: int) -> int:
    return sum(answers[0]["meta_info"].get("spec_correct_drafts_histogram") or [tokens - 1])


class Server:
    """Stands in for `servers.server.Server`. Of ours every draft is right, of the built-in backend and of ranks none."""

    seen: list[str] = []  # noqa: RUF012 (of all servers of a run)

    def __init__(self, side, checkpoint, port, steps, log, *options, environment=None, kv="bfloat16"):
        self.side, self.steps, self.pid, self.log = side, steps, os.getpid(), log
        self.layers = json.loads((checkpoint / "config.json").read_text()).get("num_hidden_layers", 2)
        log.write_text(LOG if side == "ours" else "")
        told = [f"{a} {b}" for a, b in pairwise(options) if a in SHOWN]
        gpu = (environment or {}).get("CUDA_VISIBLE_DEVICES")
        self.say(f"starts at {port}, N = {steps}", *([f"GPU {gpu}"] if gpu else []), *told)
        given = dict(pairwise(options))
        self.ranks, self.parts = (int(given.get(size, 1)) for size in ("--tp-size", "--dcp-size"))
        self.hold(2)

    def say(self, *words: str) -> None:
        self.seen.append(" ".join((self.side, ", ".join(words))))

    def hold(self, gib: int) -> None:
        self.held = getattr(self, "held", 0) + gib
        HELD[0] += 1024 * gib
        HELD[1] += 512 * gib

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.say("ends")
        self.hold(-self.held)

    @property
    def round_ms(self) -> float:
        return ROUND_MS[self.side] + (self.parts > 1)

    def pool_tokens(self) -> int:
        return POOL * self.parts

    def wait(self, seconds: float = 480.0):
        self.say(f"is waited for, {seconds:.0f} s at most")

    def answers(self, prompts, tokens, ignore_eos=True) -> list[dict]:
        """Every other request ends after half of its tokens where it may."""
        found = []
        for number, _ in enumerate(prompts):
            new = tokens if ignore_eos else tokens // (1 + number % 2)
            right = self.side != "builtin" and self.layers < MANY_LAYERS
            rounds = -(-new // (self.steps + 1)) if right else new - 1
            histogram = [0] * self.steps + [rounds] if right else [rounds, *[0] * self.steps]
            drafts = {"spec_correct_drafts_histogram": histogram} if self.steps else {}
            found.append({"meta_info": {"completion_tokens": new} | drafts})
        return found

    def streamed(self, prompts, tokens, **sampling):
        self.say(f"{len(prompts)} x {len(prompts[0])}, {tokens} tokens", *([str(sampling)] if sampling else []))
        answers = self.answers(prompts, tokens, sampling.get("ignore_eos", True))
        rounds = rounds_of(answers, tokens)
        if "x 300" in self.seen[-1]:
            self.hold(1)
        first = [0.1 * (number + 1) for number in range(len(prompts))]
        return Streamed(first, first[-1] + rounds * (self.round_ms + 0.1 * (len(self.seen) % 3)) / 1e3, answers)

    def generate(self, prompts, tokens):
        self.say(f"{len(prompts)} x {len(prompts[0])}, {tokens} tokens at once")

    def forget(self):
        self.say("forgets")

    def profiled(self, folder: Path, prompts, tokens):
        self.say(f"{len(prompts)} x {len(prompts[0])}, {tokens} tokens, profiled")
        answers = self.answers(prompts, tokens)
        rounds = rounds_of(answers, tokens) + (tokens == 1)  # one too many is launched, as overlap scheduling does
        folder.mkdir(parents=True)
        between = tuple(BETWEEN_RANKS.values())[: (self.ranks > 1) + (self.parts > 1)]
        for rank in range(self.ranks):  # ranks but the first are slower, which nobody reads
            trace = Trace((2.0 if self.side == "ours" else 2.5) + rank).generation(rounds, self.steps, self.layers, between)
            packed = gzip.compress(json.dumps({"traceEvents": trace.events}).encode(), compresslevel=1)
            (folder / f"1764000000.5-TP-{rank}.trace.json.gz").write_bytes(packed)
        return answers
