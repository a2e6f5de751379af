"""Rounds of short requests have graphs of their own, with SGLang's verify of short ones as a child, and leave the same."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
from fake_gpu import fake_gpu
from hypothesis import given
from hypothesis import strategies as st
from properties import tried
from ranks_on_fake_gpu import FakeRank, captures_on_fake_gpu, exchanged, started
from round_sides import Side, same
from round_stand_in import SIZES, D, StandInWorker, decode_batch, finished_prefill
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache import allocation_sizing
from sglang.srt.speculative import eagle_utils

from nsa_backend.adapters.dsa.layer_front import short
from nsa_backend.adapters.dsa.layer_front.short import RoundVariants
from nsa_backend.adapters.dsa.rounds import capture
from nsa_backend.adapters.dsa.rounds.served import KINDS

pytestmark = pytest.mark.usefixtures("sampled_rounds")
TOPK = 2048
SHORT_SIZES = SIZES[:-1]
LONGEST = TOPK - 2 * D
"""Tokens of a request that may have D more when its round begins, and verifies D."""


class Worker(StandInWorker):
    """Whose target has captured both kinds, and that says which its verify takes."""

    def __init__(self):
        super().__init__()
        self.capture_both()
        self.taken: list[str] = []

    def capture_both(self) -> None:
        runner = self.target_worker.model_runner.decode_cuda_graph_runner
        runner.attention_graph_variants = variants = RoundVariants(TOPK, SHORT_SIZES[-1])
        variants.largest = SHORT_SIZES[-1]

    def capture_anew(self) -> None:
        super().capture_anew()
        self.capture_both()

    def forward_batch_generation(self, batch, on_publish=None):
        runner = self.target_worker.model_runner.decode_cuda_graph_runner
        self.taken.append(runner.attention_graph_variants.select(SimpleNamespace(seq_lens_cpu=None, seq_lens=batch.seq_lens)))
        return super().forward_batch_generation(batch, on_publish)


@pytest.fixture(scope="module", autouse=True)
def reserve():
    """What SGLang gives a request slots for: twice what a round may write, as the host is a round behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(allocation_sizing, "get_alloc_len_per_decode", lambda: D)
        yield


def two_sides() -> tuple[Side, Side]:
    sides = Side(False, Worker), Side(True, Worker)
    for side in sides:
        finished_prefill(side.future_map, seed=7)
    return sides


def batch_of(lengths: list[int], *, greedy: bool):
    batch = decode_batch(list(range(1, len(lengths) + 1)), greedy=greedy)()
    for request, tokens in zip(batch.reqs, lengths, strict=True):
        request.kv = ReqKvInfo(kv_committed_len=tokens, kv_allocated_len=tokens)
    return batch


LENGTHS = st.lists(st.sampled_from([1, 300, LONGEST - 1, LONGEST, LONGEST + 1, TOPK, 9000]), min_size=1, max_size=SIZES[-1] + 2)


@given(batches=st.lists(st.tuples(LENGTHS, st.booleans()), min_size=1, max_size=6))
@tried(40)
def test_a_round_takes_the_short_graph_where_no_row_can_have_more_tokens(batches):
    theirs, ours = two_sides()
    ours.start()
    for lengths, greedy in batches:
        ours.worker.taken.clear()
        results = [side.run(batch_of(lengths, greedy=greedy)) for side in (theirs, ours)]
        same(results[1], results[0], len(lengths))
        captured = len(lengths) <= SHORT_SIZES[-1]
        assert ours.worker.taken == ["dense" if captured and max(lengths) <= LONGEST else "sparse"]
    assert set(theirs.worker.taken) == {"sparse"}


def test_short_rounds_count_among_their_kind_and_are_captured_again():
    _, ours = two_sides()
    ours.run(batch_of([5, 9], greedy=True))
    ours.run(batch_of([5, 9000], greedy=True))
    counts = {"greedy requests": 2, "short greedy requests": 1, "sampled requests": 0, "short sampled requests": 0}
    assert ours.worker.rounds.replays() == counts
    ours.exchange()
    ours.worker.taken.clear()
    ours.run(batch_of([5, 9], greedy=False))
    assert ours.worker.taken == ["dense"]


def test_without_short_graphs_of_verify_there_are_no_short_rounds():
    ours = Side(True)
    finished_prefill(ours.future_map, seed=7)
    ours.run(batch_of([5, 9], greedy=True))
    assert not [kind for kind in ours.worker.rounds.replays() if "short" in kind]


@pytest.mark.parametrize("failing", [False, True])
def test_what_memory_does_not_allow_is_served_by_the_graphs_of_any_length(monkeypatch, caplog, failing):
    caplog.set_level("INFO", "nsa_backend")
    theirs, ours = two_sides()
    attempt = capture.Capture._attempt

    def attempted(self, kind, *arguments):
        if not kind.short:
            return attempt(self, kind, *arguments)
        return None, capture.Outcome.FAILED if failing else capture.Outcome.TOO_MUCH, "because"

    monkeypatch.setattr(capture.Capture, "_attempt", attempted)
    batch = [5, 9]
    same(ours.run(batch_of(batch, greedy=True)), theirs.run(batch_of(batch, greedy=True)), 2)
    assert ours.replays == 1
    said = [message for message in caplog.messages if "short greedy requests are graphs for requests of any length" in message]
    assert len(said) == 1
    assert ("capture failed" in said[0]) == failing
    assert ("NSA_BACKEND_SHORT_GRAPHS=1" in said[0]) == (not failing)


def test_sglangs_own_worker_on_ranks_of_dp_attention_each_of_which_chooses_for_itself():
    """All replay graphs of the same sizes, whatever their requests' lengths; a rank without requests the usual one."""

    def decode(rank: FakeRank, lengths: list[int]):
        batch = rank.decode(len(lengths))
        for request, tokens in zip(batch.reqs if batch else [], lengths, strict=True):
            request.kv = ReqKvInfo(kv_committed_len=tokens, kv_allocated_len=tokens)
        return batch

    with fake_gpu(), captures_on_fake_gpu():
        ranks = [FakeRank(3, [1, 2, 4, 8], one_graph=True) for _ in range(2)]
        for rank in ranks:
            runner = rank.worker.target_worker.model_runner.decode_cuda_graph_runner
            runner.attention_graph_variants = RoundVariants(TOPK, 4)
            runner.attention_graph_variants.largest = 4
        started(ranks)
        for lengths, size, taken in (
            (([9], [9000, 9]), 2, ("dense", "sparse")),
            (([9], []), 1, ("dense", "sparse")),
            (([LONGEST] * 3, [5]), 4, ("dense", "dense")),
            (([9], [9] * 5), 8, ("sparse", "sparse")),
        ):
            batches = exchanged(ranks, [decode(rank, each) for rank, each in zip(ranks, lengths, strict=True)])
            replayed = [rank.run(batch) for rank, batch in zip(ranks, batches, strict=True)]
            graphs = [("draft", size), ("{} verify", size), ("draft-extend", size)]
            assert replayed == [[(name.format(kind), n) for name, n in graphs] for kind in taken]
    assert [rank.graphs.rounds for rank in ranks] == [4, 4]


def test_short_kinds_come_last():
    assert [kind.short for kind in KINDS] == [False] * 4 + [True] * 4


def test_sglang_reserves_slots_as_far_as_rows_of_the_next_round_may_reach():
    """And counts what its results say of a round: the length of a request that the host is sure of."""
    source = inspect.getsource(eagle_utils.eagle_prepare_for_decode)
    assert "double_alloc = get_alloc_reserve_per_decode()" in source
    assert "absorbs the kv_committed_len lag in overlap" in inspect.getsource(allocation_sizing.get_alloc_reserve_per_decode)
    assert allocation_sizing.get_alloc_reserve_per_decode() == 2 * D


def test_sglangs_runner_chooses_by_select():
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    runner, choose = SimpleNamespace(), DecodeCudaGraphRunner._resolve_attention_variant
    runner.attention_graph_variants = variants = RoundVariants(TOPK, 64)
    assert choose(runner, None, 4) == "sparse"
    with variants.of_a_short_round():
        assert choose(runner, None, 4) == "dense"


@pytest.mark.parametrize(("switch", "sizes"), [(None, [64, 8]), ("1", [128, 64, 8])])
def test_sizes_that_sglangs_runner_captures_twice(monkeypatch, caplog, switch, sizes):
    """Unasked, those of few requests; decode without drafts then takes the usual graph for more."""
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner as module

    caplog.set_level("INFO", "nsa_backend")
    hooked, captured = {}, []
    monkeypatch.setattr(module, "create_attention_graph_variants", None)
    monkeypatch.setattr(short, "hook", lambda target, function, kind: hooked.update({target: function}))
    monkeypatch.setenv(short.SWITCH, switch) if switch else monkeypatch.delenv(short.SWITCH, raising=False)
    short.offer(TOPK, drafts=False)
    ((target, around),) = hooked.items()
    assert target == f"{module.__name__}.DecodeCudaGraphRunner.capture_one_shape"

    def keep(runner, size, forward, stream_idx, variant_label, attention_variant):
        captured.append((size, attention_variant))

    monkeypatch.setattr(module.DecodeCudaGraphRunner, "capture_one_shape", lambda *given: around(keep, *given))
    monkeypatch.setattr(module, "get_available_gpu_memory", lambda *_, **__: 1.0)
    monkeypatch.setattr(module, "get_parallel", lambda: SimpleNamespace(tp_rank=1, tp_group=None))
    runner = object.__new__(module.DecodeCudaGraphRunner)
    runner.model_runner = SimpleNamespace(device="cpu", gpu_id=0, model=SimpleNamespace(forward=None))
    runner.capture_bs, runner.compile_bs, runner.captured_req_width = [8, 64, 128], [], 1
    runner.record_nolora_graph, runner.attention_graph_variants = False, module.create_attention_graph_variants(None)
    runner._capture_one_stream()
    assert captured == [(n, label) for n in (128, 64, 8) for label in ("dense", "sparse") if label == "sparse" or n in sizes]
    (said,) = (message for message in caplog.messages if "of requests within 2048 tokens are captured too" in message)
    assert f"up to {sizes[0]} of them" in said
    for requests, of_ranks in ((8, None), (64, None), (65, None), (8, [8, 64]), (8, [8, 65]), (65, [65, 1])):
        for longest in (TOPK, TOPK + 1):
            batch = SimpleNamespace(batch_size=requests, seq_lens_cpu=torch.tensor([1, longest]))
            batch.original_global_num_tokens_cpu = of_ranks  # ranks of DP attention replay graphs of one size
            fits = max(of_ranks or [requests]) <= sizes[0]
            assert runner.attention_graph_variants.select(batch) == ("dense" if longest == TOPK and fits else "sparse")
