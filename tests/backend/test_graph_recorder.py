"""When the recorder of whole rounds takes another memory pool; stand-ins count a pool's graphs as torch's allocator does."""

from __future__ import annotations

from collections import Counter
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from nsa_backend.round_graph.graphs import GraphRecorder


@pytest.fixture
def users(monkeypatch) -> Counter:
    """Graphs by pool. A pool that had some and has none is given up: c10/cuda/CUDACachingAllocator.cpp asserts that."""
    users: Counter = Counter()

    class Graph:
        pool = None

        def capture_begin(self, pool, capture_error_mode):
            if pool in users and not users[pool]:
                raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
            self.pool = pool
            users[pool] += 1

        def capture_end(self):
            pass

        def replay(self):
            pass

        def __del__(self):
            if self.pool is not None:
                users[self.pool] -= 1

    numbers = count()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(numbers)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    return users


def test_graphs_share_a_pool(users):
    recorder = GraphRecorder()
    kept = [recorder.record(dict) for _ in range(3)]
    assert list(users.values()) == [3]
    del kept[0]
    kept.append(recorder.record(dict))
    assert list(users.values()) == [3]


def test_once_no_graph_is_left_another_pool_is_taken(users):
    recorder = GraphRecorder()
    for _ in range(3):
        kept = [recorder.record(dict) for _ in range(2)]
        assert users.total() == 2
        kept.clear()
    assert len(users) == 3
    assert users.total() == 0


def test_the_pool_of_a_capture_that_broke_is_not_used_again(users):
    def broken():
        raise ValueError("no such kernel")

    recorder = GraphRecorder()
    with pytest.raises(ValueError, match="no such kernel"):
        recorder.record(broken)
    kept = recorder.record(dict)
    assert list(users.values()) == [0, 1]
    del kept
