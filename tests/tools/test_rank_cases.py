"""Cases of several GPUs: their names, their requests a rank, and which run where ranks share GPUs."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import rank_cases
import run_all
from run_case import engine_arguments, generate_with
from shared_cases import SHARED_CASES
from workloads import CASES, ON_RANKS

from nsa_backend.benchmarks.checkpoints import faithful


def test_no_two_cases_have_one_name():
    assert [name for name, times in Counter(case.name for case in CASES).items() if times > 1] == []


def test_no_rank_keeps_requests_waiting():
    """SGLang divides the running requests by the ranks of DP attention."""
    for case in (*rank_cases.CASES_OF_RANKS, *SHARED_CASES):
        for counts in (ON_RANKS[name] for name in case.workloads if name in ON_RANKS):
            arguments = engine_arguments(case, "", 12000)
            assert arguments["max_running_requests"] // arguments["dp_size"] >= max(map(max, counts)), case.name


def test_requests_go_to_their_ranks():
    asked = []

    async def async_generate(input_ids, sampling_params, routed_dp_rank):
        asked.append((len(input_ids), sampling_params, routed_dp_rank))
        return input_ids

    engine = SimpleNamespace(loop=asyncio.new_event_loop(), async_generate=async_generate)
    each = [{"top_k": 1}, {}, {"top_k": 3}]
    for sampling, ask in (({"top_k": 1}, [{"top_k": 1}] * 3), (each, each)):
        asked.clear()
        assert generate_with(engine)([[1, 2], [3], [4]], sampling, [0, 0, 1]) == [[1, 2], [3], [4]]
        assert asked == list(zip((2, 1, 1), ask, (0, 0, 1), strict=True))
    engine.loop.close()


def test_cases_on_shared_gpus_are_asked_for_by_the_ranks_of_a_gpu(monkeypatch, tmp_path):
    """So that no run has them beside engines that are timed, or that wait for GPUs of their own."""

    def chosen(*words: str) -> tuple[set[str], int]:
        monkeypatch.setattr(sys, "argv", ["run_all.py", str(tmp_path / "x.json"), "--gpus", "2", *words])
        args, cases = run_all.arguments()
        return {case.name for case in cases}, args.jobs

    monkeypatch.setattr(run_all.Case, "runs_here", lambda case: True)
    shared = {case.name: case.ranks_per_gpu for case in SHARED_CASES}
    alone, jobs = chosen()
    assert (alone & shared.keys(), jobs) == (set(), 4)
    for ranks in (2, 4):
        assert chosen("--ranks-per-gpu", str(ranks)) == ({name for name in shared if shared[name] == ranks}, 1)
    assert chosen("--ranks-per-gpu", "2", "--jobs", "3")[1] == 3
    with pytest.raises(SystemExit):
        chosen("--cases", next(iter(shared)))


def test_experts_of_fp8_weights_are_whole_blocks_on_every_rank():
    """SGLang refuses others where it makes the weights (`Fp8MoEMethod.create_fp8_moe_weight_`)."""
    block = 128
    for case in CASES:
        if (shape := faithful.ALL_SHAPES[case.shape]).fp8 and case.engine.get("ep_size", 1) == 1:
            assert shape.expert_dim % (block * case.engine.get("tp_size", 1)) == 0, case.name
