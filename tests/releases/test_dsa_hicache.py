"""HiCache on the CPU: SGLang's own host pools and transfers over real KV pools, and the waits that a backend goes through."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from batches import forward_batch, prefill_batch, random_batch
from kv_pools import PAGE, contents, dsa_pool, scribble
from sglang.srt.mem_cache import l2_transfer
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.host_pool_config import prepare_host_pool_config
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_host_pool_group
from sglang.srt.mem_cache.pool_host import common, dsa, mla
from sglang.srt.runtime_context import get_context

from nsa_backend.adapters.sglang_types import ForwardMode
from nsa_backend.attention.interface import NothingToPrepare
from nsa_backend.registration import create_backend

SLOTS = torch.arange(2 * PAGE, 5 * PAGE)
LOADED = torch.arange(6 * PAGE, 9 * PAGE)
PAGES, LOADED_PAGES = [2, 3, 4], [6, 7, 8]


def copy_slots(src_layers, dst_layers, src_indices, dst_indices, page_size) -> None:
    """What sgl_kernel's `transfer_kv_direct` does on a GPU."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


class Event:
    """Stands for a CUDA event; everything is done when it is recorded."""

    def __init__(self, **options):
        pass

    def record(self, *stream):
        pass

    def wait(self, *stream):
        pass


@pytest.fixture
def tier(monkeypatch, one_rank):
    """(target pool of two layers, draft pool of one, SGLang's host pools over both), copies through the direct backend."""
    for module in (dsa, mla):
        monkeypatch.setattr(module, "transfer_kv_direct", copy_slots, raising=False)
        monkeypatch.setattr(module, "make_kernel_ptr_table", lambda *refs, **options: None)
    monkeypatch.setitem(
        common.ALLOC_MEMORY_FUNCS, "cpu", lambda dims, dtype, device, **options: torch.zeros(dims, dtype=dtype, device=device)
    )
    streams = SimpleNamespace(Event=Event, Stream=lambda: None, stream=lambda stream: nullcontext())
    monkeypatch.setattr(l2_transfer, "device_module", streams)
    target, draft = dsa_pool(layers=2, seed=1), dsa_pool(layers=1, seed=2)
    with get_context().override_server_args(
        hicache_mem_layout="layer_first", hicache_io_backend="direct", hicache_ratio=2.0, hicache_size=0
    ):
        config = prepare_host_pool_config(
            decls=target.host_pool_decls(),
            full_layer_mapping={0: 0, 1: 1},
            transfer_layer_id_max=2,
            transfer_page_size=PAGE,
            packed_draft_device_pools=(draft,),
        )
        yield target, draft, build_host_pool_group(config=config)


def transfers(group, host: torch.Tensor, device: torch.Tensor, *, load: bool) -> list:
    """The controller's own list of what one operation moves, index keys as the tree's sidecar names them."""
    controller = SimpleNamespace(mem_pool_host=group, transfer_layer_id_max=2)
    controller._l2_transfers = lambda *given: HybridCacheController._l2_transfers(controller, *given)
    index_keys = PoolTransfer(name=PoolName.INDEXER, host_indices=host, device_indices=device)
    method = HybridCacheController._l2_load_transfers if load else HybridCacheController._l2_transfers
    return method(controller, host, device, [index_keys])


def evict_and_load_back(target, draft, group, on_layer_done=None) -> None:
    """SLOTS go to the host, the GPU's memory is written over, and they come back at LOADED."""
    host = torch.arange(PAGE, 4 * PAGE)
    engine = l2_transfer.L2TransferEngine("direct")
    engine.submit_device_to_host(transfers(group, host, SLOTS, load=False))
    for pool in (target, draft):
        scribble(pool)
    engine.submit_host_to_device(
        transfers(group, host, LOADED, load=True), transfer_layer_id_max=2, on_layer_done=on_layer_done
    )


def test_kv_and_index_keys_of_both_models_come_back(tier):
    target, draft, group = tier
    before = contents(target, SLOTS, PAGES), contents(draft, SLOTS, PAGES)
    evict_and_load_back(target, draft, group)
    assert (contents(target, LOADED, LOADED_PAGES), contents(draft, LOADED, LOADED_PAGES)) == before


def test_the_draft_is_loaded_when_the_target_s_first_layer_is(tier):
    """The draft model waits for nothing itself: it runs behind the target, whose first layer waits."""
    target, draft, group = tier
    before, seen = contents(draft, SLOTS, PAGES), []
    evict_and_load_back(target, draft, group, lambda layer: seen.append(contents(draft, LOADED, LOADED_PAGES) == before))
    assert seen == [True, True]


class Waiting(NothingToPrepare):
    """Attends to nothing, and says when."""

    def __init__(self, log: list):
        self.log = log

    def forward(self, given):
        self.log.append("attends")
        return torch.zeros(len(given.q_nope), HEADS, 512)


HEADS = 4
LAYER = SimpleNamespace(layer_id=1, tp_q_head_num=HEADS, v_head_dim=512, head_dim=576, scaling=0.5, logit_cap=0.0)


@pytest.mark.parametrize("mode", ["DECODE", "EXTEND", "TARGET_VERIFY", "DRAFT_EXTEND_V2"])
def test_attention_waits_for_the_load_of_its_layer(make_runner, mode):
    """SGLang's pool makes the forward's stream wait for a layer's load where its buffer is asked for."""
    log = []
    runner = make_runner(num_steps=3)
    runner.token_to_kv_pool = dsa_pool(layers=2, seed=1)
    runner.token_to_kv_pool.register_layer_transfer_counter(SimpleNamespace(wait_until=log.append))
    backend = create_backend(runner)
    backend.decode_attention = backend.prefill_attention = Waiting(log)
    batch = prefill_batch(runner, [8, 70, 300], [1, 1, 1])
    if mode != "EXTEND":
        batch = forward_batch(random_batch(runner, mode.lower(), 3, 1, 3), ForwardMode[mode])
    backend.init_forward_metadata(batch)
    rows = backend.forward_metadata.nsa_cache_seqlens_int32.shape[0]
    forward = backend.forward_decode if mode == "DECODE" else backend.forward_extend
    slots = torch.zeros(rows, backend.config.attention.index_topk, dtype=torch.int32)
    forward(torch.zeros(rows, HEADS * 576), None, None, LAYER, batch, topk_indices=slots)
    assert log == [1, "attends"]
