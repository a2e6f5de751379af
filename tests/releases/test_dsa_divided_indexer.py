"""Long prefills whose index queries ranks divide: SGLang's indexer on the CPU, rank after rank, beside one that does all."""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from batches import prefill_batch
from hypothesis import given
from hypothesis import strategies as st
from layer_on_cpu import HIDDEN, a_layer, poisoned_pool
from properties import tried
from sglang.srt.layers.attention.dsa import dsa_indexer, dsa_prefill_cuda_graph
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from nsa_backend.adapters import divided_indexer
from nsa_backend.adapters.dsa.entry_points import BackendEntryPoints
from nsa_backend.adapters.dsa.layer_front import index_prefills
from nsa_backend.adapters.installed import adapter
from nsa_backend.registration import create_backend
from nsa_backend.releases import DIVIDED_INDEXERS, installed

if installed() not in DIVIDED_INDEXERS:
    pytest.skip("indexers of this release are others", allow_module_level=True)

TOPK, WIDTH, HEADS = 64, 900, 4
ON_A_GPU = 'assert device_index is not None, "q_fp8 must be on an indexed CUDA device"'


class Group:
    """The ranks of attention, one after the other: what each sends is kept, and handed out once all have sent."""

    pynccl_comm = None

    def __init__(self, ranks: int):
        self.world_size, self.rank_in_group, self.sent = ranks, 0, {}

    def all_gather_into_tensor(self, found: torch.Tensor, own: torch.Tensor) -> None:
        assert found.is_contiguous()
        assert own.is_contiguous()
        self.sent[self.rank_in_group] = own.clone()
        found.fill_(-9)
        if len(self.sent) == self.world_size:
            torch.cat([self.sent[rank] for rank in range(self.world_size)], out=found)


@pytest.fixture
def group(monkeypatch):
    """Returns a function of a number of ranks: their group, with indexers that divide from the first row on."""
    classes = []

    def hooked(path: str, around, kind) -> None:
        owner, _, name = path.rpartition(".")
        assert owner == divided_indexer.INDEXER
        original = getattr(dsa_indexer.Indexer, name)
        monkeypatch.setattr(dsa_indexer.Indexer, name, lambda *a, **k: around(original, *a, **k))
        classes.append(name)

    monkeypatch.setattr(divided_indexer, "hook", hooked)
    monkeypatch.setattr(divided_indexer, "LEAST_ROWS", 1)
    monkeypatch.setattr(divided_indexer, "LEAST_LENGTH", 0)
    monkeypatch.setenv(divided_indexer.SWITCH, "1")

    def of(ranks: int) -> Group:
        found = Group(ranks)
        monkeypatch.setattr(divided_indexer, "ranks", lambda: found)
        if not classes:
            divided_indexer.divide()
        return found

    return of


def every_rank(group: Group, call) -> list:
    """What `call` returns on each rank, all of which have sent before."""
    for _ in range(2):
        found = []
        for rank in range(group.world_size):
            group.rank_in_group = rank
            found.append(call())
    return found


class Prefill:
    """SGLang's `_get_topk_ragged` over a DeepGEMM in torch, which leaves memory that nobody wrote outside of a row's window."""

    def __init__(self, monkeypatch, make_runner, prefix: list[int], new: list[int], *, fused: bool, budget: int | None):
        source = textwrap.dedent(inspect.getsource(dsa_indexer.Indexer._get_topk_ragged))
        assert ON_A_GPU in source
        there: dict = {}
        exec(source.replace(ON_A_GPU, "pass"), vars(dsa_indexer), there)
        monkeypatch.setattr(dsa_indexer.Indexer, "_get_topk_ragged", there["_get_topk_ragged"])
        generator = torch.Generator().manual_seed(sum(new))
        self.rows, keys = sum(new), sum(prefix) + sum(new)
        self.q = torch.randint(-3, 4, (self.rows, HEADS, 128), generator=generator).float()
        self.gates = torch.randint(1, 5, (self.rows, HEADS, 1), generator=generator).float()
        self.scored: list[int] = []  # rows of each call
        values = torch.randint(-3, 4, (keys, 128), generator=generator).to(torch.float8_e4m3fn).view(torch.uint8)
        pool = SimpleNamespace(
            index_page_size=64, get_index_k_scale_buffer=lambda *a: (values, torch.ones(keys, 1).view(torch.uint8))
        )
        monkeypatch.setattr(dsa_indexer, "get_token_to_kv_pool", lambda: pool)
        monkeypatch.setattr(dsa_indexer, "resolve_fp8_mqa_logits_fn", lambda: self.logits)
        monkeypatch.setattr(
            dsa_indexer, "mqa_logits_should_chunk", lambda **sizes: (budget is not None, 4 * keys * (budget or 0))
        )
        monkeypatch.setattr(dsa_indexer, "_is_cuda", True)
        runner = make_runner(table_width=WIDTH, index_topk=TOPK)
        self.batch, self.backend = prefill_batch(runner, prefix, new), create_backend(runner)
        self.batch.positions = torch.zeros(self.rows, dtype=torch.int64)
        self.backend.fuse_topk = fused
        self.backend.init_forward_metadata(self.batch)
        self.indexer = dsa_indexer.Indexer.__new__(dsa_indexer.Indexer)
        torch.nn.Module.__init__(self.indexer)
        vars(self.indexer).update(
            index_topk=TOPK, num_init_tokens=0, num_local_tokens=0, logits_with_pp_recv=False,
            _pad_heads_for_deep_gemm=lambda q, weights: (q, weights, HEADS),
        )  # fmt: skip

    def logits(self, q, keys, weights, start, end, clean_logits):
        self.scored.append(len(q))
        assert all(tensor.is_contiguous() for tensor in (q, weights, start, end))
        scores = ((q @ keys[0].float().T).relu() * weights[..., None]).sum(1)
        columns = torch.arange(scores.shape[1])
        return torch.where((columns >= start[:, None]) & (columns < end[:, None]), scores, float("nan"))

    def selected(self, rows: slice = slice(None), out: torch.Tensor | None = None) -> torch.Tensor:
        """For queries of `rows`, as a rank makes them."""
        metadata = self.backend.get_indexer_metadata(0, self.batch)
        with forward_context(ForwardContext(attn_backend=self.backend)):
            return self.indexer._get_topk_ragged(
                False, self.batch, 0, self.q[rows].contiguous(), self.gates[rows].contiguous(), metadata, out
            )


REQUESTS = {
    "a prompt": ([0], [75]),
    "behind a prefix": ([330], [50]),
    "several": ([5, 400, 0, 90], [63, 29, 1, 33]),
    "fewer rows than a rank more": ([200], [9]),
}


@pytest.mark.parametrize("budget", [None, 7], ids=["at once", "in pieces"])
@pytest.mark.parametrize("fused", [True, False], ids=["slots", "positions"])
@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("requests", REQUESTS.values(), ids=REQUESTS)
def test_every_rank_has_the_selection_of_one_that_makes_all(monkeypatch, make_runner, group, requests, ranks, fused, budget):
    prefill = Prefill(monkeypatch, make_runner, *requests, fused=fused, budget=budget)
    alone, of_one = prefill.selected(), sum(prefill.scored)
    several = group(ranks)
    prefill.scored.clear()
    found = every_rank(several, lambda: prefill.selected(slice(several.rank_in_group, None, ranks)))
    assert sum(prefill.scored) == 2 * of_one
    assert of_one == prefill.rows
    for mine in found:
        assert torch.equal(mine.sort(dim=1).values, alone.sort(dim=1).values)
        assert (mine >= 0).any(dim=1).all()


@pytest.mark.parametrize("selects", ["slots", "positions", "rows of dequantised KV"])
@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("requests", [*REQUESTS.values(), ([0, 0], [66, 69]), ([64], [5])], ids=[*REQUESTS, "two", "long"])
def test_rows_that_select_all_of_their_tokens_are_not_scored(monkeypatch, make_runner, group, requests, ranks, selects):
    """What is selected stays; of a batch in which every row is longer, nothing changes."""
    prefill = Prefill(monkeypatch, make_runner, *requests, fused=selects != "positions", budget=None)
    of_batch = prefill.backend.get_indexer_metadata(0, prefill.batch)
    if selects == "rows of dequantised KV":  # as a prefill by FlashMLA's sparse kernel has FP8 KV
        offsets = of_batch.attn_metadata.indexer_k_start_end[0]
        of_batch.attn_metadata = replace(of_batch.attn_metadata, topk_indices_offset=offsets)
        monkeypatch.setattr(prefill.backend, "get_indexer_metadata", lambda *_: of_batch)
    alone, several = prefill.selected(), group(ranks)
    prefill.scored.clear()
    metadata = prefill.backend.get_indexer_metadata(0, prefill.batch)
    lengths = [before + 1 + j for before, new in zip(*requests, strict=True) for j in range(new)]
    long = metadata.long_rows(TOPK)
    assert (long is None) == (min(lengths) > TOPK)
    if long is None:
        return

    def scored(rows):
        return prefill.q[rows].contiguous(), prefill.gates[rows].contiguous()

    def selected():
        out = torch.full((prefill.rows + 5, TOPK), -1, dtype=torch.int32)
        of_rank = metadata.long_rows(TOPK, several.rank_in_group, ranks)
        with forward_context(ForwardContext(attn_backend=prefill.backend)):
            index_prefills.select_long(prefill.indexer, prefill.batch, 0, of_rank, scored, out)
        return out

    for mine in every_rank(several, selected):
        assert torch.equal(mine[: prefill.rows].sort(dim=1).values, alone.sort(dim=1).values)
        assert (mine[prefill.rows :] == -1).all()
    assert sum(prefill.scored) == 2 * sum(length > TOPK for length in lengths)
    assert metadata.long_rows(TOPK) is long


def test_a_static_buffer_keeps_its_padding(monkeypatch, make_runner, group):
    """As a prefill in pieces hands it over: rows behind the real ones are no token's."""
    prefill = Prefill(monkeypatch, make_runner, [40], [50], fused=True, budget=None)
    alone, several = prefill.selected(), group(4)
    out = torch.full((64, TOPK), -1, dtype=torch.int32)
    for mine in every_rank(several, lambda: prefill.selected(slice(several.rank_in_group, None, 4), out.clone())):
        assert torch.equal(mine[:50].sort(dim=1).values, alone.sort(dim=1).values)
        assert (mine[50:] == -1).all()


def test_glms_indexers_divide_their_work_where_a_user_asks(monkeypatch):
    """Beside DeepSeek-V3.2's, whose hooks are there by default."""
    for hooked, said, of_either in ((True, None, [True, False]), (True, "1", [True, True]), (False, "1", [False, False])):
        monkeypatch.setattr(divided_indexer, "is_hooked", lambda _, hooked=hooked: hooked)
        monkeypatch.setenv(divided_indexer.SWITCH, said) if said else monkeypatch.delenv(divided_indexer.SWITCH, raising=False)
        assert [divided_indexer.divides(fused=fused) for fused in (False, True)] == of_either


@given(rows=st.integers(1, 90), ranks=st.integers(2, 9), width=st.integers(1, 5))
@tried(80)
def test_gathered_rows_are_in_the_order_of_all(rows, ranks, width):
    wanted = torch.arange(rows * width, dtype=torch.int32).view(rows, width)
    group, out = Group(ranks), torch.empty_like(wanted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(divided_indexer, "ranks", lambda: group)
        every_rank(group, lambda: divided_indexer.gather(wanted[group.rank_in_group :: ranks].contiguous(), out))
        assert torch.equal(out, wanted)


def test_pynccl_gathers_where_there_is_one(monkeypatch):
    """And not torch's, whose watchdog asks for events while SGLang captures the next piece."""
    said = []
    communicator = SimpleNamespace(
        change_state=lambda enable: contextlib.nullcontext(said.append(enable)), all_gather=lambda out, own: out.copy_(own)
    )
    monkeypatch.setattr(
        divided_indexer, "ranks", lambda: SimpleNamespace(world_size=1, rank_in_group=0, pynccl_comm=communicator)
    )
    out = torch.zeros(3, 2, dtype=torch.int32)
    divided_indexer.gather(torch.ones_like(out), out)
    assert said == [True]
    assert out.eq(1).all()


class Ours(BackendEntryPoints):
    """As much of a backend as the indexer asks for."""

    def __init__(self, pool):
        self.token_to_kv_pool = pool

    def get_indexer_metadata(self, layer_id, batch):
        return SimpleNamespace()


Ours.__abstractmethods__ = frozenset()


def a_prefill(new: list[int], **more) -> SimpleNamespace:
    lengths = {"seq_lens_cpu": torch.tensor(new), "extend_seq_lens_cpu": new, "extend_prefix_lens_cpu": [0] * len(new)}
    return SimpleNamespace(forward_mode=ForwardMode.EXTEND, **lengths, **more)


@pytest.fixture(params=[False, True], ids=["deepseek", "glm"])
def indexer(request, monkeypatch):
    for attention in a_layer(monkeypatch, fused=request.param):
        monkeypatch.setattr(dsa_indexer, "get_is_capture_mode", lambda: False)
        monkeypatch.setattr(dsa_indexer.Indexer, "_should_skip_logits_computation", lambda *a: False)
        yield attention.indexer


def in_pieces():
    """SGLang's function of the indexer that a prefill in pieces runs from the host, without its registration."""
    (function,) = (
        node
        for node in ast.parse(inspect.getsource(dsa_prefill_cuda_graph)).body
        if isinstance(node, ast.FunctionDef) and node.name == "pcg_dsa_indexer_prefill_split"
    )
    function.decorator_list, there = [], {}
    exec(compile(ast.Module([function], []), "pieces", "exec"), vars(dsa_prefill_cuda_graph), there)
    return there[function.name]


@pytest.mark.parametrize("padding", [None, 3], ids=["eager", "pieces"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_queries_and_gates_are_those_of_the_ranks_rows_and_keys_those_of_all(indexer, monkeypatch, group, ranks, padding):
    """Bit by bit what a rank makes that does all of it; a prefill in pieces has rows behind the real ones."""
    rows, generator = 11, torch.Generator().manual_seed(5)
    padded = rows + (padding or 0)
    x = torch.randn(padded, HIDDEN, generator=generator).bfloat16()
    q_lora = torch.randn(padded, 256, generator=generator).bfloat16()
    positions = torch.randint(64, (padded,), generator=generator)
    slots, lens = torch.randperm(200, generator=generator)[:padded], torch.tensor([rows])
    batch = a_prefill([rows], out_cache_loc=slots, attn_cp_metadata=None, seq_lens=lens, extend_num_tokens=rows)
    handed = []

    def hand_over(self, dual, of, layer, q, weights, *more):
        handed.append((q, weights[: len(q)]))

    def made() -> tuple[torch.Tensor, ...]:
        pool = poisoned_pool()
        with torch.no_grad(), forward_context(ForwardContext(attn_backend=Ours(pool))):
            if padding is None:
                indexer.forward_cuda(x, q_lora, positions, batch, 0)
            else:
                pieces(layer_id=0, x=x, q_lora=q_lora, positions=positions, topk_result=torch.empty(padded, TOPK))
        return *handed.pop(), pool.index_keys

    context = SimpleNamespace(forward_batch=batch, dsa_indexers={0: indexer})
    monkeypatch.setattr(dsa_prefill_cuda_graph, "get_tc_piecewise_forward_context", lambda: context)
    monkeypatch.setattr(dsa_prefill_cuda_graph, "_is_cuda", True)
    pieces = in_pieces()
    monkeypatch.setattr(dsa_indexer.Indexer, "_get_topk_ragged", hand_over)
    queries, gates, keys = made()
    several = group(ranks)
    monkeypatch.setattr(dsa_indexer.Indexer, "_get_topk_ragged", hand_over)  # what ranks exchange is another test's
    for rank in range(ranks):
        several.rank_in_group = rank
        own = slice(rank, rows, ranks)
        for mine, wanted in zip(made(), (queries[own], gates[own], keys), strict=True):
            assert mine.shape == wanted.shape
            assert torch.equal(*(tensor.contiguous().view(torch.uint8) for tensor in (mine, wanted)))


def test_which_prefills_are_divided(monkeypatch):
    assert divided_indexer.worth_it([0], [8192])
    assert divided_indexer.worth_it([4096], [1024])
    assert not divided_indexer.worth_it([4096], [1023])
    assert not divided_indexer.worth_it([0], [4094])  # 2047.5 keys a row
    assert not divided_indexer.worth_it([0] * 8, [1024] * 8)
    monkeypatch.setattr(divided_indexer, "ranks", lambda: Group(2))
    batch = SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        seq_lens_cpu=torch.tensor([8192]),
        extend_seq_lens_cpu=[8192],
        extend_prefix_lens_cpu=[0],
    )
    with forward_context(ForwardContext(attn_backend=Ours(None))):
        assert divided_indexer.rows_of_rank(batch) == slice(0, 8192, 2)
        for mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2, ForwardMode.IDLE):
            assert divided_indexer.rows_of_rank(SimpleNamespace(**vars(batch) | {"forward_mode": mode})) is None
        monkeypatch.setattr(divided_indexer, "ranks", lambda: Group(1))
        assert divided_indexer.rows_of_rank(batch) is None
    monkeypatch.setattr(divided_indexer, "ranks", lambda: Group(2))
    with forward_context(ForwardContext(attn_backend=object())):  # another attention backend's prefill
        assert divided_indexer.rows_of_rank(batch) is None


OF_TWO = "--tp-size", "2"


@pytest.mark.parametrize(
    ("said", "device_sm", "words", "divided"),
    [
        (None, 90, OF_TWO, True),
        (None, 90, (*OF_TWO, "--decode-attention-backend", "dsa"), False),  # prefill has another
        (None, 90, (*OF_TWO, "--ep-size", "2"), True),
        (None, 100, OF_TWO, False),
        (None, 90, (), False),
        (None, 90, ("--tp-size", "4", "--dp-size", "2", "--enable-dp-attention"), False),
        (None, 90, (*OF_TWO, "--enable-prefill-cp", "--cp-strategy", "interleave"), False),
        (None, 90, (*OF_TWO, "--lora-paths", "a=b"), False),
        (None, 90, (*OF_TWO, "--enable-mixed-chunk"), False),
        ("0", 90, OF_TWO, False),
        ("1", 100, ("--tp-size", "4", "--dp-size", "2", "--enable-dp-attention"), True),
    ],
)
def test_who_has_it(monkeypatch, resolve, said, device_sm, words, divided):
    """Of servers as they are typed. GLM's queries, another kernel's, are divided where that is asked for."""
    monkeypatch.delenv(divided_indexer.SWITCH, raising=False)
    if said is not None:
        monkeypatch.setenv(divided_indexer.SWITCH, said)
    hooked = []
    monkeypatch.setattr(divided_indexer, "hook", lambda path, around, kind: hooked.append(path.rpartition(".")[2]))
    args = resolve(*words)
    args.check_server_args()
    monkeypatch.setattr("nsa_backend.adapters.dsa.adapter.get_server_args", lambda: args)
    adapter.divide_indexer(device_sm)
    assert hooked[:2] == ["_get_q_k_bf16", "_get_logits_head_gate"] * divided
    assert ("_fused_q_prepare_and_store" in hooked) is (said == "1")


def test_queries_that_a_rank_has_all_are_scored_by_it(make_runner, monkeypatch, group):
    """As those of GLM-5 are where nobody asked to divide them."""
    prefill = Prefill(monkeypatch, make_runner, [0], [300], fused=False, budget=None)
    wanted = prefill.selected()
    several = group(2)
    assert torch.equal(prefill.selected(), wanted)
    assert several.sent == {}


@pytest.mark.parametrize(
    ("given_options", "sentence"),
    [
        ({}, None),
        ({"tp_size": 1}, "attention has one here: unset it"),
        ({"tp_size": 8, "attn_dp_size": 8}, "attention has one here: unset it"),
        ({"attn_cp_size": 2, "tp_size": 4}, "drop --enable-prefill-cp or --attn-cp-size"),
        ({"dcp_size": 2}, "drop --dcp-size"),
        ({"enable_two_batch_overlap": True}, "drop --enable-two-batch-overlap"),
        ({"enable_lora": True}, "drop --enable-lora"),
        ({"decode_attention_backend": "fa3"}, "backends of two names, dsa and fa3: name one for both"),
    ],
)
def test_who_asks_for_it_and_cannot_have_it_gets_a_sentence(given_options, sentence):
    args = {
        "tp_size": 8, "attn_dp_size": 1, "attn_cp_size": 1, "dcp_size": 1, "enable_dp_attention": False, "dp_size": 1,
        "enable_two_batch_overlap": False, "enable_lora": None, "attention_backend": "dsa", "prefill_attention_backend": None,
        "decode_attention_backend": None,
    }  # fmt: skip
    found = adapter.divided_problems(SimpleNamespace(**args | given_options))
    assert (found == []) if sentence is None else found[-1].endswith(sentence)
