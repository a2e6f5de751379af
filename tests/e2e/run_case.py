"""Run one case in this process with the backend that the environment selects, and write what came out as JSON.

    python tests/e2e/run_case.py CHECKPOINT 'n3 fa3' OUT.json [--port 30000]

NSA_BACKEND_DISABLE=1 selects SGLang's built-in backend.
"""

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from workloads import CASES, RANKS, WORKLOADS, Case, new_tokens

from nsa_backend.benchmarks.generation import accept_length

PREFILL_SHAPES = (128, 512, 1024, 4096)
"""Tokens of a captured prefill; SGLang's own list has up to 58 sizes, most of an engine's start."""


def engine_arguments(case: Case, checkpoint: str, port: int) -> dict:
    """Arguments of sglang.Engine; the same for both backends."""
    arguments = {
        "model_path": checkpoint,
        "skip_tokenizer_init": True,
        "grammar_backend": "none",
        "attention_backend": "nsa",
        "nsa_decode_backend": case.decode,
        "nsa_prefill_backend": "flashmla_sparse",
        "kv_cache_dtype": "bfloat16",
        "mem_fraction_static": 0.3,  # of what is free; `max_total_tokens` says what is taken
        "max_total_tokens": 65536,
        "max_running_requests": 32,
        "cuda_graph_bs": [1, 2, 4, 8],
        "random_seed": 0,
        "port": port,
        "log_level": "info",
    }
    if case.steps:
        arguments |= {
            "speculative_algorithm": "EAGLE",
            "speculative_num_steps": case.steps,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": case.steps + 1,
        }
    return _spelled(arguments | case.engine)


def _spelled(arguments: dict) -> dict:
    """What the installed generation of SGLang calls these arguments of sglang.Engine, and what it wants beside them."""
    from nsa_backend.adapters.installed import adapter

    names = {"nsa_decode_backend": adapter.DECODE_ATTRIBUTE, "nsa_prefill_backend": adapter.PREFILL_ATTRIBUTE}
    if "dsa" in adapter.BACKEND_NAMES:
        names["cuda_graph_bs"] = "cuda_graph_bs_decode"
        if arguments.get("debug_cuda_graph"):
            # SGLang asserts the first at capture, and its own capture of prefill ends in an assertion in this mode (0.5.23).
            arguments = arguments | {"cuda_graph_backend_decode": "breakable", "disable_prefill_cuda_graph": True}
        chunk = arguments.get("chunked_prefill_size", max(PREFILL_SHAPES))
        arguments = arguments | {"cuda_graph_bs_prefill": [size for size in PREFILL_SHAPES if size <= chunk]}
    return {names.get(name, name): value for name, value in arguments.items()}


def _generate(engine, wave: list[list[int]], sampling: dict, ranks: list[int] | None) -> list[dict]:
    """The answers of one wave, sent at once; `ranks` are the DP ranks that its requests go to."""
    if ranks is None:
        return engine.generate(input_ids=wave, sampling_params=sampling)

    async def all_of_them() -> list[dict]:
        pairs = zip(wave, ranks, strict=True)
        calls = [engine.async_generate(input_ids=p, sampling_params=sampling, routed_dp_rank=r) for p, r in pairs]
        return await asyncio.gather(*calls)

    return engine.loop.run_until_complete(all_of_them())


def run(engine, case: Case) -> dict:
    sampling = {"temperature": 0, "max_new_tokens": new_tokens(case.steps), "ignore_eos": True}
    out = {}
    for name in case.workloads:
        waves = WORKLOADS[name]()
        ranks = RANKS.get(name, [None] * len(waves))
        answers = [a for wave, where in zip(waves, ranks, strict=True) for a in _generate(engine, wave, sampling, where)]
        histograms = [a["meta_info"].get("spec_correct_drafts_histogram") or [] for a in answers]
        out[name] = {
            "output_ids": [a["output_ids"] for a in answers],
            "accept": [round(accept_length(h), 4) for h in histograms],
            "histograms": histograms,
            "cached_tokens": [a["meta_info"].get("cached_tokens") for a in answers],
        }
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("case", choices=[case.name for case in CASES])
    parser.add_argument("out", type=Path)
    parser.add_argument("--port", type=int, default=30000)
    args = parser.parse_args()
    case = next(c for c in CASES if c.name == args.case)
    builtin = os.environ.get("NSA_BACKEND_DISABLE") == "1"
    os.environ.update(case.builtin_environment if builtin and case.builtin_environment is not None else case.environment)
    import sglang

    engine = sglang.Engine(**engine_arguments(case, args.checkpoint, args.port))
    try:
        args.out.write_text(json.dumps(run(engine, case)))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
