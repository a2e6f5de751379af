"""Which DP rank of a prefill and of a decode server a request of the end-to-end client gets, by SGLang's own functions."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common import conn
from sglang.srt.disaggregation.decode import DecodePreallocQueue
from sglang.srt.managers import data_parallel_controller
from sglang.srt.runtime_context import get_parallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from pd_servers import in_rooms
from waves import RANK

RANKS = 2
BODIES = [in_rooms({"input_ids": [2, 3]}, 8998) for _ in range(40)]


@pytest.fixture
def requests():
    return [SimpleNamespace(routed_dp_rank=body.get(RANK), disagg_prefill_dp_rank=None, **body) for body in BODIES]


def dispatched(monkeypatch, method: str, requests: list) -> list[int]:
    """The rank that each gets from the controller of a server that balances so."""
    ranks = []
    monkeypatch.setattr(data_parallel_controller, "sock_send", lambda rank, request: ranks.append(rank))
    controller = object.__new__(data_parallel_controller.DataParallelController)
    controller.workers, controller._active_workers = list(range(RANKS)), list(range(RANKS))
    controller.status, controller.round_robin_counter = [True] * RANKS, 0
    for request in requests:
        getattr(controller, method)(request)
    return ranks


def test_the_decode_server_looks_for_kv_on_the_rank_that_the_prefill_server_chose(monkeypatch, requests):
    found = SimpleNamespace(dp_size=RANKS, follow_bootstrap_room=True)
    manager = SimpleNamespace(prefill_info_table={"127.0.0.1:8998": found})
    chosen = dispatched(monkeypatch, "follow_bootstrap_room_scheduler", requests)
    queue = SimpleNamespace(kv_manager=manager)
    assert [DecodePreallocQueue._resolve_prefill_dp_rank(queue, request) for request in requests] == chosen
    assert set(chosen) == set(range(RANKS))  # rooms are drawn


def test_a_decode_server_takes_turns_and_takes_the_rank_that_is_asked_for(monkeypatch, requests):
    assert dispatched(monkeypatch, "round_robin_scheduler", requests) == [0, 1] * 20
    for request in requests:
        request.routed_dp_rank = 1
    assert dispatched(monkeypatch, "round_robin_scheduler", requests) == [1] * 40


@pytest.mark.parametrize("of_the_room", [True, False])
def test_a_prefill_server_refuses_a_request_that_asks_for_another_rank_than_its_room_s(of_the_room):
    room = BODIES[0]["bootstrap_room"]
    rank = room % RANKS if of_the_room else 1 - room % RANKS
    manager = mock.Mock(attn_dp_rank=rank, is_dummy_cp_rank=False, sender_trace_module=None, deferred_bootstrap=None)
    topology = {"tp_size": RANKS, "attn_dp_size": RANKS, "moe_tp_size": RANKS, "tp_group": mock.Mock(world_size=RANKS)}
    balancing = {"num_dp_ranks": RANKS, "load_balance_method": "follow_bootstrap_room"}
    sender = type("Sender", (conn.CommonKVSender,), dict.fromkeys(conn.CommonKVSender.__abstractmethods__))
    with get_parallel().override(**topology, **balancing):
        sender(manager, "127.0.0.1:8998", room)
    states = [call.args[1] for call in manager.update_status.call_args_list]
    assert states == [KVPoll.Bootstrapping] + ([] if of_the_room else [KVPoll.Failed])
    assert manager.record_failure.called is not of_the_room
