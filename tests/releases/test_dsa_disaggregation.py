"""PD disaggregation on the CPU: what SGLang sends of its pools, and selections that travel as positions and arrive as slots."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch
from batches import prefill_batch
from kv_pools import contents, dsa_pool, scribble
from sglang.srt.disaggregation.utils import get_kv_transfer_buf_infos, setup_state_kv_args
from sglang.srt.environ import envs
from sglang.srt.layers.attention.dsa import utils
from sglang.srt.runtime_context import get_context
from sglang.srt.speculative import eagle_disaggregation

from nsa_backend.adapters.sglang_types import ForwardMode
from nsa_backend.registration import create_backend
from nsa_backend.testing.calls import calls

SENT, RECEIVED = [2, 3, 4], [7, 5, 6]


def buffers(target, draft) -> list[tuple[int, int]]:
    """(address, bytes of a page) of all that SGLang's prefill and decode servers register, in their order."""
    args = SimpleNamespace()
    found = [
        list(zip(*get_kv_transfer_buf_infos(target), strict=True)),
        list(zip(*draft.get_contiguous_buf_infos(), strict=True)),
    ]
    setup_state_kv_args(args, target, draft, target.layer_num)
    for component in zip(args.state_data_ptrs, args.state_data_lens, args.state_item_lens, strict=True):
        found.append(list(zip(*component, strict=True)))
    return [(address, item) for of_kind in found for address, _, item in of_kind]


def test_kv_and_index_keys_of_both_models_travel(one_rank):
    """A transfer engine moves pages of the registered buffers, one by one; the same ids do for all of them."""
    prefill, decode = ([dsa_pool(2, seed), dsa_pool(1, seed + 1)] for seed in (1, 11))
    for pool in decode:
        scribble(pool)
    for (source, item), (target, other) in zip(buffers(*prefill), buffers(*decode), strict=True):
        assert item == other > 0
        for sent, received in zip(SENT, RECEIVED, strict=True):
            ctypes.memmove(target + received * item, source + sent * item, item)
    slots = [(torch.tensor(pages)[:, None] * 64 + torch.arange(64)).flatten() for pages in (SENT, RECEIVED)]
    for here, there in zip(prefill, decode, strict=True):
        assert contents(there, slots[1], RECEIVED) == contents(here, slots[0], SENT)


def on_server(monkeypatch, mode: str):
    """SGLang's options as a server of this mode has them; its rule for CUDA, on which selections are slots again on arrival."""
    monkeypatch.setattr(utils, "is_cuda", lambda: True)
    return get_context().override_server_args(
        disaggregation_mode=mode, attention_backend="dsa", dsa_decode_backend="torch", dsa_prefill_backend="torch",
        speculative_num_steps=3, speculative_num_draft_tokens=4, speculative_eagle_topk=1,
    )  # fmt: skip


@pytest.fixture
def make_draft_runner(make_runner):
    """A draft model's runner, whose pool is the allocator's own."""

    def build(**options):
        runner = make_runner(num_steps=3, **options)
        runner.token_to_kv_pool_allocator = SimpleNamespace(get_kvcache=lambda: runner.token_to_kv_pool)
        return runner

    return build


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("mode", "target", "drafts"), [("prefill", True, False), ("decode", True, True), ("null", True, True)])
def test_who_selects_slots(monkeypatch, make_draft_runner, mode, target, drafts, fused):
    """Positions leave a prefill server; its target, and all of a decode server, select slots unless none are asked for."""
    runner = make_draft_runner()
    with envs.SGLANG_DSA_FUSE_TOPK.override(fused), on_server(monkeypatch, mode):
        factory = calls.draft_factory(runner, 3, seed_dsa_topk_from_draft_extend=True)
        extend, rounds = factory.create_draft_extend_backend(), factory.create_decode_backend()
        assert create_backend(runner).fuse_topk == (target and fused)
    assert extend.fuse_topk == (drafts and fused)
    assert {backend.fuse_topk for backend in rounds.attn_backends} == {drafts and fused}


@pytest.mark.parametrize("fused", [True, False])
def test_a_selection_of_a_prefill_server_is_the_decode_server_s_own(monkeypatch, make_draft_runner, fused):
    """Through SGLang's own handover: what arrives is what the decode server's backend would have selected from its table."""
    sender, receiver = make_draft_runner(table_width=700), make_draft_runner(table_width=640)
    lengths, width = [5, 60, 64], 64
    with envs.SGLANG_DSA_FUSE_TOPK.override(fused):
        with on_server(monkeypatch, "prefill"):
            factory = calls.draft_factory(sender, 3, seed_dsa_topk_from_draft_extend=True)
            sent = selected(factory.create_draft_extend_backend(), sender, lengths, width)
        with on_server(monkeypatch, "decode"):
            factory = calls.draft_factory(receiver, 3, seed_dsa_topk_from_draft_extend=True)
            own = selected(factory.create_draft_extend_backend(), receiver, lengths, width)
            arrived = handed_over(receiver, lengths, sent)
    assert torch.equal(arrived, own)
    assert torch.equal(sent[0][:5], torch.arange(5, dtype=torch.int32))


def selected(backend, runner, lengths: list[int], width: int) -> torch.Tensor:
    """int32 [requests, width]: the selection of each request's last row of a prefill, as draft steps are given it."""
    batch = prefill_batch(runner, [0] * len(lengths), lengths)
    batch.req_pool_indices = torch.arange(1, len(lengths) + 1)
    backend.init_forward_metadata(batch)
    rows = backend.indexer_metadata(batch).topk_transform(torch.zeros(0), width)
    return backend.prepare_mtp_seed_indices(rows[torch.tensor(lengths).cumsum(0) - 1], ForwardMode.EXTEND)


def handed_over(runner, lengths: list[int], sent: torch.Tensor) -> torch.Tensor:
    """What SGLang's decode server makes of the selections that came with each request."""
    requests = [
        SimpleNamespace(
            output_topk_p=torch.ones(1), output_topk_index=torch.zeros(1, dtype=torch.int64),
            hidden_states_tensor=torch.zeros(8), output_dsa_topk_indices=row,
        )
        for row in sent
    ]  # fmt: skip
    batch = SimpleNamespace(
        reqs=requests, device="cpu", req_to_token_pool=runner.req_to_token_pool, enable_overlap=False,
        req_pool_indices=torch.arange(1, len(lengths) + 1), seq_lens=torch.tensor(lengths),
        model_config=SimpleNamespace(hf_config=runner.model_config.hf_config),
    )  # fmt: skip
    spec_info = eagle_disaggregation.build_eagle_disagg_draft_input(batch, torch.zeros(len(lengths), dtype=torch.int64), None)
    return spec_info.dsa_topk_indices
