"""Ranks that divide the KV of every request (--dcp-size): together they attend to what one rank attends to."""

from __future__ import annotations

import importlib
import inspect
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from chosen_slots import LATENT, SLOTS, TOPK, attended, config, inputs
from divided_context import OwnPool, divide, rank_of
from joined_parts import joined
from sglang.srt.layers.attention.graph_utils import padded_extend_real_tokens
from sglang.srt.layers.dcp import comm
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor import cuda_graph_config
from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mla

from nsa_backend.adapters import decode_context_parallel
from nsa_backend.adapters.installed import adapter
from nsa_backend.adapters.sglang_types import ForwardMode
from nsa_backend.attention import context_part
from nsa_backend.attention.context_part import ContextPart
from nsa_backend.attention.implementations import implementation
from nsa_backend.attention.sparse_inputs import SparseInputs
from nsa_backend.attention.torch_reference import TorchSparseAttention
from nsa_backend.demo.engine import Engine, decode_plain
from nsa_backend.demo.speculative import SpeculativeDecoder
from nsa_backend.testing.calls import calls

NAN, INF = float("nan"), float("inf")


# Each implementation


def answer(query: torch.Tensor, keys: torch.Tensor, scale: float, base: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A kernel's of one row, [heads, latent] and [heads]; of a row without a token what no number is."""
    heads = len(query)
    if not len(keys):
        return torch.full((heads, LATENT), NAN), torch.full((heads,), INF)
    return attended(query, keys, scale), torch.logsumexp(query.float() @ keys.float().T * scale, -1) / math.log(base)


def fa3(*, q, k_cache, v_cache, qv, page_table, cache_seqlens, cu_seqlens_k_new, scheduler_metadata, **options):
    """Heads come before rows in its log-sum-exp, and any tuple may follow."""
    assert options["return_softmax_lse"] is True
    assert cu_seqlens_k_new is scheduler_metadata is None  # which would be of all slots
    keys = torch.cat([v_cache[:, 0, 0], k_cache[:, 0, 0]], -1)
    rows = [
        answer(query, keys[chosen[:length].long()], options["softmax_scale"], math.e)
        for query, chosen, length in zip(torch.cat([qv, q], -1), page_table, cache_seqlens.tolist(), strict=True)
    ]
    out, lse = (torch.stack(side) for side in zip(*rows, strict=True))
    return out, lse.T.contiguous(), None


class FlashMla:
    """Heads come padded; the sparse kernel takes logarithms in base 2, the paged one in base e."""

    def flash_mla_sparse_fwd(self, q, kv, indices, sm_scale, d_v, topk_length):
        rows = [
            answer(query, kv[chosen[:length].long(), 0], sm_scale, 2)
            for query, chosen, length in zip(q, indices[:, 0], topk_length.tolist(), strict=True)
        ]
        out, lse = (torch.stack(side) for side in zip(*rows, strict=True))
        return out, None, lse

    def get_mla_metadata(self, *, cache_seqlens, **options):
        return torch.zeros(132, 8), torch.arange(len(cache_seqlens) + 1)

    def flash_mla_with_kvcache(self, *, q, k_cache, indices, softmax_scale, num_splits, **options):
        assert len(num_splits) == len(q) + 1
        rows = [
            answer(query[0], k_cache.flatten(0, 2)[chosen[chosen >= 0].long()], softmax_scale, math.e)
            for query, chosen in zip(q, indices[:, 0], strict=True)
        ]
        out, lse = (torch.stack(side) for side in zip(*rows, strict=True))
        return out[:, None], lse[..., None]


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    monkeypatch.setattr(adapter, "fa3_functions", lambda: (fa3, None))
    monkeypatch.setattr(adapter, "fa3_scheduler", lambda: lambda **facts: pytest.fail("scheduled before it is known of what"))
    monkeypatch.setattr(adapter, "flash_mla", FlashMla)
    monkeypatch.setattr(adapter, "concat_query", lambda nope, rope: torch.cat([nope, rope], -1))


def case(heads: int, lengths: list[int], ranks: int) -> SparseInputs:
    """In float32, over pages that every rank has whole; of slots that no row chose every value is NaN."""
    given = inputs(heads, lengths)
    kv = torch.nn.functional.pad(given.kv_cache.float(), (0, 0, 0, 0, 0, 64 * ranks - SLOTS), value=NAN)
    return replace(given, q_nope=given.q_nope.float(), q_rope=given.q_rope.float(), kv_cache=kv)


@pytest.mark.parametrize(("ranks", "heads"), [(2, 64), (4, 3), (8, 64)])
@pytest.mark.parametrize("name", ["fa3", "flashmla_sparse", "flashmla_kv", "sparse_decode", "auto", "torch"])
def test_parts_of_ranks_joined_are_the_whole(name, heads, ranks):
    """Rows on all ranks, on one and on none; SGLang joins what it is given with no look at how it came about."""
    given = case(heads, [TOPK, 1, 5, 0], ranks)
    dtype = torch.float8_e4m3fn if name == "flashmla_kv" else torch.bfloat16
    parts = []
    for rank in range(ranks):
        facts = {"context_ranks": ranks, "context_rank": rank, "device_name": "NVIDIA H200"}
        attention = implementation(name).build(replace(config(heads, dtype), **facts))
        mine = replace(given, kv_cache=given.kv_cache[rank::ranks].contiguous())
        out, lse = attention.forward_part(mine, ContextPart(ranks, rank).at(given.topk_slots, None, 0))
        empty = ~((given.topk_slots >= 0) & (given.topk_slots % ranks == rank)).any(1)
        assert (out[empty] == 0).all()
        assert torch.equal(lse == -INF, empty[:, None].expand(4, heads))
        parts.append((out, lse))
    torch.testing.assert_close(joined(parts), TorchSparseAttention().forward(given), atol=2e-3, rtol=1e-3)


def test_fa3_schedules_in_every_call(kernels):
    """What a row has on this rank is known once its layer has selected."""
    metadata = SimpleNamespace(nsa_cache_seqlens_int32=torch.ones(2))
    assert implementation("fa3").build(replace(config(3), context_ranks=2)).prepare(metadata) is metadata


def test_a_selection_is_made_local_once(monkeypatch):
    """For the layers that attend with it one after the other; another forward, or another selection, has its own."""
    launches = []
    local = context_part.local_slots
    monkeypatch.setattr(context_part, "local_slots", lambda slots, *rank: launches.append(slots) or local(slots, *rank))
    given, part = inputs(3, [5, 12]), ContextPart(2, 1)
    chosen, other, forward, another = given.topk_slots, given.topk_slots.clone(), object(), object()
    made = [
        part.at(*at).own(given).topk_slots
        for at in ((chosen, forward, 3), (chosen, forward, 4), (chosen, forward, 5), (other, forward, 6),
                   (other, another, 7), (other, another, 9), (other, another, 9))
    ]  # fmt: skip
    assert len(launches) == 5
    assert made[0] is made[1] is made[2]
    assert all(torch.equal(slots, made[0]) for slots in made)


# A target on several ranks


def prompts(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]


def engine(num_steps: int, ranks: int = 1) -> Engine:
    """Prompts shorter and longer than what the indexer keeps, and than a page of two ranks."""
    with rank_of(ranks, 0):
        made = Engine(prompts([5, 136, 30]), num_steps=num_steps)
        if ranks > 1:
            divide(made, ranks)
    return made


@pytest.mark.parametrize("fused", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_decode_the_tokens_of_one(ranks, fused, monkeypatch):
    """Chunked prefill on a cached prefix, then captured decode with a padding request."""
    monkeypatch.setattr(type(adapter), "fuse_topk", lambda *_: fused)
    assert decode_plain(engine(0, ranks), 12) == decode_plain(engine(0), 12)


@pytest.mark.parametrize(("ranks", "num_steps"), [(2, 3), pytest.param(8, 2, marks=pytest.mark.slow)])
def test_drafts_are_as_right_as_on_one_rank(ranks, num_steps):
    """Verified on all ranks, drafted and extended on each alone: every draft is accepted."""
    tokens, accepted = SpeculativeDecoder(engine(num_steps)).decode(16)
    divided = engine(num_steps, ranks)
    with rank_of(ranks, ranks - 1):
        assert SpeculativeDecoder(divided).decode(16) == (tokens, accepted)
    assert set(accepted) == {num_steps + 1}


def test_a_rank_writes_its_own_slots_alone():
    """SGLang's writer: slot s lies in row s // ranks of rank s % ranks, and slot 0, where padding writes, nowhere."""
    slots = torch.tensor([0, 128, 129, 130, 133])
    k, k_rope = torch.arange(5.0).view(5, 1, 1).expand(5, 1, 8).contiguous(), torch.ones(5, 1, 8)
    rows = {}
    for rank in range(2):
        with rank_of(2, rank):
            pool = OwnPool(4, 16, 3, 2)
            pool.set_mla_kv_buffer(None, slots, k, k_rope)
        rows[rank] = {row: pool.kv[row, 0, 0].item() for row in range(64, 128) if pool.kv[row, 0, 0] == pool.kv[row, 0, 0]}
        assert (pool.kv[:64] == 0).all()
    assert rows == {0: {64: 1.0, 65: 3.0}, 1: {64: 2.0, 66: 4.0}}


def test_a_backend_knows_its_rank_and_the_slots_of_all(monkeypatch):
    monkeypatch.setenv("NSA_BACKEND_CHECK", "1")
    divided = engine(3, 4)
    config, *_ = [backend.config for backend in divided.target.backend.backends]
    assert (config.attention.context_ranks, config.attention.context_rank, config.attention.num_heads) == (4, 0, 16)
    assert config.num_kv_slots == len(divided.draft.pool.kv)
    drafts = divided.draft.backend.config
    assert (drafts.attention.context_ranks, drafts.attention.num_heads) == (1, 4)
    assert divided.target.backend.backends[3].config.attention.context_rank == 3
    assert config.divided_context
    assert drafts.divided_context
    assert decode_plain(divided, 3) == decode_plain(engine(3), 3)


# SGLang's layer


def test_sglang_joins_parts_in_base_2():
    """What `forward_part` returns; SGLang tells the base by the name of the backend."""
    assert [forward_mla.is_mla_dcp_lse_base_on_e(name) for name in adapter.BACKEND_NAMES] == [False, False]


class Answer:
    """A backend that returns a row's number and its negative as the log-sum-exp."""

    def forward(self, q, k, v, layer, batch, save_kv_cache=True, *, return_lse=False, **options):
        assert return_lse
        return q.view(-1, 2, 4), -q.view(-1, 2, 4)[..., 0]


def test_a_prefill_that_sglang_pads_hands_the_log_sum_exp_on():
    """Padding rows come back as zeros; without being asked SGLang would make room for the output alone."""
    layer = SimpleNamespace(attn_mqa_for_dcp_decode=RadixAttention(2, 4, 1.0, 1, 0, v_head_dim=4))
    model = SimpleNamespace(modules=lambda: [layer])
    decode_context_parallel.take_context_parts(model)
    decode_context_parallel.take_context_parts(model)  # the backends of one process come one after another
    batch = SimpleNamespace(
        forward_mode=ForwardMode.EXTEND, global_num_token_non_padded_cpu=3, out_cache_loc=torch.arange(5),
        positions=torch.arange(5), _attn_output=None, mha_return_lse=False,
    )  # fmt: skip
    q = torch.arange(40.0).view(5, 8)
    assert padded_extend_real_tokens(q, batch) == 3
    with calls.running(Answer()):
        out, lse = layer.attn_mqa_for_dcp_decode(q, None, None, batch)
    assert torch.equal(out, torch.cat([q[:3], torch.zeros(2, 8)]).view(5, 2, 4))
    assert torch.equal(lse, -out[..., 0])


# What does not start


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"tp_size": 8, "dcp_size": 3},
            "--dcp-size 3: 8 ranks share the heads of a request; pass a power of two that divides 8",
        ),
        ({"tp_size": 2, "dcp_size": 4}, "--dcp-size 4: 2 ranks share the heads"),
        ({"tp_size": 8, "attn_dp_size": 4, "dcp_size": 4}, "--dcp-size 4: 2 ranks share the heads"),
        ({"tp_size": 8, "dcp_size": 2, "speculative_algorithm": "EAGLE3"}, "EAGLE3 beside --dcp-size: a dense draft model"),
    ],
)
def test_a_division_that_is_not_served(options, sentence):
    args = SimpleNamespace(**{"attn_dp_size": 1, "attn_cp_size": 1, "speculative_algorithm": None} | options)
    (found,) = decode_context_parallel.combination_problems(args)
    assert sentence in found


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_a_division_that_is(ranks):
    args = SimpleNamespace(tp_size=8, dcp_size=ranks, attn_dp_size=1, attn_cp_size=1, speculative_algorithm="EAGLE")
    assert decode_context_parallel.combination_problems(args) == []


@pytest.mark.parametrize(("hopper", "backend", "problems"), [(True, "fi_a2a", 1), (True, "a2a", 0), (False, "fi_a2a", 0)])
def test_an_exchange_that_sglang_has_on_blackwell_alone(monkeypatch, hopper, backend, problems):
    """It ends there too, once weights are loaded."""
    assert "needs a Blackwell system" in inspect.getsource(comm.init_fi_a2a_workspace)
    monkeypatch.setattr(decode_context_parallel, "on_hopper", lambda: hopper)
    args = SimpleNamespace(tp_size=8, dcp_size=2, attn_dp_size=1, attn_cp_size=1, dcp_comm_backend=backend)
    found = decode_context_parallel.combination_problems(args)
    assert [one for one in found if one.endswith("pass --dcp-comm-backend a2a")] == found
    assert len(found) == problems


DIVIDED = ("--tp-size", "8", "--dcp-size", "4")


@pytest.fixture
def captures_prefills(monkeypatch):
    """As SGLang does unless something keeps it, where there is a GPU."""
    monkeypatch.setattr(cuda_graph_config, "default_prefill_backend", lambda: "breakable")


def chosen(server_args) -> tuple[str, str, str]:
    """Kernels of decode and prefill, and how prefills are captured."""
    args = adapter.resolved(server_args)
    return args.dsa_decode_backend, args.dsa_prefill_backend, args.cuda_graph_config.prefill.backend


@pytest.mark.parametrize("backend", [(), ("--attention-backend", "nsa")], ids=["SGLang's choice", "named"])
@pytest.mark.parametrize(
    ("kv", "kernels"), [("bfloat16", ("fa3", "flashmla_sparse")), ("fp8_e4m3", ("flashmla_kv", "flashmla_kv"))]
)
def test_a_division_needs_no_other_option_on_hopper(resolve, captures_prefills, caplog, backend, kv, kernels):
    """What is served is what is served without it, and a user who names a kernel has it."""
    words = (*backend, "--kv-cache-dtype", kv)
    server_args = resolve(*words, *DIVIDED)
    server_args.check_server_args()
    assert chosen(server_args) == chosen(resolve(*words, "--tp-size", "8")) == (*kernels, "breakable")
    assert adapter.named_by_user(server_args) == (False, False)
    assert [line for line in caplog.messages if "--cuda-graph-backend-prefill disabled saves their memory" in line]
    assert chosen(resolve(*words, *DIVIDED, adapter.DECODE_OPTION, "sparse_decode"))[:2] == ("sparse_decode", kernels[1])


def test_what_else_keeps_prefills_from_being_captured_does_beside_a_division_too(resolve, captures_prefills):
    words = ("--enable-two-batch-overlap", "--moe-a2a-backend", "deepep")
    assert chosen(resolve(*DIVIDED, *words))[2] == "disabled"
    for off in (("--cuda-graph-backend-prefill", "disabled"), ("--disable-cuda-graph",)):
        assert chosen(resolve(*DIVIDED, *off))[2] == "disabled"


OF_BLACKWELL = ("trtllm", "trtllm", "disabled")


@pytest.mark.parametrize(
    "words",
    [("--attention-backend", "flashinfer"), ("--decode-attention-backend", "nsa"), ("--attention-backend", "nsa",
     "--prefill-attention-backend", "fa3")],
)  # fmt: skip
def test_where_another_attention_backend_serves_sglang_s_defaults_of_a_division_stay(resolve, captures_prefills, words):
    """The layout of FP8 KV goes by the kernels that it names, whoever reads it."""
    assert chosen(resolve(*DIVIDED, "--kv-cache-dtype", "bfloat16", *words)) == OF_BLACKWELL


def test_elsewhere_sglang_s_defaults_of_a_division_stay(resolve, captures_prefills, monkeypatch):
    """On Blackwell, and on AMD's GPUs, of which one has the same number; of captures under DP attention too."""
    assert chosen(resolve(*DIVIDED[:2], "--dcp-size", "2", "--enable-dp-attention", "--dp-size", "2"))[2] == "disabled"
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "cuda", None)
        assert not decode_context_parallel.on_hopper()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (10, 0))
    assert chosen(resolve(*DIVIDED, "--kv-cache-dtype", "bfloat16")) == OF_BLACKWELL


def test_rules_that_raise_leave_sglang_s_view_as_it_was(resolve, monkeypatch):
    """And with it the rule that --dcp-size is."""
    rules = importlib.import_module(decode_context_parallel.CAPTURE_RULES)
    server_args, view = resolve(*DIVIDED), rules.resolving_view

    def broken(server_args) -> None:
        assert rules.resolving_view(server_args).dcp_size == 1
        raise RuntimeError

    with pytest.raises(RuntimeError):
        decode_context_parallel.capture_as_one_rank(adapter.BACKEND_NAMES, broken, server_args)
    assert rules.resolving_view is view


def test_a_server_starts_with_the_heads_of_its_ranks(resolve, monkeypatch):
    """SGLang resolves the options; an implementation without a log-sum-exp ends with a sentence."""
    seen = []
    monkeypatch.setattr(implementation("fa3"), "problems", lambda config: seen.append(config) or [])
    words = ("--attention-backend", "dsa", "--kv-cache-dtype", "bfloat16", "--tp-size", "8", "--dcp-size", "4")
    named = (adapter.PREFILL_OPTION, "flashmla_sparse", adapter.DECODE_OPTION)
    resolve(*words, *named, "fa3").check_server_args()
    assert [(config.num_heads, config.context_ranks) for config in seen] == [(64 // 8 * 4, 4)]
    resolve(*words, *named, "sparse_verify").check_server_args()
    usable = "fa3, flashmla_sparse, sparse_decode, sparse_verify"
    with pytest.raises(ValueError, match=rf"trtllm cannot run here: .*Choose one of: {usable};"):
        resolve(*words, *named, "trtllm").check_server_args()


def test_an_implementation_without_a_log_sum_exp_is_named():
    whole, problems = config(16), implementation("trtllm").problems
    (problem,) = set(problems(replace(whole, context_ranks=2))) - set(problems(whole))
    assert problem == (
        "--dcp-size divides the KV of a request among ranks, whose parts are joined by a log-sum-exp, and it returns none"
    )


def test_a_copy_of_divided_fp8_kv_is_refused():
    fp8 = replace(config(16, torch.float8_e4m3fn), prefill=True, index_topk=2048)
    problems = implementation("flashmla_sparse").problems
    (problem,) = set(problems(replace(fp8, context_ranks=2))) - set(problems(fp8))
    assert "its copy of an FP8 cache in bfloat16 is of whole requests" in problem
