"""Prefills of few tokens in one graph, on the CPU: a layer of SGLang's, its runner's hooks, and what a replay reads.

That a GPU captures and replays them, a GPU alone can show.
"""

from __future__ import annotations

import dataclasses
import inspect
from types import SimpleNamespace

import pytest
import torch
from layer_on_cpu import ROWS, TOPK, a_layer, in_front, poisoned_pool
from sglang.srt.layers.attention.dsa import dsa_indexer
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from nsa_backend.adapters import decode_context_parallel
from nsa_backend.adapters.dsa.layer_front import options as front_options
from nsa_backend.adapters.dsa.layer_front import prefill_rules, prefills, projections, take
from nsa_backend.adapters.dsa.layer_front.front import LayerFront
from nsa_backend.adapters.dsa.layer_front.prefills import EitherGraph, WholeAttention, WholePrefills, longest, recording
from nsa_backend.adapters.installed import adapter
from nsa_backend.benchmarks.calls import whole_front
from nsa_backend.demo.engine import Engine
from nsa_backend.demo.model import TinySparseMla
from nsa_backend.kernels.plan import PAGE_SIZE
from nsa_backend.releases import LAYER_FRONTS, installed
from nsa_backend.testing.calls import calls

if installed() not in LAYER_FRONTS:
    pytest.skip("no other release has our front", allow_module_level=True)

from sglang.srt.arg_groups.cuda_graph_hook import generate_prefill_cuda_graph_batch_sizes
from sglang.srt.model_executor.runner import prefill_cuda_graph_runner as module
from sglang.srt.model_executor.runner_backend import breakable_cuda_graph_backend
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import enable_breakable_cuda_graph

RUNNER = module.PrefillCudaGraphRunner
SLOTS = torch.tensor([70, 200, 65, 131, 0])


TABLE_WIDTH = 163840


class Backend(whole_front.Backend):
    """Ours, as far as a layer and a runner ask."""

    def __init__(self, pool=None):
        super().__init__(pool)
        device = torch.device("cpu")
        self.config = SimpleNamespace(attention=SimpleNamespace(table_width=TABLE_WIDTH, device=device))
        self.kept: dict[int, tuple] = {}
        self.made: list[str] = []

    def keep_rows(self, width: int, inputs) -> None:
        self.kept[inputs.num_requests] = width, inputs.seq_lens, inputs.req_pool_indices

    def replay_rows(self, rows: int) -> None:
        self.made.append(f"{rows} rows are replayed")

    def at_head_of_rows(self, rows: int) -> None:
        self.made.append(f"metadata of {rows} rows")

    def resolve_prefill_shared_read_ends(self, batch, *, num_qo_tokens: int, build_snapshot: bool):
        return "SGLang's", num_qo_tokens, build_snapshot

    def forward(self, q, k, v, layer, batch, save_kv_cache=True, **mla_args):
        return "attended", layer, mla_args["topk_indices"]


@pytest.fixture(params=[False, True], ids=["deepseek", "glm"])
def layer(request, monkeypatch):
    yield from a_layer(monkeypatch, fused=request.param)


@pytest.mark.parametrize("shared", [False, True], ids=["", "shared"])
def test_a_layer_writes_and_selects_as_in_a_verify_of_the_same_rows(layer, monkeypatch, shared):
    """A layer that takes an earlier selection passes it on."""
    monkeypatch.setattr(projections, "FEW_ROWS", 0)
    chosen = torch.randint(99, (ROWS, TOPK), dtype=torch.int32)
    monkeypatch.setattr(dsa_indexer.Indexer, "_get_topk_paged", lambda *a: chosen)
    selection = chosen.clone() if shared else None
    if shared:
        layer.indexer, layer.skip_topk = None, True
    own, front = layer.forward_absorb_prepare, LayerFront(layer, (Backend,))
    pool, expected_pool = poisoned_pool(), poisoned_pool()
    verify, backend = ForwardMode.TARGET_VERIFY, Backend(pool)
    expected = in_front(layer, monkeypatch, verify, own, Backend(expected_pool), SLOTS, selection)
    with recording(WholePrefills()), enable_breakable_cuda_graph():
        found = in_front(layer, monkeypatch, ForwardMode.EXTEND, front, backend, SLOTS, selection)
    q_rope, k_rope, q_nope, k_nope, *_, topk, _, _ = found
    assert (k_rope, k_nope) == (None, None)
    for one, other in ((q_rope, expected[0]), (q_nope, expected[2]), (pool.index_keys, expected_pool.index_keys)):
        assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
    real = SLOTS != 0
    assert torch.equal(pool.kv[SLOTS[real]], torch.cat([expected[3], expected[1]], -1)[real])
    assert topk.data_ptr() == (selection if shared else chosen).data_ptr()


def test_outside_of_a_recording_a_captured_prefill_is_sglangs(layer, monkeypatch):
    calls = []
    layer.forward_absorb_prepare = lambda *arguments: calls.append(arguments)
    front, backend = LayerFront(layer, (Backend,)), Backend(poisoned_pool())
    with enable_breakable_cuda_graph():
        in_front(layer, monkeypatch, ForwardMode.EXTEND, front, backend, SLOTS)
    assert len(calls) == 1
    with recording(WholePrefills()), enable_breakable_cuda_graph():
        in_front(layer, monkeypatch, ForwardMode.TARGET_VERIFY, front, backend, SLOTS)
    assert len(calls) == 2


def test_attention_is_recorded_in_whole_prefills_alone():
    backend, eager = Backend(), SimpleNamespace(forward=lambda *a, **k: "left the graph")
    attention = WholeAttention(eager)
    query, selected = torch.zeros(1, 2), torch.zeros(1, 4)
    with forward_context(ForwardContext(attn_backend=backend)):
        assert attention(query, None, None, None, topk_indices=selected) == "left the graph"
        with recording(WholePrefills()):
            assert attention(query, query, query, None, topk_indices=selected) == "left the graph"
            assert attention(query, None, None, None, topk_indices=selected) == ("attended", eager, selected)


@pytest.mark.parametrize("first", ["parts", "prefills"])
def test_where_ranks_divide_the_kv_the_attention_of_all_their_heads_is_recorded(monkeypatch, first):
    """Whose log-sum-exp a layer asks for, whichever of the two takes its place was put there first."""
    backend, layer = Backend(), torch.nn.Module()
    backend.forward = lambda q, k, v, layer, batch, save_kv_cache=True, **mla_args: ("recorded", mla_args)
    monkeypatch.setattr(prefills, "hook", lambda *arguments: None)
    layer.attn_mqa, layer.attn_mqa_for_dcp_decode, layer.dcp_size = torch.nn.Module(), torch.nn.Module(), 2
    attend, model = layer.attn_mqa_for_dcp_decode, torch.nn.ModuleList([layer])
    attend.forward = lambda q, k, v, batch, save_kv_cache=True, **mla_args: ("own", mla_args)
    puts = {
        "prefills": lambda: prefills.offer(model, [layer]),
        "parts": lambda: decode_context_parallel.take_context_parts(model),
    }
    for name in sorted(puts, key=lambda name: name != first):
        puts[name]()
    with forward_context(ForwardContext(attn_backend=backend)):
        found = attend(torch.zeros(1, 2), None, None, None, topk_indices="all")
        assert found == ("own", {"topk_indices": "all", "return_lse": True})
        with recording(WholePrefills()):
            assert attend(torch.zeros(1, 2), None, None, None, topk_indices="all")[0] == "recorded"
    assert "forward" not in vars(layer.attn_mqa)


class Graph:
    def __init__(self, name: str, replayed: list[str], segments: int = 1):
        self.replay, self._segments = lambda: replayed.append(name), [None] * segments


def capturing(replayed: list[str], segments_of_whole: int = 1):
    """In place of SGLang's method that captures one size; the pieces of two layers are five."""

    def capture(runner, size, **options):
        whole = prefills.recorded() is not None
        name, key = f"{'whole' if whole else 'pieces'} of {size}", module.ShapeKey(size=size)
        prefills._run(lambda *arguments: None, runner, None, size)
        runner.backend._graphs[key] = Graph(name, replayed, segments_of_whole if whole else 5)
        runner.backend._capture_inputs[key] = f"inputs of {name}"

    return capture


@pytest.fixture
def captured(monkeypatch):
    """(runner whose sizes were captured, what was replayed); of SGLang what our hooks are around."""
    replayed, backend = [], Backend()
    model = torch.nn.Linear(1, 1)
    pool = SimpleNamespace(layer_transfer_counter=None)
    runner = SimpleNamespace(
        model_runner=SimpleNamespace(model=model, attn_backend=backend, token_to_kv_pool=pool),
        backend=SimpleNamespace(_graphs={}, _capture_inputs={}),
        capture_num_tokens=[64, 96, 128, 320, 1280, 8192],
    )
    monkeypatch.setattr(prefills, "hook", lambda *arguments: None)
    prefills.offer(model, [SimpleNamespace(attn_mqa=SimpleNamespace(forward=None), dcp_size=1)])

    def capture_all(runner):
        for size in reversed(runner.capture_num_tokens):
            prefills._capture_size(capturing(replayed), runner, size, prefix_num_chunks=0)

    prefills._capture(capture_all, runner)
    return runner, replayed


def prefill(new: list[int], cached: list[int], mode=ForwardMode.EXTEND, inputs: int | None = None) -> SimpleNamespace:
    """A batch of SGLang's of requests 2, 3, ...; its inputs are padded to as many where ranks have told their sizes."""
    positions = torch.cat([torch.arange(c, c + n) for n, c in zip(new, cached, strict=True)])
    return SimpleNamespace(
        forward_mode=mode,
        seq_lens_cpu=torch.tensor(new) + torch.tensor(cached),
        extend_seq_lens=torch.tensor(new, dtype=torch.int32),
        extend_seq_lens_cpu=new,
        req_pool_indices=torch.arange(2, 2 + len(new)),
        positions=torch.nn.functional.pad(positions, (0, (inputs or sum(new)) - sum(new))),
        input_ids=torch.zeros(inputs or sum(new)),
    )


def replay(runner, batch: SimpleNamespace):
    """As SGLang's `load_batch` and `replay` go: (what the hook around metadata answers, the captured size)."""
    load = lambda runner, batch: RUNNER._pad_to_bucket(len(batch.input_ids), runner.capture_num_tokens)  # noqa: E731
    key = module.ShapeKey(size=prefills._load(load, runner, batch))
    found = prefills._before_replay(lambda *arguments: "of pieces", runner, batch, None, key)
    runner.backend._graphs[key].replay()
    return found, key.size


def test_few_rows_replay_the_whole_graph_and_are_requests_of_their_own(captured):
    runner, replayed = captured
    backend = runner.model_runner.attn_backend
    assert {key.size: type(graph) for key, graph in runner.backend._graphs.items()} == {
        8192: Graph, 1280: Graph, 320: EitherGraph, 128: EitherGraph, 96: Graph, 64: EitherGraph,
    }  # fmt: skip
    assert backend.made == [f"metadata of {size} rows" for size in (320, 128, 64)]
    assert {size: width for size, (width, *_) in backend.kept.items()} == {320: 52416, 128: 131072, 64: TABLE_WIDTH}
    kept = {
        key.size: (runner.backend._graphs[key].inputs, inputs)
        for key, inputs in runner.backend._capture_inputs.items()
        if key.size in (320, 128, 64)
    }
    assert kept == {size: (f"inputs of pieces of {size}", f"inputs of whole of {size}") for size in (320, 128, 64)}

    def reads(size: int) -> tuple[list[int], list[int]]:
        _, lens, requests = backend.kept[size]
        return lens.tolist(), requests.tolist()

    assert replay(runner, prefill([300], [50_000])) == (("SGLang's", 320, True), 320)
    assert reads(320) == ([*range(50_001, 50_301), *[1] * 20], [*[2] * 300, *[0] * 20])
    assert replay(runner, prefill([3, 60], [2045, 10]))[1] == 64
    assert reads(64) == ([2046, 2047, 2048, *range(11, 71), 1], [2, 2, 2, *[3] * 60, 0])
    assert replay(runner, prefill([40], [0], inputs=64))[1] == 64
    assert reads(64) == ([*range(1, 41), *[1] * 24], [*[2] * 40, *[0] * 24])
    assert replayed == ["whole of 320", "whole of 64", "whole of 64"]
    assert backend.made[3:] == [f"{size} rows are replayed" for size in (320, 64, 64)]


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (prefill([300], [52_117]), 320),
        (prefill([10, 290], [60_000, 0]), 320),
        (prefill([70], [TABLE_WIDTH]), 96),
        (prefill([40], [0], ForwardMode.MIXED), 64),
        (prefill([1100], [0]), 1280),
        (prefill([3000], [0]), 8192),
    ],
)
def test_a_prefill_of_a_longer_request_of_more_rows_or_with_decoding_ones_is_in_pieces(captured, batch, size):
    """At SGLang's own sizes."""
    runner, replayed = captured
    replay(runner, prefill([40], [0]))
    assert replay(runner, batch) == ("of pieces", size)
    assert [name.replace("pieces of ", "") for name in replayed] == ["whole of 64", str(size)]


def test_scores_have_a_bound_and_whole_pages():
    for size in range(4, prefill_rules.MOST_ROWS + 1):
        width = longest(size, 1 << 20)
        assert (width % PAGE_SIZE, width >= 16384) == (0, True)
        assert size * width <= prefills.MOST_SCORES < size * (width + PAGE_SIZE) or width == 1 << 20


def test_fewer_sizes_than_sglangs_are_captured_whole():
    """Of those that it captures by default (`generate_prefill_cuda_graph_batch_sizes`), and of a user's."""
    default = [size for size in generate_prefill_cuda_graph_batch_sizes(2048) if size <= prefill_rules.MOST_ROWS]
    found = prefill_rules.whole_sizes(default)
    assert found == [4, 8, 16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024]
    assert prefill_rules.whole_sizes([320]) == [320]
    assert prefill_rules.whole_sizes([]) == []
    for tokens in range(4, prefill_rules.MOST_ROWS + 1):
        padded = next(size for size in found if size >= tokens)
        assert padded - tokens < max(prefill_rules.MOST_PADDING, padded / 2 + 1 if padded <= 128 else padded / 4.9), tokens


def test_at_least_half_of_a_graph_s_rows_are_real(captured):
    """As SGLang demands of its own, of a user's sizes too."""
    runner, _ = captured
    runner.capture_num_tokens = [70, 124]
    found = WholePrefills()
    found.sizes = prefill_rules.whole_sizes(runner.capture_num_tokens)
    assert found.sizes == [124]
    assert found.size_for(prefill([61], [0]), TABLE_WIDTH) is None
    assert found.size_for(prefill([62], [0]), TABLE_WIDTH) == 124


def test_what_was_captured_is_as_before_when_a_load_fails(captured):
    runner, *_ = captured
    sizes = list(runner.capture_num_tokens)
    with pytest.raises(ZeroDivisionError):
        prefills._load(lambda *arguments: 1 / 0, runner, prefill([9], [0]))
    assert runner.capture_num_tokens == sizes


def test_a_server_whose_prefills_are_to_be_whole_and_cannot_does_not_start(captured, monkeypatch):
    """As SGLang's runner captures all of its sizes: none is small enough, or a layer leaves the graph."""
    monkeypatch.setenv(prefill_rules.SWITCH, "1")
    runner, replayed = captured
    prefills._OFFERED[runner.model_runner.model].graphs.clear()
    runner.capture_num_tokens = [64, 2048]
    with pytest.raises(ValueError, match=r"no captured prefill has up to 1024 tokens: pass a smaller --cuda-graph-bs-prefill"):
        prefills._capture(lambda runner: prefills._capture_size(capturing(replayed), runner, 2048), runner)
    with pytest.raises(ValueError, match="a prefill of 64 tokens leaves its graph 2 times: unset it"):
        prefills._capture(lambda runner: prefills._capture_size(capturing(replayed, 3), runner, 64), runner)


def test_where_nobody_asked_pieces_serve_a_model_that_leaves_its_graphs(captured, caplog):
    runner, replayed = captured
    prefills._OFFERED[runner.model_runner.model] = WholePrefills()
    runner.capture_num_tokens = [64, 128, 320]

    def capture_all(runner):
        for size, segments in ((320, 1), (128, 3), (64, 1)):
            prefills._capture_size(capturing(replayed, segments), runner, size)

    prefills._capture(capture_all, runner)
    assert [message for message in caplog.messages if "pieces" in message] == [
        "nsa_backend: short prefills are in pieces, because one of 128 tokens left its graph"
    ]
    assert replay(runner, prefill([40], [0])) == ("of pieces", 64)
    assert replay(runner, prefill([300], [0])) == ("of pieces", 320)
    assert replayed == ["pieces of 64", "pieces of 320"]
    inputs = {key.size: of_size for key, of_size in runner.backend._capture_inputs.items()}
    assert (inputs[64], inputs[320]) == ("inputs of pieces of 64", "inputs of pieces of 320")


def test_where_nobody_asked_memory_that_is_short_leaves_pieces(captured, monkeypatch, caplog):
    """On all ranks, which ask one another once."""
    runner, replayed = captured
    free = [3 << 30, 1 << 29]
    monkeypatch.setattr(prefills, "free_bytes", lambda device: free[0])
    monkeypatch.setattr(prefills, "least_of_ranks", lambda value: min(free))
    runner.model_runner.attn_backend.config.attention.device = torch.device("cuda")
    monkeypatch.setattr(
        WholePrefills, "of_rows", lambda self, rows, device: SimpleNamespace(num_requests=rows, seq_lens=0, req_pool_indices=0)
    )
    for asked in (None, "1"):
        if asked:
            monkeypatch.setenv(prefill_rules.SWITCH, asked)
        prefills._OFFERED[runner.model_runner.model] = WholePrefills()
        for size in (320, 64):
            prefills._capture_size(capturing(replayed), runner, size)
        assert len(prefills._OFFERED[runner.model_runner.model].graphs) == (2 if asked else 0)
    assert [message for message in caplog.messages if "pieces" in message] == [
        "nsa_backend: short prefills are in pieces, because less than 1024 MiB are free"
    ]


def test_a_capture_that_fails_says_how_to_leave_it_out(captured, caplog):
    runner, _ = captured

    def fails(runner, size, **options):
        if prefills.recorded() is None:
            return capturing([])(runner, size)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        prefills._capture_size(fails, runner, 64)
    assert caplog.messages[-1].endswith("NSA_BACKEND_SHORT_PREFILLS=0 leaves that out")
    assert prefills.recorded() is None


def test_where_nobody_asked_a_server_without_small_graphs_starts(captured):
    runner, *_ = captured
    prefills._OFFERED[runner.model_runner.model] = WholePrefills()
    prefills._capture(lambda runner: None, runner)
    assert prefills._OFFERED[runner.model_runner.model].sizes == []


class Whole(TinySparseMla):
    """The demo's model as our front has it: its indexer scores by pages in a recorded prefill."""

    def _index(self, input_ids, positions, batch):
        return super()._index(input_ids, positions, dataclasses.replace(batch, forward_mode=ForwardMode.DECODE))


@pytest.mark.parametrize("cached", [[0, 0, 0], [0, 5, 1], [40, 3, 0]])
def test_our_backend_attends_in_a_whole_prefill_as_in_an_eager_one(cached):
    """Of requests longer than the indexer selects, too; rows of padding leave no mark but in the padding's slot."""
    prompts = [list(range(30, 85)), [5, 9, 2, 40, 7, 8], [3] * 14 + [4] * 20]
    lens = [len(prompt) for prompt in prompts]
    found = []
    for whole in (False, True):
        engine = Engine(prompts, num_steps=3, padding=0)
        backend, table = engine.target.backend, engine.req_to_token_pool.req_to_token
        for begins, ends in (([0] * 3, cached), (cached, lens)):
            at = [request for request in range(3) if ends[request] > begins[request]]
            new = [ends[request] - begins[request] for request in at]
            if not new:
                continue
            positions = torch.cat([torch.arange(begins[request], ends[request]) for request in at])
            of_row = torch.repeat_interleave(engine.req_pool_indices[at], torch.tensor(new))
            tokens = torch.tensor([token for request in at for token in prompts[request][begins[request] : ends[request]]])
            batch = ForwardBatch(
                forward_mode=ForwardMode.EXTEND, batch_size=len(at), input_ids=tokens,
                req_pool_indices=engine.req_pool_indices[at], seq_lens=torch.tensor([ends[request] for request in at]),
                seq_lens_cpu=torch.tensor([ends[request] for request in at]), seq_lens_sum=sum(ends[request] for request in at),
                out_cache_loc=table[of_row, positions].long(), positions=positions,
                extend_seq_lens=torch.tensor(new, dtype=torch.int32), extend_seq_lens_cpu=new,
                extend_prefix_lens_cpu=[begins[request] for request in at], extend_num_tokens=sum(new),
                **calls.batch_fields(engine.target),
            )  # fmt: skip
            if whole and ends is not cached:
                out = run_whole(engine, batch)
            else:
                backend.init_forward_metadata(batch)
                out = engine.target.run(batch)
        found.append((out[: sum(new)], engine.target.pool.kv[PAGE_SIZE:], engine.target.pool.index_k[1:]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


def run_whole(engine: Engine, batch: ForwardBatch, padding: int = 3) -> torch.Tensor:
    """A prefill with rows of padding behind it, of a size that was captured, after other forwards of the same backend."""
    of_prefill, backend = WholePrefills(), engine.target.backend
    size = batch.extend_num_tokens + padding
    pad = lambda values: torch.cat([values, values.new_zeros(padding)])  # noqa: E731
    static = dataclasses.replace(
        batch, input_ids=pad(batch.input_ids), positions=pad(batch.positions), out_cache_loc=pad(batch.out_cache_loc)
    )
    of_prefill.sizes = [size]
    assert of_prefill.size_for(batch, 4096) == size
    backend.keep_rows(128, of_prefill.of_rows(size, torch.device("cpu")))
    backend.init_forward_metadata(batch)
    of_prefill.fill(batch, size)
    engine.target.net.__class__ = Whole
    with recording(of_prefill):
        backend.at_head_of_rows(size)
        return engine.target.run(static)


@pytest.mark.parametrize(
    ("counter", "whole"),
    [(None, True), (SimpleNamespace(consumer_index=-1), True), (SimpleNamespace(consumer_index=2), False), (object(), False)],
)
def test_kv_that_a_cache_still_brings_from_elsewhere_comes_layer_by_layer(captured, counter, whole):
    """Of a counter that does not tell, it may be coming."""
    runner, replayed = captured
    runner.model_runner.token_to_kv_pool.layer_transfer_counter = counter
    found, size = replay(runner, prefill([70], [20]))
    assert (found == "of pieces", size) == ((False, 128) if whole else (True, 96))
    assert replayed == [f"{'whole of 128' if whole else 'pieces of 96'}"]


def test_a_batch_for_which_no_kv_comes_says_so_to_the_counter_of_the_host_cache():
    from sglang.srt.managers.cache_controller import LayerDoneCounter
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker

    (of_batch,) = (field for field in dataclasses.fields(ScheduleBatch) if field.name == "hicache_consumer_index")
    counter = LayerDoneCounter.__new__(LayerDoneCounter)
    TpModelWorker.set_hicache_consumer(SimpleNamespace(hicache_layer_transfer_counter=counter), of_batch.default)
    assert counter.consumer_index == -1


def args(prefill: str = "breakable", sizes: list[int] | None = None, **options) -> SimpleNamespace:
    """Of a server that can have them, but for `options`."""
    rules = (*front_options.NEEDED, *prefill_rules.NEEDED, *prefill_rules.UNTRIED)
    plain = {rule.attribute: rule.served[-1] for rule in rules if "." not in rule.attribute}
    graphs = SimpleNamespace(prefill=SimpleNamespace(backend=prefill, bs=sizes))
    names = {"attention_backend": "dsa", "prefill_attention_backend": None, "decode_attention_backend": None}
    names |= {"dsa_prefill_backend": None, "kv_cache_dtype": "bfloat16"}
    return SimpleNamespace(**plain | names | {"cuda_graph_config": graphs, "dsa_decode_backend": "fa3"} | options)


@pytest.mark.parametrize(
    ("changed", "advice"),
    [
        ({"prefill": "disabled"}, "pass --cuda-graph-backend-prefill breakable"),
        ({"attn_dp_size": 2}, "drop --enable-dp-attention"),
        ({"pp_size": 2}, "pass --pp-size 1"),
        ({"enable_lora": True}, "drop --enable-lora"),
        ({"moe_a2a_backend": "deepep"}, "drop --moe-a2a-backend"),
        ({"speculative_adaptive": True}, "drop --speculative-adaptive"),
        ({"moe_dense_tp_size": 1}, "drop --moe-dense-tp-size"),
        ({"prefill_attention_backend": "nsa"}, "two names, dsa and nsa: name one for both"),
        ({"sizes": [2048]}, "pass smaller --cuda-graph-bs-prefill"),
        ({"sizes": []}, "no prefill of up to 1024 tokens is captured"),
    ],
)
def test_what_cannot_have_them_is_told_before_weights_are_loaded(changed, advice):
    assert adapter.prefill_problems(args()) == []
    (problem,) = adapter.prefill_problems(args(**changed))
    assert advice in problem


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ((), None),
        (("--dcp-size", "8", "--tp-size", "8"), None),
        (("--moe-dense-tp-size", "1", "--tp-size", "2"), "drop --moe-dense-tp-size"),
        (("--kv-cache-dtype", "fp8_e4m3"), None),
        (("--nsa-prefill-backend", "fa3"), None),
        (("--cuda-graph-backend-prefill", "disabled"), "pass --cuda-graph-backend-prefill breakable"),
        (("--disable-cuda-graph",), "drop --disable-cuda-graph"),
    ],
)
def test_options_as_sglang_resolves_them(resolve, words, advice):
    """Where a GPU is, SGLang captures prefills so by itself."""
    given = adapter.resolved(resolve("--cuda-graph-backend-prefill", "breakable", *words))
    found = adapter.prefill_problems(given)
    assert found == [] if advice is None else any(advice in problem for problem in found), found
    assert all(rule.serves(given) for rule in prefill_rules.UNTRIED)


@pytest.mark.parametrize(
    ("options", "by_default"),
    [
        ({}, True),
        ({"dsa_decode_backend": "flashmla_kv", "kv_cache_dtype": "fp8_e4m3"}, True),
        ({"dsa_decode_backend": "flashmla_sparse"}, True),
        ({"speculative_algorithm": "EAGLE3"}, True),
        ({"dcp_size": 2}, True),
        ({"ep_size": 2}, True),
        ({"disaggregation_mode": "prefill"}, True),
        ({"enable_memory_saver": True}, True),
        ({"enable_hierarchical_cache": True}, True),
        ({"enable_hierarchical_cache": True, "hicache_storage_backend": "file"}, False),
        ({"dsa_decode_backend": "sparse_verify"}, False),
        ({"enable_lmcache": True}, False),
        ({"enable_flexkv": True}, False),
        ({"enable_unified_cache_external_linker": True}, False),
        ({"radix_cache_backend": "lmcache"}, False),
    ],
)
def test_they_are_the_default_where_they_have_run(options, by_default, monkeypatch, caplog):
    """Elsewhere, and where a prefill implementation is named, they are there for those who ask; the log says so."""
    caplog.set_level("INFO")
    given = args(**options)
    assert adapter.prefill_problems(given) == []
    assert prefill_rules.wanted(given, prefill_named=False) == by_default
    assert len(caplog.messages) == (not by_default)
    assert not prefill_rules.wanted(given, prefill_named=True)
    assert caplog.messages[-1] == "nsa_backend: short prefills are in pieces, because a backend is named for prefill"
    for value in (True, False):
        monkeypatch.setenv(prefill_rules.SWITCH, str(int(value)))
        assert prefill_rules.wanted(given, prefill_named=True) == value


def test_what_cannot_have_them_is_not_given_them():
    assert not prefill_rules.wanted(args(enable_lora=True), prefill_named=False)


def test_switches_that_leave_nothing_to_capture_are_refused_beside_theirs(monkeypatch):
    monkeypatch.setenv("NSA_BACKEND_CHECK", "1")
    assert "NSA_BACKEND_CHECK=1" in adapter.prefill_problems(args())[0]
    monkeypatch.setenv("NSA_BACKEND_LAYER_FRONT", "0")
    assert "NSA_BACKEND_LAYER_FRONT=0" in adapter.prefill_problems(args())[0]
    monkeypatch.setenv("SGLANG_DSA_FUSE_TOPK", "0")
    assert "SGLANG_DSA_FUSE_TOPK=0" in adapter.prefill_problems(args())[-1]


def test_a_model_with_a_layer_that_lacks_our_front_is_refused(layer, monkeypatch):
    monkeypatch.setenv(prefill_rules.SWITCH, "1")
    monkeypatch.setattr(take, "device_problem", lambda: None)
    monkeypatch.setattr(take, "least_of_ranks", lambda value: value)
    monkeypatch.setattr(prefills, "hook", lambda *arguments: None)
    arguments = torch.nn.ModuleList([layer]), None, args(speculative_algorithm=None), (Backend,), False
    monkeypatch.setenv("NSA_BACKEND_SHORT_GRAPHS", "0")
    attend = layer.attn_mqa.forward
    assert take.take_layer_fronts(*arguments) == 1
    assert layer.attn_mqa.forward.own == attend
    with forward_context(ForwardContext(attn_backend=Backend())), recording(WholePrefills()):  # as SGLang calls it
        assert layer.attn_mqa(torch.zeros(1, 2), None, None, None, topk_indices="all") == ("attended", layer.attn_mqa, "all")
    layer.forward_absorb_prepare = layer.forward_absorb_prepare.own
    layer.use_dsa = False
    with pytest.raises(ValueError, match="NSA_BACKEND_SHORT_PREFILLS=1 and layers lack our front: it is no sparse layer"):
        take.take_layer_fronts(*arguments)


def test_ranks_capture_both_kinds_of_graphs_together_or_not_at_all(layer, monkeypatch):
    """Of target_verify and of prefills: another rank's layers may lack our front."""
    asked, offered = [], []
    monkeypatch.setattr(take, "device_problem", lambda: None)
    monkeypatch.setattr(take, "least_of_ranks", lambda value: asked.append(value) or False)
    for offering in (take.short, prefills):
        monkeypatch.setattr(offering, "offer", lambda *arguments, **options: offered.append(arguments))
    monkeypatch.setattr(take.short, "wanted", lambda args: True)
    arguments = torch.nn.ModuleList([layer]), None, args(), (Backend,), False
    assert take.take_layer_fronts(*arguments) == 1
    assert (asked, offered) == ([True, True], [])
    layer.forward_absorb_prepare = layer.forward_absorb_prepare.own
    monkeypatch.setenv(prefill_rules.SWITCH, "1")
    with pytest.raises(ValueError, match="NSA_BACKEND_SHORT_PREFILLS=1 and layers lack our front: of another rank; unset it"):
        take.take_layer_fronts(*arguments)


def test_sglangs_runner_is_what_the_hooks_take_it_for():
    """Names and arguments that a release may change."""
    assert list(inspect.signature(RUNNER.capture_one_shape).parameters) == ["self", "size", "prefix_num_chunks"]
    assert list(inspect.signature(RUNNER._prepare_forward_metadata_for_replay).parameters) == [
        "self", "forward_batch", "static_forward_batch", "shape_key",
    ]  # fmt: skip
    assert list(inspect.signature(RUNNER._run_forward).parameters) == ["self", "forward_batch", "num_tokens"]
    assert "self._pad_to_bucket(num_tokens, self.capture_num_tokens)" in inspect.getsource(RUNNER.load_batch)
    replaying = inspect.getsource(breakable_cuda_graph_backend.BreakableCudaGraphBackend.replay)
    assert "self._graphs[shape_key].replay()" in replaying
    capturing = inspect.getsource(breakable_cuda_graph_backend.BreakableCudaGraphBackend.capture_one)
    assert "self._capture_inputs[shape_key] = capture_inputs" in capturing
    assert "shape_key = ShapeKey(\n            size=num_tokens" in inspect.getsource(RUNNER.capture_one_shape)
