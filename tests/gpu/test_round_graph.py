"""Graphs inside graphs, and results in pinned memory, as whole rounds use them."""

from __future__ import annotations

import pytest
import torch

from nsa_backend.kernels.round_tensors import RoundInputs
from nsa_backend.round_graph.child_graphs import KeptGraph, kept_graphs
from nsa_backend.round_graph.graphs import RING_DEPTH, GraphRecorder, RoundGraphs, RoundOutputs

pytestmark = pytest.mark.gpu

D = 4
SIZES = [1, 2, 8]


class Parts:
    """Three graphs, captured as SGLang captures its own: in one pool, with static inputs that others fill."""

    def __init__(self, size: int, pool):
        self.pool = pool
        self.draft_in = torch.zeros(size, dtype=torch.int64, device="cuda")
        self.verify_in = torch.zeros(size, D, dtype=torch.int64, device="cuda")
        self.drafts = torch.arange(D, device="cuda")
        self.draft, self.draft_out = self.captured(lambda: self.draft_in[:, None] * 3 + self.drafts)
        self.verify, self.verify_out = self.captured(lambda: (self.verify_in.cumsum(1) % 1009).int())

    def captured(self, function):
        function()  # warm-up
        torch.cuda.synchronize()
        with kept_graphs():
            graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            out = function()
        return graph, out

    def round(self, table: torch.Tensor, inputs: RoundInputs) -> RoundOutputs:
        """Pieces between the graphs allocate, as SGLang's do."""
        self.draft_in.copy_(table[inputs.req_pool_indices] + inputs.seq_lens)
        self.draft.replay()
        self.verify_in.copy_(self.draft_out * 7 + 1)
        self.verify.replay()
        accept = (self.verify_out.sum(1) % D + 1).int()
        table[inputs.req_pool_indices] += accept
        return RoundOutputs(self.verify_out.flatten(), accept, None)


@pytest.mark.usefixtures("side_stream")
def test_one_recorder_captures_again_when_nothing_is_left_of_what_it_captured():
    """As rounds do when SGLang has captured its own graphs anew."""
    recorder, source = GraphRecorder(), torch.arange(8, device="cuda")

    def twice():
        return (source + 1) * 2

    def more():
        return source + 5

    eager = twice(), more()
    for _ in range(3):
        captured = [recorder.record(function) for function in (twice, more)]
        for (replay, found), right in zip(captured, eager, strict=True):
            found.zero_()
            replay()
            assert torch.equal(found, right)
        captured.clear()
        del replay, found


@pytest.mark.usefixtures("side_stream")
def test_rounds_of_every_size_against_the_same_pieces_run_eagerly():
    pool = torch.cuda.graph_pool_handle()
    parts = {size: Parts(size, pool) for size in SIZES}
    table, eager_table = (torch.arange(32, device="cuda") for _ in range(2))
    graphs = RoundGraphs(SIZES, D, "cuda", GraphRecorder())
    graphs.warm_up(run := lambda inputs: parts[len(inputs.seq_lens)].round(table, inputs))
    assert list(graphs.capture(run)) == SIZES[::-1]
    table.copy_(eager_table)
    generator = torch.Generator().manual_seed(0)
    pending = []
    for number in range(3 * RING_DEPTH):
        requests = int(torch.randint(1, SIZES[-1] + 1, (), generator=generator))
        rows = torch.randperm(31, generator=generator)[:requests].add_(1).cuda()
        lens = torch.randint(1, 10_000, (requests,), generator=generator).cuda()
        pending.append((graphs.replay(RoundInputs(rows, lens)), expected(eager_table, rows, lens)))
        if number % 2:  # results are read up to two rounds later, as under the overlap scheduler
            torch.cuda.synchronize()
            for results, (tokens, accept) in pending:
                assert torch.equal(results.next_token_ids, tokens.cpu())
                assert torch.equal(results.accept_lens, accept.cpu())
            pending.clear()
    assert torch.equal(table[1:], eager_table[1:])  # row 0 is padding's


def expected(table: torch.Tensor, rows: torch.Tensor, lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same round in plain PyTorch; advances `table`."""
    drafts = (table[rows] + lens)[:, None] * 3 + torch.arange(D, device="cuda")
    tokens = ((drafts * 7 + 1).cumsum(1) % 1009).int()
    accept = (tokens.sum(1) % D + 1).int()
    table[rows] += accept
    return tokens.flatten(), accept


@pytest.mark.usefixtures("side_stream")
def test_a_kept_graph_replays_by_itself_too():
    value = torch.ones(4, device="cuda")
    graph = KeptGraph()
    with torch.cuda.graph(graph):
        value += 1
    graph.replay()
    graph.replay()
    assert value.tolist() == [3.0] * 4


@pytest.mark.usefixtures("side_stream")
def test_a_graph_that_was_not_kept_says_so():
    value = torch.ones(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value += 1
    with pytest.raises(RuntimeError):
        GraphRecorder().record(graph.replay)
    torch.cuda.synchronize()


@pytest.mark.usefixtures("side_stream")
@pytest.mark.parametrize("fails", ["in CUDA", "beside it", "for want of memory"])
def test_a_capture_that_fails_leaves_torch_as_it_was(fails):
    """Random numbers go on, blocks that another stream has used come back, and other graphs are captured and replayed."""
    recorder, value = GraphRecorder(), torch.ones(4, device="cuda")
    earlier, _ = recorder.record(lambda: value.add_(1))

    def failing():
        torch.zeros(2**20, device="cuda").add_(1)
        if fails == "in CUDA":
            return value.sum().item()
        if fails == "for want of memory":
            return torch.empty(2**50, dtype=torch.uint8, device="cuda")
        raise ValueError(fails)

    with pytest.raises((RuntimeError, ValueError)):
        recorder.record(failing)
    torch.cuda.synchronize()
    assert len(set(torch.rand(64, device="cuda").tolist())) > 60
    before, other = torch.cuda.memory_allocated(), torch.cuda.Stream()
    for _ in range(3):
        block = torch.zeros(2**20, device="cuda")
        block.record_stream(other)
        del block
        torch.cuda.synchronize()
    torch.zeros(1, device="cuda")
    assert torch.cuda.memory_allocated() <= before
    later, _ = recorder.record(lambda: value.mul_(2))
    value.fill_(1)
    earlier()
    later()
    assert value.tolist() == [4.0] * 4


@pytest.mark.usefixtures("side_stream")
def test_log_probabilities_of_a_round():
    """What a log-softmax in the graph leaves, read in host memory after the next round."""
    vocabulary = 1009
    logits = torch.randn(64, vocabulary, device="cuda") * 4

    def whole(inputs: RoundInputs) -> RoundOutputs:
        rows = ((inputs.req_pool_indices[:, None] * D + torch.arange(D, device="cuda")) % len(logits)).flatten()
        tokens = (inputs.seq_lens.repeat_interleave(D) + rows) % vocabulary
        told = torch.log_softmax(logits[rows], -1).gather(1, tokens[:, None]).flatten()
        return RoundOutputs(tokens.int(), torch.ones_like(inputs.seq_lens, dtype=torch.int32), None, told)

    graphs = RoundGraphs(SIZES, D, "cuda", GraphRecorder(), logprobs=True)
    graphs.warm_up(whole)
    assert list(graphs.capture(whole)) == SIZES[::-1]
    generator = torch.Generator().manual_seed(1)
    pending = []
    for _ in range(2 * RING_DEPTH):
        requests = int(torch.randint(1, SIZES[-1] + 1, (), generator=generator))
        batch = RoundInputs(*(torch.randint(1, 1000, (requests,), generator=generator).cuda() for _ in range(2)))
        pending.append((graphs.replay(batch), whole(batch)))
        if len(pending) > 1:
            results, right = pending.pop(0)
            torch.cuda.synchronize()
            assert results.logprobs.shape == (len(right.accept_lens), D)
            assert results.logprobs.device.type == "cpu"
            torch.testing.assert_close(results.logprobs.flatten(), right.logprobs.cpu(), rtol=0, atol=1e-5)
            assert torch.equal(results.next_token_ids, right.next_token_ids.cpu())
