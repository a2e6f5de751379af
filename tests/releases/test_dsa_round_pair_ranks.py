"""Ranks of DP attention on the decode server of a pair: SGLang's own turn of its scheduler, exchange and worker on each.

Requests arrive from the prefill server when their KV does, so that ranks get them in turns that are not the same, and are idle
while the KV of all their requests is under way.
"""

from __future__ import annotations

import copy
import inspect
import random
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from fake_gpu import fake_gpu, gpu
from graphs_on_fake_gpu import HIDDEN, SELECTED
from ranks_on_fake_gpu import RANKS, FakeRank, PlainRequest, captures_on_fake_gpu, exchanged, started
from round_sides import of_a_pair
from sglang.srt.arg_groups import overrides
from sglang.srt.disaggregation import decode
from sglang.srt.layers import logits_processor
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative import eagle_disaggregation

from nsa_backend.adapters.dsa.rounds.served import Kind

SIZES = [1, 2, 3, 4, 8]
TURNS = 30


@pytest.fixture(autouse=True)
def on_gpus(monkeypatch):
    of_a_pair(monkeypatch)
    monkeypatch.setattr(eagle_disaggregation, "async_h2d_stack", lambda rows, device: torch.stack(rows).to(device))
    monkeypatch.setattr(decode, "set_schedule_time_batch", lambda batch: None)
    with fake_gpu(), captures_on_fake_gpu():
        yield


class Sampling(SimpleNamespace):
    """Greedy, of however many requests."""

    def merge_batch(self, other: Sampling) -> None: ...

    def filter_batch(self, kept: list[int], kept_device: torch.Tensor) -> None: ...


class DecodeRank(FakeRank):
    """A rank with what SGLang's scheduler of a decode server has for a turn."""

    def __init__(self, num_steps: int, *, one_graph: bool):
        super().__init__(num_steps, SIZES, one_graph=one_graph)
        self.fake._model.is_encoder_decoder = False
        self.running, self.asked = ScheduleBatch(reqs=[]), 0
        self.scheduler = mock.Mock(
            chunked_req=None,
            enable_hisparse=False,
            enable_skip_finishing_decode=False,  # the ordinary loop alone turns it on
            decode_offload_manager=None,
            result_queue=[],
            metrics_reporter=SimpleNamespace(enable_metrics=False),
            new_token_ratio_tracker=mock.Mock(current=0.5),
        )
        self.scheduler.token_to_kv_pool_allocator.available_size.return_value = 0
        self.scheduler.tree_cache.req_to_token_pool = SimpleNamespace()
        self.scheduler.dp_attn_adapter.maybe_prepare_mlp_sync_batch = self._told
        for name in ("update_running_batch", "_reqs_finishing_inflight"):
            setattr(self.scheduler, name, lambda *args, name=name: getattr(Scheduler, name)(self.scheduler, *args))

    def _told(self, batch: ScheduleBatch | None) -> ScheduleBatch | None:
        """Where the ranks tell one another what they have; `exchanged` does it for all of them."""
        self.asked += 1
        return batch

    def arrived(self, requests: int, *, with_selection: bool = False) -> ScheduleBatch | None:
        """The batch of requests whose KV has arrived, as SGLang builds it."""
        if not requests:
            return None
        batch = self.decode(requests, forward_mode=ForwardMode.PREBUILT, spec_info=None)
        batch.sampling_info = Sampling(**vars(batch.sampling_info))
        batch.seq_lens, batch.orig_seq_lens = gpu(requests), gpu(requests)
        batch.req_pool_indices_cpu = torch.zeros(requests, dtype=torch.int64)
        batch.reqs = [
            PlainRequest(
                rid="request",
                seqlen=9,
                done=False,
                return_hidden_states_mode=CaptureHiddenMode.NULL,
                output_topk_p=[1.0],
                output_topk_index=[3],
                hidden_states_tensor=torch.zeros(HIDDEN),
                output_dsa_topk_indices=torch.zeros(SELECTED, dtype=torch.int32) if with_selection else None,
            )
            for _ in range(requests)
        ]
        for req in batch.reqs:
            req.finished = lambda req=req: req.done
        with mock.patch.object(torch.Tensor, "item", return_value=False):  # SGLang looks whether a selection is empty
            batch.spec_info = eagle_disaggregation.build_eagle_disagg_draft_input(batch, gpu(requests), self.future_map)
        return batch

    def turn(self, arrived: ScheduleBatch | None, *, retracted: int = 0) -> ScheduleBatch | None:
        """The batch that SGLang's scheduler comes to before the ranks tell one another, from its own functions."""

        def retract(batch: ScheduleBatch) -> tuple[list, float, list]:
            gone = batch.reqs[:retracted]
            batch.filter_batch(keep_indices=list(range(retracted, len(batch.reqs))))
            return gone, 0.5, []

        self.scheduler.get_new_prebuilt_batch = lambda running: arrived
        with (
            mock.patch.object(ScheduleBatch, "check_decode_mem", return_value=not retracted),
            mock.patch.object(ScheduleBatch, "retract_decode", retract),
            mock.patch.object(
                ScheduleBatch, "prepare_for_decode", lambda batch: setattr(batch, "forward_mode", ForwardMode.DECODE)
            ),
        ):
            plan = inspect.unwrap(decode.SchedulerDisaggregationDecodeMixin.get_next_disagg_decode_batch_to_run)(
                self.scheduler, running_batch=self.running
            )
        self.running = plan.running_batch
        return plan.batch_to_run

    def round(self, batch: ScheduleBatch) -> list[tuple[str, int]]:
        """What is replayed for a batch; the scheduler keeps of it what the forward leaves for the next one."""
        replayed = self.run(copy.copy(batch))
        batch.spec_info = self.result.next_draft_input
        batch.spec_info.future_indices = batch.req_pool_indices
        return replayed


def script(seed: int) -> list[tuple[list[int], list[int], list[int]]]:
    """Turn by turn and rank by rank: requests that arrive, that end, and that are taken back for want of memory."""
    drawn, there, turns = random.Random(seed), [0] * RANKS, []
    for _ in range(TURNS):
        arriving, ending, retracted = [], [], []
        for rank in range(RANKS):
            ends = drawn.choice((0, 0, 0, 1, there[rank])) if there[rank] else 0
            arrives = drawn.choice((0, 0, 0, 1, 2, 5))
            arrives = min(arrives, SIZES[-1] - there[rank] + ends)
            left = there[rank] - ends + arrives
            back = left - 1 if left > 1 and drawn.random() < 0.1 else 0
            there[rank] = left - back
            for column, number in ((arriving, arrives), (ending, ends), (retracted, back)):
                column.append(number)
        turns.append((arriving, ending, retracted))
    return turns


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("num_steps", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_every_turn_has_one_exchange_and_the_same_graphs_on_every_rank(num_steps, seed):
    """Whether a rank has requests, none, or only some whose KV is under way, and whether its rounds are one graph or three."""
    three, one = (started([DecodeRank(num_steps, one_graph=one) for _ in range(RANKS)]) for one in (False, True))
    expected, idle = [0] * RANKS, 0
    for arriving, ending, retracted in script(seed):
        replayed = []
        for ranks in (three, one):
            before, batches = [rank.asked for rank in ranks], []
            for rank, arrives, ends, back in zip(ranks, arriving, ending, retracted, strict=True):
                for req in rank.running.reqs[:ends]:
                    req.done = True
                batches.append(rank.turn(rank.arrived(arrives), retracted=back))
            assert [rank.asked for rank in ranks] == [asked + 1 for asked in before]
            found = exchanged(ranks, batches)
            assert [batch is None for batch in found] == [not any(batches)] * RANKS
            replayed += [rank.round(batch) for rank, batch in zip(ranks, found, strict=True) if batch]
        assert replayed == replayed[:1] * len(replayed)
        for rank, batch in enumerate(found):
            if batch:
                expected[rank] += 1
                idle += batch.forward_mode.is_idle()
    assert idle > 5
    assert [rank.graphs.rounds for rank in three] == [0] * RANKS
    assert [rank.graphs.rounds for rank in one] == expected


def test_no_rank_has_a_graph_of_drafts_while_one_has_a_request_without_its_selection(monkeypatch):
    """GLM-5.2's drafts attend with a selection that the prefill server sends; SGLang's warm-up requests bring none."""
    monkeypatch.setattr(eagle_disaggregation, "get_dsa_seed_metadata_dim", lambda config: SELECTED)
    ranks = started([DecodeRank(3, one_graph=True) for _ in range(RANKS)])
    greedy, none = [Kind()] * RANKS, [None] * RANKS
    for with_selection, able, taken in ((True, True, greedy), (False, False, none), (True, False, none)):
        turns = [rank.turn(rank.arrived(1, with_selection=with_selection or rank is ranks[0])) for rank in ranks]
        batches = exchanged(ranks, turns)
        assert [batch.can_run_dp_draft_cuda_graph for batch in batches] == [able] * RANKS
        assert [rank.takes(copy.copy(batch)) for rank, batch in zip(ranks, batches, strict=True)] == taken


@pytest.mark.parametrize(("mode", "exchanged_in_graphs"), [("decode", True), ("prefill", False), ("null", False)])
def test_a_decode_server_exchanges_logits_where_others_gather_them(arguments, mode, exchanged_in_graphs):
    """SGLang's default with one GPU a rank; ranks speak of their logits within its graphs either way."""
    server = arguments(disaggregation_mode=mode, attn_dp_size=2, tp_size=2, attn_cp_size=1, enable_dp_lm_head=False)
    server.enable_tp_lm_head_all_to_all = None
    assert overrides._tp_lm_head_all_to_all_default(server) == {"enable_tp_lm_head_all_to_all": exchanged_in_graphs}


@pytest.mark.parametrize(("counts", "every_rank"), [(None, True), ([6, 6], True), ([6, 2], False), ([6, 0], False)], ids=str)
def test_ranks_choose_alike_how_they_exchange_logits(counts, every_rank):
    """In a captured forward, which has no counts on the host, and by the counts of all ranks outside graphs."""
    processor = object.__new__(logits_processor.LogitsProcessor)
    processor.__dict__["use_tp_lm_head_all_to_all"] = True
    metadata = SimpleNamespace(global_num_tokens_for_logprob_cpu=counts, global_num_tokens_for_logprob_gpu=gpu(RANKS))
    chosen = []
    for rank in range(RANKS):
        rows = 6 if counts is None else counts[rank]
        logits = gpu(RANKS * 6 if counts is None else sum(counts), 5)
        group = mock.Mock(world_size=RANKS)
        with get_parallel().override(tp_size=RANKS, attn_dp_size=RANKS, moe_tp_size=RANKS, tp_group=group):
            head = SimpleNamespace(tp_size=RANKS)
            chosen.append(processor._can_use_tp_lm_head_all_to_all(logits, gpu(rows, 4), head, metadata))
    assert chosen == [every_rank] * RANKS
