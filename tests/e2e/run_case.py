"""Run one case in this process with the backend that the environment selects, and write what came out as JSON.

    python tests/e2e/run_case.py CHECKPOINT 'n3 fa3' OUT.json [--port 30000]

NSA_BACKEND_DISABLE=1 selects SGLang's built-in backend.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import replays
from actions import ACTIONS
from engine_options import new_tokens
from logprobs import told
from nodes import Nodes
from pd_servers import ALONE, Pair, ServerProcess, meeting
from workloads import CASES, RANKS, WORKLOADS, Case

from nsa_backend.adapters.options import OWN_DECODE_VALUES
from nsa_backend.benchmarks.checkpoints.eagle3 import beside
from nsa_backend.benchmarks.servers.generation import accept_length
from nsa_backend.benchmarks.servers.server import call

PREFILL_SHAPES = (128, 512, 1024, 4096)
"""Tokens of a captured prefill; SGLang's own list has up to 58 sizes, most of an engine's start."""


def known_to_sglang(case: Case) -> str:
    """What its own backend decodes with: the case's implementation, or where it lacks that, what it takes by itself."""
    if case.decode not in OWN_DECODE_VALUES:
        return case.decode
    return "flashmla_kv" if case.engine.get("kv_cache_dtype") == "fp8_e4m3" else "fa3"


def engine_arguments(case: Case, checkpoint: str, port: int, *, builtin: bool = False) -> dict:
    """Arguments of sglang.Engine; the same for both backends, but for our own kernels, which the built-in one does not know.

    What a case names None is SGLang's to choose.
    """
    arguments = {
        "model_path": checkpoint,
        "skip_tokenizer_init": True,
        "grammar_backend": "none",
        "attention_backend": "nsa",
        "nsa_decode_backend": known_to_sglang(case) if builtin else case.decode,
        "nsa_prefill_backend": "flashmla_sparse",
        "kv_cache_dtype": "bfloat16",
        "mem_fraction_static": 0.3,  # of what is free; `max_total_tokens` says what is taken
        "max_total_tokens": 65536,
        "max_running_requests": 32,
        "cuda_graph_bs": [1, 2, 4, 8],
        "random_seed": 0,
        **meeting(port),
        "log_level": "info",
    }
    if case.steps:
        arguments |= {
            "speculative_algorithm": "EAGLE",
            "speculative_num_steps": case.steps,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": case.steps + 1,
        }
    if case.dense_draft:
        arguments |= {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": str(beside(Path(checkpoint))),
            "speculative_draft_attention_backend": "fa3",
        }
    arguments |= case.builtin_engine if builtin else case.engine
    return _spelled({name: value for name, value in arguments.items() if value is not None})


def _spelled(arguments: dict) -> dict:
    """What the installed generation of SGLang calls these arguments of sglang.Engine, and what it wants beside them."""
    from nsa_backend.adapters.installed import adapter

    names = {"nsa_decode_backend": adapter.DECODE_ATTRIBUTE, "nsa_prefill_backend": adapter.PREFILL_ATTRIBUTE}
    if "dsa" in adapter.BACKEND_NAMES:
        names["cuda_graph_bs"] = "cuda_graph_bs_decode"
        chunk = arguments.get("chunked_prefill_size", max(PREFILL_SHAPES))
        arguments = {"cuda_graph_bs_prefill": [size for size in PREFILL_SHAPES if size <= chunk]} | arguments
    return {names.get(name, name): value for name, value in arguments.items()}


Generate = Callable[[list[list[int]], dict | list[dict], list[int] | None], list[dict]]
"""From the prompts of a wave, sampling parameters of all or of each, and DP ranks (or None) to answers in their order."""


def generate_with(engine, **others) -> Generate:
    """Sends a wave to an engine at once; `ranks` are the DP ranks that its requests go to, `others` more of what they ask."""

    def generate(wave: list[list[int]], sampling: dict | list[dict], ranks: list[int] | None) -> list[dict]:
        if ranks is None:
            return engine.generate(input_ids=wave, sampling_params=sampling, **others)

        async def all_of_them() -> list[dict]:
            each = sampling if isinstance(sampling, list) else [sampling] * len(wave)
            requests = zip(wave, each, ranks, strict=True)
            calls = [engine.async_generate(input_ids=p, sampling_params=s, routed_dp_rank=r, **others) for p, s, r in requests]
            return await asyncio.gather(*calls)

        return engine.loop.run_until_complete(all_of_them())

    return generate


def measure(generate: Generate, case: Case, again: str = "") -> dict:
    """What each workload of `case` gave, by its name; with `again`, which tells a second run from the first."""
    greedy = {"temperature": 0, "max_new_tokens": new_tokens(case.steps, case.most_tokens), "ignore_eos": True}

    def sampling(wave: list[list[int]]) -> dict | list[dict]:
        if not case.sampling:
            return greedy
        return [greedy | case.sampling[number % len(case.sampling)] for number in range(len(wave))]

    out = {}
    for name in case.workloads:
        waves = WORKLOADS[name]()
        ranks = RANKS.get(name, [None] * len(waves))
        began = time.perf_counter()
        answers = [a for wave, where in zip(waves, ranks, strict=True) for a in generate(wave, sampling(wave), where)]
        metas = [a["meta_info"] for a in answers]
        histograms = [meta.get("spec_correct_drafts_histogram") or [] for meta in metas]
        out[f"{name}, {again}" if again else name] = {
            "output_ids": [a["output_ids"] for a in answers],
            "accept": [round(accept_length(h), 4) for h in histograms],
            "histograms": histograms,
            "cached_tokens": [meta.get("cached_tokens") for meta in metas],
            "host_tokens": from_tier(metas, "host"),
            "storage_tokens": from_tier(metas, "storage"),
            "seconds": round(time.perf_counter() - began, 3),
        } | ({"logprobs": told(answers)} if case.logprobs else {})
    return out


def from_tier(metas: list[dict], tier: str) -> list[int]:
    """Tokens of each prompt that were cached there."""
    return [(meta.get("cached_tokens_details") or {}).get(tier, 0) for meta in metas]


@contextmanager
def storage_of_its_own() -> Iterator[None]:
    """An empty folder for `--hicache-storage-backend file`, whose files say nothing of the model, the KV or the side."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = folder
        yield


@storage_of_its_own()
def run_engine(case: Case, arguments: dict) -> dict:
    import sglang

    engine = sglang.Engine(**arguments)
    try:
        generate = generate_with(engine, **({"return_logprob": True} if case.logprobs else {}))
        out = measure(generate, case)
        if case.action:
            ACTIONS[case.action](engine, Path(arguments["model_path"]))
            out |= measure(generate, case, case.again)
        if case.replays:
            replays.tell(engine.get_server_info())
        return out
    finally:
        engine.shutdown()


def run_disaggregated(case: Case, arguments: dict) -> dict:
    """Prefill and decode server, and one that does both, all of them started at once."""
    with ExitStack() as open_servers:
        options = {"gpus": case.gpus, "of_prefill": case.prefill_engine, "router": case.router}
        pair = open_servers.enter_context(Pair(arguments, case.disaggregated, **options))
        alone = open_servers.enter_context(ServerProcess(arguments | meeting(arguments["port"] + ALONE)))
        pair.wait()
        alone.wait()
        found = measure(pair.generate, case) | measure(alone.generate, case, case.again)
        tell_of_servers(case, pair.decode.port, alone.port)
        return found


def run_on_nodes(case: Case, arguments: dict, logs: Path) -> dict:
    """On as many nodes as ranks share a GPU; their logs are `logs` with other suffixes."""
    with Nodes(arguments, case.ranks_per_gpu, logs) as nodes:
        nodes.wait()
        found = measure(nodes.generate, case)
        tell_of_servers(case, nodes.port)
        return found


def tell_of_servers(case: Case, *ports: int) -> None:
    """Where it matters, how many rounds of each were one graph."""
    if case.replays:
        for port in ports:
            replays.tell(call(port, "/server_info"))


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
    arguments = engine_arguments(case, args.checkpoint, args.port, builtin=builtin)
    run = run_disaggregated if case.disaggregated else run_engine
    if case.ranks_per_gpu > 1:
        run = partial(run_on_nodes, logs=args.out)
    args.out.write_text(json.dumps(run(case, arguments)))


if __name__ == "__main__":
    main()
