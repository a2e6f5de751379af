"""The ranks of released models in vLLM 0.33, by the shapes and in the rows of `bench serve`: a second peer.

    python -m nsa_backend.benchmarks.commands.vllm_rank OUT.json --checkpoint v3.2-tp8 --steps 3 0 --batch 1 8 32 --length 300
    4096

vLLM brings its own environment, so this is a program apart from `bench`; it needs no SGLang. An engine in a process of its own
answers offline, without HTTP. A round is the difference of a long and a short generation over the difference of their verify
steps, so that prefill and start drop out; time to first token is a generation of one token. Weights are drawn as `rank_server`
draws them. OUT.json is written after every cell.

vLLM compiles kernels for shapes as it meets them, also those of a few rows that it schedules together once in a while: such
generations are repeated, and a row says how many were. It needs nvidia-cutlass-dsl.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nsa_backend.benchmarks.checkpoints import ranks
from nsa_backend.benchmarks.commands.rank_serve import CONTEXT, TOKENS, samples_of, shapes
from nsa_backend.benchmarks.reports.rank_show import show
from nsa_backend.benchmarks.reports.report import environment, write_report
from nsa_backend.benchmarks.servers.generation import prompts, spread
from nsa_backend.benchmarks.servers.rank_server import draw_weights

SHORT = 8  # new tokens of the generation that is subtracted
LENGTHS = 1, SHORT, TOKENS
"""New tokens of the generations that are timed, in their order."""
WARM_UPS = 6  # turns of these, at most
REPEATS = 4  # of a generation, at most
LATE = 1.1
"""Over the fastest of its length, a generation that compiled: others are within 2 % of each other."""
SETTINGS = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",  # the engine's process imports this module, which draws the weights
    "VLLM_DEEP_GEMM_WARMUP": "skip",  # greedy decoding needs neither this nor the next
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
}

Generate = Callable[[list[list[int]], int], tuple[float, float, float]]
"""(seconds, most verify steps of a request, tokens a step) of prompts and new tokens each."""


def engine_options(folder: Path, steps: int, wanted: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Keyword arguments of vllm.LLM; drafts' own graphs are of one token a request, so both sizes are captured."""
    batches = {batch for batch, _ in wanted}
    options: dict[str, Any] = {
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "gpu_memory_utilization": 0.9,
        "max_model_len": CONTEXT,
        "max_num_seqs": max(batches),
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": False,
        "compilation_config": {
            "cudagraph_mode": "FULL_AND_PIECEWISE",
            "cudagraph_capture_sizes": sorted(batches | {batch * (steps + 1) for batch in batches}),
        },
    }
    if steps:
        options["speculative_config"] = {"method": "mtp", "num_speculative_tokens": steps}
        options["per_request_spec_decode_metrics"] = "summary"
    return options


def started(folder: Path, steps: int, wanted: Sequence[tuple[int, int]]) -> Generate:
    """An engine that is ready; it lives as long as what is returned."""
    from vllm import LLM, SamplingParams

    engine = LLM(**engine_options(folder, steps, wanted))

    def generate(asked: list[list[int]], tokens: int) -> tuple[float, float, float]:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        answers = engine.generate([{"prompt_token_ids": ids} for ids in asked], sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        counted = [sum(one.outputs[0].spec_decode_metrics.histogram) if steps else tokens for one in answers]
        return seconds, max(counted), tokens_a_step(counted, tokens)

    return generate


def tokens_a_step(counted: Sequence[float], tokens: int) -> float:
    """Of requests of so many new tokens each and their verify steps: a first token alone takes none."""
    return len(counted) * tokens / max(sum(counted), 1)


class Steady:
    """Generations of a batch without those in which vLLM compiled: it does for shapes as it meets them, even once it is warm.

    Which requests share a step differs by the number of new tokens, and by which drafts were accepted.
    """

    def __init__(self, generate: Generate, asked: list[list[int]]):
        """Generate until all LENGTHS take as long as their fastest before, or WARM_UPS turns are over."""
        self._generate, self._asked, self.repeated = generate, asked, 0
        self._fastest = dict.fromkeys(LENGTHS, float("inf"))
        for _ in range(WARM_UPS):
            before = dict(self._fastest)
            took = {tokens: self._once(tokens)[0] for tokens in LENGTHS}
            if all(took[tokens] < LATE * before[tokens] and before[tokens] < LATE * took[tokens] for tokens in LENGTHS):
                break

    def generate(self, tokens: int) -> tuple[float, float, float]:
        """What `Generate` gives: of the first generation that takes about as long as the fastest, or of the last of REPEATS."""
        for _ in range(REPEATS):
            found = self._once(tokens)
            if found[0] < LATE * self._fastest[tokens]:
                break
            self.repeated += 1
        return found

    def _once(self, tokens: int) -> tuple[float, float, float]:
        found = self._generate(self._asked, tokens)
        self._fastest[tokens] = min(self._fastest[tokens], found[0])
        return found


def measured(generate: Generate, name: str, steps: int, batch: int, length: int, samples: int | None = None) -> dict:
    """A row of `rank_serve`, of the side vllm, from so many samples, or twice as many as that has."""
    steady = Steady(generate, prompts(batch, length))
    round_ms, first_ms = [], []
    samples = samples or 2 * samples_of(batch, length)
    for _ in range(samples):
        first_ms.append(1e3 * steady.generate(1)[0])
        short, long = steady.generate(SHORT), steady.generate(TOKENS)
        round_ms.append(1e3 * (long[0] - short[0]) / (long[1] - short[1]))
    row = {"checkpoint": name, "steps": steps, "batch": batch, "length": length, "tokens": TOKENS, "samples": samples}
    return row | {
        "side": "vllm",
        "turn": 0,
        "round_ms": spread(round_ms),
        "ttft_ms": spread(first_ms),
        "accept": round(long[2], 3),
        "repeated": steady.repeated,
    }


def take_over() -> None:
    """Make vLLM's loader of dummy weights draw as ours. It asks for each part of a model too, which is drawn by then."""
    from vllm.model_executor.model_loader import dummy_loader

    drawn: set[int] = set()

    def draw_once(model: Any, *others: object) -> None:
        pointers = {weight.data_ptr() for weight in model.state_dict().values()}
        if not pointers <= drawn:
            draw_weights(model)
            drawn.update(pointers)

    dummy_loader.initialize_dummy_weights = draw_once


def run(args: argparse.Namespace, start: Callable[..., Generate] = started) -> list[dict]:
    """All rows; one engine a rank and N."""
    head = {"environment": environment() | {"vllm": version("vllm")}, "command": shlex.join(sys.argv)}
    rows: list[dict] = []
    with tempfile.TemporaryDirectory(prefix="nsa-bench-") as folder:
        for name in args.checkpoint:
            path = ranks.write(Path(folder) / name, name)
            for steps in args.steps:
                wanted = shapes(name, args)
                generate = start(path, steps, wanted)
                for batch, length in wanted:
                    rows.append(measured(generate, name, steps, batch, length, args.samples))
                    print(rows[-1], flush=True)
                    write_report(args.out, head | {"rows": rows})
                del generate  # the engine ends with it, and leaves the GPU to the next
    return rows


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--checkpoint", nargs="+", choices=ranks.RANKS, default=["v3.2-tp8"])
    parser.add_argument("--steps", nargs="+", type=int, default=[3, 0])
    parser.add_argument("--batch", nargs="+", type=int)
    parser.add_argument("--length", nargs="+", type=int)
    parser.add_argument("--prompt-tokens", type=int, default=8 * 32768, help="most prompt tokens of a batch")
    parser.add_argument("--samples", type=int, help="of every cell")
    parser.add_argument("--quick", action="store_true")
    return parser.parse_args()


if __name__ == "__mp_main__":
    take_over()

if __name__ == "__main__":
    os.environ.update({name: os.environ.get(name, value) for name, value in SETTINGS.items()})
    take_over()
    show(run(parsed()))
