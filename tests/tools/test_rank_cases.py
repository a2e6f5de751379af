"""Cases of several GPUs: four have what eight have, and each case the heads and requests a rank that it is about."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
import rank_cases
import run_all
from nodes import MOST_NODES
from run_case import engine_arguments, generate_with
from shared_cases import SHARED_CASES
from workloads import CASES, ON_RANKS, RANKS, UNEQUAL, WORKLOADS


def test_no_two_cases_have_one_name():
    assert [name for name, times in Counter(case.name for case in CASES).items() if times > 1] == []


def test_no_rank_keeps_requests_waiting():
    """SGLang divides the running requests by the ranks of DP attention."""
    for case in (c for c in rank_cases.CASES_OF_RANKS if "unequal ranks" in c.workloads):
        arguments = engine_arguments(case, "", 12000)
        assert arguments["max_running_requests"] // arguments["dp_size"] >= max(map(max, UNEQUAL))


def test_ranks_fit_their_waves():
    for name, ranks in RANKS.items():
        waves = WORKLOADS[name]()
        assert [len(wave) for wave in waves] == [len(of_wave) for of_wave in ranks]
    assert [[r.count(rank) for rank in (0, 1)] for r in RANKS["unequal ranks"]] == [list(counts) for counts in UNEQUAL]


@pytest.mark.parametrize("sampling", [{"top_k": 1}, [{"top_k": 1}, {}, {"top_k": 3}]], ids=["of all", "of each"])
def test_requests_go_to_their_ranks(sampling):
    asked = []

    async def async_generate(input_ids, sampling_params, routed_dp_rank):
        asked.append((len(input_ids), sampling_params, routed_dp_rank))
        return input_ids

    engine = SimpleNamespace(loop=asyncio.new_event_loop(), async_generate=async_generate)
    assert generate_with(engine)([[1, 2], [3], [4]], sampling, [0, 0, 1]) == [[1, 2], [3], [4]]
    each = sampling if isinstance(sampling, list) else [sampling] * 3
    assert asked == list(zip((2, 1, 1), each, (0, 0, 1), strict=True))
    engine.loop.close()


class TestSharedGPUs:
    def test_they_are_asked_for_by_the_ranks_of_a_gpu(self, monkeypatch, tmp_path):
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

    @pytest.mark.parametrize("case", SHARED_CASES, ids=lambda case: case.name)
    def test_each_is_what_its_name_says(self, case):
        ranks = {"four": 4, "eight": 8}[case.name.split()[0]]
        assert (case.gpus * case.ranks_per_gpu, case.engine["tp_size"]) == (ranks, ranks)
        assert case.ranks_per_gpu <= MOST_NODES
        of_dp = case.name.partition("DP attention ")[2][:1]
        assert str(case.engine.get("dp_size", "")) == of_dp
        assert (case.says, case.says_times) == (
            ("captured whole speculative rounds", ranks) if "one graph" in case.name else ("", 1)
        )
        assert {case.action, case.disaggregated, case.loaded_back} == {""}  # nodes have no engine for any of these
        if "some unequal ranks" in case.workloads:
            most = engine_arguments(case, "", 12000)["max_running_requests"] // case.engine["dp_size"]
            assert most >= max(map(max, ON_RANKS["some unequal ranks"]))
