"""Cases of several GPUs: four have what eight have, and each case the heads and requests a rank that it is about."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
import rank_cases
import reports
import run_all
from next_token import question
from nodes import MOST_NODES
from run_case import engine_arguments, generate_with
from shared_cases import SHARED_CASES
from workloads import CASES, ON_RANKS, RANKS, UNEQUAL, WORKLOADS

from nsa_backend.benchmarks.checkpoints.faithful import ALL_SHAPES


def heads_of_a_rank(case) -> int:
    ranks = case.engine.get("dp_size", 1)
    return ALL_SHAPES[case.shape].heads * ranks // case.gpus


def test_no_two_cases_have_one_name():
    assert [name for name, times in Counter(case.name for case in CASES).items() if times > 1] == []


def test_four_gpus_have_the_cases_of_eight():
    def seen(cases, word):
        return [
            (
                case.name.replace(word, "all").replace(f"attention {case.gpus}", "attention"),
                case.steps,
                case.decode,
                case.workloads,
            )
            for case in cases
        ]

    assert seen(rank_cases.FOUR_GPU_CASES, "four") == seen(rank_cases.EIGHT_GPU_CASES, "eight")
    assert all(case in CASES for case in rank_cases.CASES_OF_RANKS)


@pytest.mark.parametrize("how", ["tensor parallel", "DP attention 4", "DP attention 2", "8 heads each"])
def test_every_implementation_runs_on_four_gpus(how):
    of_this = [case for case in rank_cases.CASES_OF_RANKS if case.name.startswith(f"four GPUs, {how}")]
    assert {case.decode for case in of_this if case.steps == 3} == {"fa3", "flashmla_sparse", "sparse_decode", "flashmla_kv"}
    heads = {"tensor parallel": 16, "DP attention 4": 64, "DP attention 2": 32, "8 heads each": 8}[how]
    assert {heads_of_a_rank(case) for case in of_this} == {heads}


def test_two_gpus_leave_a_rank_eight_heads_too():
    assert {heads_of_a_rank(case) for case in CASES if case.name.startswith("two GPUs, 8 heads each")} == {8}


def test_no_rank_keeps_requests_waiting():
    """SGLang divides the running requests by the ranks of DP attention."""
    for case in (c for c in rank_cases.CASES_OF_RANKS if "unequal ranks" in c.workloads):
        arguments = engine_arguments(case, "", 12000)
        assert arguments["max_running_requests"] // arguments["dp_size"] >= max(map(max, UNEQUAL))


def test_engines_of_many_gpus_leave_room_for_those_that_start_meanwhile():
    shares: dict[int, set[float]] = {}
    for case in (c for c in CASES if not c.disaggregated):
        ranks = case.gpus * case.ranks_per_gpu
        shares.setdefault(ranks, set()).add(engine_arguments(case, "/checkpoint", 12000)["mem_fraction_static"])
    assert shares == {1: {0.3}, 2: {0.3}, 4: {0.8}, 8: {0.8}}


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

    def test_a_row_says_so_and_has_no_times(self):
        case = SHARED_CASES[0]
        counts = {name: sum(map(len, WORKLOADS[name]())) for name in case.workloads}
        given = {
            name: {key: [0] * n for key in ("accept", "histograms", "cached_tokens", "host_tokens", "storage_tokens")}
            | {"seconds": 9.0}
            for name, n in counts.items()
        }
        row = reports.row_of(case, {"ours": given})
        assert row["ranks_per_gpu"] == 2
        assert "seconds" not in json.dumps(row)
        alone = reports.row_of(replace(case, ranks_per_gpu=1), {"ours": given})
        assert "ranks_per_gpu" not in alone
        assert "seconds" in json.dumps(alone)

    def test_ties_are_asked_of_one_rank_a_gpu(self):
        for case in SHARED_CASES:
            asked = question(case)
            arguments = engine_arguments(asked, "", 12000)
            assert (asked.ranks_per_gpu, arguments["tp_size"], arguments.get("dp_size")) == (1, case.gpus, None)
            assert (asked.checkpoint, asked.decode) == (case.checkpoint, case.decode)
            assert arguments["kv_cache_dtype"] == engine_arguments(case, "", 12000)["kv_cache_dtype"]
