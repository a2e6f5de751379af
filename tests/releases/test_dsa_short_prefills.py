"""Prefills of short requests in one graph, on the CPU: a layer of SGLang's, its runner's hooks, and what a replay reads.

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

from nsa_backend.adapters.dsa.layer_front import options as front_options
from nsa_backend.adapters.dsa.layer_front import prefills, projections, take
from nsa_backend.adapters.dsa.layer_front.front import LayerFront
from nsa_backend.adapters.dsa.layer_front.prefills import EitherGraph, ShortPrefills, WholeAttention, recording
from nsa_backend.adapters.installed import adapter
from nsa_backend.benchmarks.calls import whole_front
from nsa_backend.demo.engine import Engine
from nsa_backend.demo.model import TinySparseMla
from nsa_backend.indexer.metadata import IndexerMetadata
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


@dataclasses.dataclass(frozen=True)
class Metadata:
    """As much of ours as a short prefill changes and reads."""

    nsa_cache_seqlens_int32: torch.Tensor
    schedule: object = "of another batch"
    nsa_seqlens_expanded: torch.Tensor | None = None
    real_page_table: torch.Tensor | None = None
    table_rows: torch.Tensor | None = None
    topk_indices_offset: torch.Tensor | None = None


class Backend(whole_front.Backend):
    """Ours, as far as a layer and a runner ask."""

    def __init__(self, pool=None, most: int = 1 << 20):
        super().__init__(pool)
        self.forward_metadata, self.most = Metadata(torch.full((3,), 9, dtype=torch.int32)), most
        self.reserved: set[int] = set()
        self.prefill_attention = SimpleNamespace(reserve=self.reserved.add)

    def takes_slots(self, rows: int) -> bool:
        return rows <= self.most

    def forward(self, q, k, v, layer, batch, save_kv_cache=True, **mla_args):
        return "attended", layer, mla_args["topk_indices"]

    def get_indexer_metadata(self, layer_id, batch):
        return IndexerMetadata(self.forward_metadata, None, True)


@pytest.fixture(params=[False, True], ids=["deepseek", "glm"])
def layer(request, monkeypatch):
    yield from a_layer(monkeypatch, fused=request.param)


@pytest.mark.parametrize("shared", [False, True], ids=["", "shared"])
def test_a_layer_writes_what_a_verify_of_the_same_rows_writes(layer, monkeypatch, shared):
    """And selects the slots of the whole prefill; a layer that takes an earlier selection passes it on."""
    monkeypatch.setattr(projections, "FEW_ROWS", 0)
    monkeypatch.setattr(dsa_indexer.Indexer, "_get_topk_paged", lambda *a: torch.zeros(ROWS, TOPK, dtype=torch.int32))
    of_prefill = ShortPrefills(TOPK)
    lens, slots = of_prefill.of_rows(ROWS, SLOTS.device)
    selection = slots if shared else None
    if shared:
        layer.indexer, layer.skip_topk = None, True
    own, front = layer.forward_absorb_prepare, LayerFront(layer, (Backend,))
    pool, expected_pool = poisoned_pool(), poisoned_pool()
    verify, backend = ForwardMode.TARGET_VERIFY, Backend(pool)
    expected = in_front(layer, monkeypatch, verify, own, Backend(expected_pool), SLOTS, selection)
    with recording(of_prefill), enable_breakable_cuda_graph():
        found = in_front(layer, monkeypatch, ForwardMode.EXTEND, front, backend, SLOTS, selection)
    q_rope, k_rope, q_nope, k_nope, *_, topk, _, _ = found
    assert (k_rope, k_nope) == (None, None)
    for one, other in ((q_rope, expected[0]), (q_nope, expected[2]), (pool.index_keys, expected_pool.index_keys)):
        assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
    real = SLOTS != 0
    assert torch.equal(pool.kv[SLOTS[real]], torch.cat([expected[3], expected[1]], -1)[real])
    assert topk.data_ptr() == slots.data_ptr()
    if not shared:  # the first layer of a forward is none of those
        assert backend.forward_metadata.nsa_cache_seqlens_int32.data_ptr() == lens.data_ptr()
        assert (backend.forward_metadata.nsa_cache_seqlens_int32.tolist(), backend.forward_metadata.schedule) == (
            [1] * ROWS,
            None,
        )
    assert (slots[:, 0] == 0).all()
    assert (slots[:, 1:] == -1).all()


def test_outside_of_a_recording_a_captured_prefill_is_sglangs(layer, monkeypatch):
    calls = []
    layer.forward_absorb_prepare = lambda *arguments: calls.append(arguments)
    front, backend = LayerFront(layer, (Backend,)), Backend(poisoned_pool())
    with enable_breakable_cuda_graph():
        in_front(layer, monkeypatch, ForwardMode.EXTEND, front, backend, SLOTS)
    assert len(calls) == 1
    with recording(ShortPrefills(TOPK)), enable_breakable_cuda_graph():
        in_front(layer, monkeypatch, ForwardMode.TARGET_VERIFY, front, backend, SLOTS)
    assert len(calls) == 2


def test_attention_is_recorded_in_whole_prefills_alone():
    backend, eager = Backend(), SimpleNamespace(forward=lambda *a, **k: "left the graph")
    attention = WholeAttention(eager)
    query, selected = torch.zeros(1, 2), torch.zeros(1, 4)
    with forward_context(ForwardContext(attn_backend=backend)):
        assert attention(query, None, None, None, topk_indices=selected) == "left the graph"
        with recording(ShortPrefills(TOPK)):
            assert attention(query, query, query, None, topk_indices=selected) == "left the graph"
            assert attention(query, None, None, None, topk_indices=selected) == ("attended", eager, selected)


class Graph:
    def __init__(self, name: str, replayed: list[str], segments: int = 1):
        self.replay, self._segments = lambda: replayed.append(name), [None] * segments


def capturing(replayed: list[str], segments_of_whole: int = 1):
    """In place of SGLang's method that captures one size; the pieces of two layers are five."""

    def capture(runner, size, **options):
        whole = prefills.recorded() is not None
        name, key = f"{'whole' if whole else 'pieces'} of {size}", module.ShapeKey(size=size)
        runner.backend._graphs[key] = Graph(name, replayed, segments_of_whole if whole else 5)
        runner.backend._capture_inputs[key] = f"inputs of {name}"

    return capture


@pytest.fixture
def captured(monkeypatch):
    """(runner whose sizes were captured, what was replayed, waits for a host cache); of SGLang what our hooks are around."""
    waited, replayed, backend = [], [], Backend(most=320)
    model = torch.nn.Linear(1, 1)
    counter = SimpleNamespace(consumer_index=-1, num_layers=61, wait_until=waited.append)
    pool = SimpleNamespace(layer_transfer_counter=counter)
    runner = SimpleNamespace(
        model_runner=SimpleNamespace(model=model, attn_backend=backend, token_to_kv_pool=pool),
        backend=SimpleNamespace(_graphs={}, _capture_inputs={}),
        capture_num_tokens=[64, 96, 128, 320, 512, 8192],
    )
    monkeypatch.setattr(prefills, "hook", lambda *arguments: None)
    prefills.offer(model, [SimpleNamespace(attn_mqa=SimpleNamespace(forward=None))], 2048)

    def capture_all(runner):
        for size in reversed(runner.capture_num_tokens):
            prefills._capture_size(capturing(replayed), runner, size, prefix_num_chunks=0)

    prefills._capture(capture_all, runner)
    return runner, replayed, waited


TABLE = torch.arange(8 * 4096, dtype=torch.int32).view(8, 4096) + PAGE_SIZE
"""The slots of requests 2, 3, ... in whole pages."""


def replay(runner, size: int, new: list[int], cached: list[int], mode=ForwardMode.EXTEND, padded: bool = False):
    """As SGLang's `load_batch` and `replay` go, whose metadata is ours; what the hook answers.

    Inputs are `padded` where ranks have told one another their sizes.
    """
    lens = torch.cat([torch.arange(c, c + n) for n, c in zip(new, cached, strict=True)]).int() + 1
    of_row = torch.repeat_interleave(torch.arange(len(new)), torch.tensor(new)).int()
    pages = TABLE[2 : 2 + len(new), ::PAGE_SIZE].contiguous() // PAGE_SIZE
    batch = SimpleNamespace(
        forward_mode=mode,
        seq_lens_cpu=torch.tensor(new) + torch.tensor(cached),
        batch_size=len(new),
        input_ids=torch.zeros(size if padded else sum(new)),
    )
    key = module.ShapeKey(size=size)

    def made(*arguments):
        assert arguments == (runner, batch, None, key)
        runner.model_runner.attn_backend.forward_metadata = Metadata(lens.clamp(max=2048), None, lens, pages, of_row)
        return "SGLang's"

    found = prefills._before_replay(made, runner, batch, None, key)
    runner.backend._graphs[key].replay()
    return found


def test_short_prefills_replay_the_whole_graph_and_read_their_own_slots(captured):
    runner, replayed, waited = captured
    assert runner.model_runner.attn_backend.reserved == {512}
    assert {key.size: type(graph) for key, graph in runner.backend._graphs.items()} == {
        8192: Graph, 512: Graph, 320: EitherGraph, 128: EitherGraph, 96: Graph, 64: EitherGraph,
    }  # fmt: skip
    kept = {
        key.size: (runner.backend._graphs[key].inputs, inputs)
        for key, inputs in runner.backend._capture_inputs.items()
        if key.size in (320, 128, 64)
    }
    assert kept == {size: (f"inputs of pieces of {size}", f"inputs of whole of {size}") for size in (320, 128, 64)}
    assert replay(runner, 320, [300], [0]) == "SGLang's"
    lens, slots = prefills._OFFERED[runner.model_runner.model].of_rows(320, torch.device("cpu"))
    assert lens.tolist() == [*range(1, 301), *[1] * 20]
    assert torch.equal(slots[299, :300], TABLE[2, :300])
    assert slots[300:, 0].tolist() == [0] * 20
    assert (slots[300:, 1:] == -1).all()
    assert replay(runner, 64, [3, 60], [2045, 10]) == "SGLang's"
    assert lens[:63].tolist() == [2046, 2047, 2048, *range(11, 71)]
    assert torch.equal(slots[2], TABLE[2, :2048])
    assert torch.equal(slots[62, :70], TABLE[3, :70])
    assert replay(runner, 64, [40], [0], padded=True) == "SGLang's"
    assert lens[:64].tolist() == [*range(1, 41), *[1] * 24]
    assert replayed == ["whole of 320", "whole of 64", "whole of 64"]
    assert waited == []


def test_fewer_sizes_than_sglangs_are_captured_whole():
    """Of those that it captures by default (`generate_prefill_cuda_graph_batch_sizes`), and of a user's."""
    default = [size for size in generate_prefill_cuda_graph_batch_sizes(2048) if size <= prefills.MOST_ROWS]
    found = prefills.whole_sizes(default)
    assert found == [4, 8, 16, 32, 64, 128, 192, 256, 320, 384, 448, 512]
    assert prefills.whole_sizes([320]) == [320]
    assert prefills.whole_sizes([]) == []
    for tokens in range(4, 513):
        padded = next(size for size in found if size >= tokens)
        assert padded - tokens < max(prefills.MOST_PADDING, padded / 2 + 1), tokens


def test_a_short_prefill_is_padded_to_a_size_that_has_a_whole_graph(captured):
    """Where a longer request keeps SGLang's size; what the runner captured is as before."""
    runner, *_ = captured
    sizes = list(runner.capture_num_tokens)

    def padded(tokens: int, longest: int, mode=ForwardMode.EXTEND) -> int:
        batch = SimpleNamespace(forward_mode=mode, seq_lens_cpu=torch.tensor([longest]), input_ids=torch.zeros(tokens))
        load = lambda runner, batch, **options: RUNNER._pad_to_bucket(len(batch.input_ids), runner.capture_num_tokens)  # noqa: E731
        return prefills._load(load, runner, batch, pp_proxy_tensors=None)

    assert (padded(70, 70), padded(70, 3000), padded(70, 70, ForwardMode.MIXED)) == (128, 96, 96)
    assert (padded(320, 2048), padded(321, 2048)) == (320, 512)
    with pytest.raises(ZeroDivisionError):
        prefills._load(lambda *arguments, **options: 1 / 0, runner, SimpleNamespace(
            forward_mode=ForwardMode.EXTEND, seq_lens_cpu=torch.tensor([9]), input_ids=torch.zeros(9)
        ))  # fmt: skip
    assert runner.capture_num_tokens == sizes


def test_a_server_whose_prefills_cannot_be_whole_does_not_start(captured):
    """As SGLang's runner captures all of its sizes: none is small enough, or a layer leaves the graph."""
    runner, replayed, _ = captured
    prefills._OFFERED[runner.model_runner.model].graphs.clear()
    runner.capture_num_tokens = [64, 1024]
    with pytest.raises(ValueError, match=r"no captured prefill has up to 512 tokens .* pass a smaller --cuda-graph-bs-prefill"):
        prefills._capture(lambda runner: prefills._capture_size(capturing(replayed), runner, 1024), runner)
    with pytest.raises(ValueError, match="a prefill of 64 tokens leaves its graph 2 times: unset it"):
        prefills._capture(lambda runner: prefills._capture_size(capturing(replayed, 3), runner, 64), runner)


class Whole(TinySparseMla):
    """The demo's model as our front has it: its selection is that of the recorded prefill."""

    def _index(self, input_ids, positions, batch):
        self.pool.set_index_k(batch.out_cache_loc, self._new_index_keys(input_ids, positions, batch))
        return prefills.selection(self.attention_backend(batch), len(positions))


@pytest.mark.parametrize("cached", [[0, 0, 0], [0, 5, 1]])
def test_our_backend_attends_in_a_whole_prefill_as_in_an_eager_one(cached):
    """Of requests that a prefix is cached of, too; rows of padding leave no mark but in the padding's slot."""
    prompts = [list(range(30, 42)), [5, 9, 2, 40, 7, 8], [3] * 14]
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
            backend.init_forward_metadata(batch)
            out = engine.target.run(batch) if not whole or ends is cached else run_whole(engine, batch, new)
        found.append((out[: sum(new)], engine.target.pool.kv[PAGE_SIZE:], engine.target.pool.index_k[1:]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


def run_whole(engine: Engine, batch: ForwardBatch, new: list[int], padding: int = 3) -> torch.Tensor:
    """A prefill with rows of padding behind it, whose metadata has been made and whose selection a runner has filled."""
    of_prefill = ShortPrefills(16)
    pad = lambda values: torch.cat([values, values.new_zeros(padding)])  # noqa: E731
    static = dataclasses.replace(
        batch, input_ids=pad(batch.input_ids), positions=pad(batch.positions), out_cache_loc=pad(batch.out_cache_loc)
    )
    assert of_prefill.take(batch)
    of_prefill.fill(engine.target.backend.get_indexer_metadata(0, batch), sum(new) + padding)
    engine.target.net.__class__ = Whole
    with recording(of_prefill):
        return engine.target.run(static)


@pytest.mark.parametrize(
    ("new", "cached", "mode"),
    [([4], [2045], ForwardMode.EXTEND), ([10, 10], [0, 4000], ForwardMode.EXTEND), ([30], [0], ForwardMode.MIXED)],
)
def test_a_prefill_with_a_longer_request_or_with_decoding_ones_is_in_pieces(captured, new, cached, mode):
    runner, replayed, _ = captured
    replay(runner, 64, [30], [0])
    assert replay(runner, 64, new, cached, mode) == "SGLang's"
    assert replay(runner, 8192, [3000], [0]) == "SGLang's"
    assert replayed == ["whole of 64", "pieces of 64", "pieces of 8192"]


def test_kv_that_a_host_cache_brings_is_waited_for(captured):
    runner, _, waited = captured
    runner.model_runner.token_to_kv_pool.layer_transfer_counter.consumer_index = 0
    replay(runner, 64, [30], [20])
    assert waited == [60]


def args(prefill: str = "breakable", **options) -> SimpleNamespace:
    """Of a server that can have them, but for `options`."""
    plain = {rule.attribute: rule.served[-1] for rule in (*front_options.NEEDED, *prefills.NEEDED) if "." not in rule.attribute}
    graphs = SimpleNamespace(prefill=SimpleNamespace(backend=prefill))
    names = {"attention_backend": "dsa", "prefill_attention_backend": None, "decode_attention_backend": None}
    return SimpleNamespace(**plain | names | {"cuda_graph_config": graphs, "dsa_decode_backend": "fa3"} | options)


@pytest.mark.parametrize(
    ("changed", "advice"),
    [
        ({"prefill": "disabled"}, "pass --cuda-graph-backend-prefill breakable"),
        ({"dcp_size": 2}, "drop --dcp-size"),
        ({"attn_dp_size": 2}, "drop --enable-dp-attention"),
        ({"pp_size": 2}, "pass --pp-size 1"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "pass --kv-cache-dtype bfloat16"),
        ({"dsa_prefill_backend": "sparse_prefill"}, "pass --dsa-prefill-backend flashmla_sparse"),
        ({"enable_lora": True}, "drop --enable-lora"),
        ({"moe_a2a_backend": "deepep"}, "drop --moe-a2a-backend"),
        ({"moe_dense_tp_size": 1}, "drop --moe-dense-tp-size"),
        ({"prefill_attention_backend": "nsa"}, "two names, dsa and nsa: name one for both"),
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
        (("--dcp-size", "8", "--tp-size", "8"), "drop --dcp-size"),
        (("--moe-dense-tp-size", "1", "--tp-size", "2"), "drop --moe-dense-tp-size"),
        (("--kv-cache-dtype", "fp8_e4m3"), "pass --kv-cache-dtype bfloat16"),
        (("--nsa-prefill-backend", "fa3"), "pass --dsa-prefill-backend flashmla_sparse"),
        (("--cuda-graph-backend-prefill", "disabled"), "pass --cuda-graph-backend-prefill breakable"),
        (("--disable-cuda-graph",), "drop --disable-cuda-graph"),
    ],
)
def test_options_as_sglang_resolves_them(resolve, words, advice):
    """Where a GPU is, SGLang captures prefills so by itself."""
    found = adapter.prefill_problems(adapter.resolved(resolve("--cuda-graph-backend-prefill", "breakable", *words)))
    assert found == [] if advice is None else any(advice in problem for problem in found), found


def test_switches_that_leave_nothing_to_capture_are_refused_beside_theirs(monkeypatch):
    monkeypatch.setenv("NSA_BACKEND_CHECK", "1")
    assert "NSA_BACKEND_CHECK=1" in adapter.prefill_problems(args())[0]
    monkeypatch.setenv("NSA_BACKEND_LAYER_FRONT", "0")
    assert "NSA_BACKEND_LAYER_FRONT=0" in adapter.prefill_problems(args())[0]
    monkeypatch.setenv("SGLANG_DSA_FUSE_TOPK", "0")
    assert "SGLANG_DSA_FUSE_TOPK=0" in adapter.prefill_problems(args())[-1]


def test_a_model_with_a_layer_that_lacks_our_front_is_refused(layer, monkeypatch):
    monkeypatch.setenv(prefills.SWITCH, "1")
    monkeypatch.setattr(take, "device_problem", lambda: None)
    monkeypatch.setattr(prefills, "hook", lambda *arguments: None)
    arguments = torch.nn.ModuleList([layer]), None, args(speculative_algorithm=None), (Backend,), False
    monkeypatch.setenv("NSA_BACKEND_SHORT_GRAPHS", "0")
    attend = layer.attn_mqa.forward
    assert take.take_layer_fronts(*arguments) == 1
    assert layer.attn_mqa.forward.own == attend
    with forward_context(ForwardContext(attn_backend=Backend())), recording(ShortPrefills(TOPK)):  # as SGLang calls it
        assert layer.attn_mqa(torch.zeros(1, 2), None, None, None, topk_indices="all") == ("attended", layer.attn_mqa, "all")
    layer.forward_absorb_prepare = layer.forward_absorb_prepare.own
    layer.use_dsa = False
    with pytest.raises(ValueError, match="NSA_BACKEND_SHORT_PREFILLS=1 and layers lack our front: it is no sparse layer"):
        take.take_layer_fronts(*arguments)


def test_sglangs_runner_is_what_the_hooks_take_it_for():
    """Names and arguments that a release may change."""
    assert list(inspect.signature(RUNNER.capture_one_shape).parameters) == ["self", "size", "prefix_num_chunks"]
    assert list(inspect.signature(RUNNER._prepare_forward_metadata_for_replay).parameters) == [
        "self", "forward_batch", "static_forward_batch", "shape_key",
    ]  # fmt: skip
    assert "self._pad_to_bucket(num_tokens, self.capture_num_tokens)" in inspect.getsource(RUNNER.load_batch)
    replaying = inspect.getsource(breakable_cuda_graph_backend.BreakableCudaGraphBackend.replay)
    assert "self._graphs[shape_key].replay()" in replaying
    capturing = inspect.getsource(breakable_cuda_graph_backend.BreakableCudaGraphBackend.capture_one)
    assert "self._capture_inputs[shape_key] = capture_inputs" in capturing
    assert "shape_key = ShapeKey(\n            size=num_tokens" in inspect.getsource(RUNNER.capture_one_shape)
