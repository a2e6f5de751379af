"""A later stage of pipeline parallel: its layers keep their numbers, and SGLang's KV pool counts from the first of them."""

from types import SimpleNamespace

import torch
from cpu_runner import build
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from nsa_backend.registration import create_backend
from nsa_backend.testing.calls import calls

LATENT, ROPE, HEADS, FIRST = 8, 4, 4, 30
LAYERS = (30, 31)


def kv_pool() -> MLATokenToKVPool:
    return MLATokenToKVPool(
        size=1024, page_size=64, dtype=torch.float32, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, layer_num=len(LAYERS),
        device="cpu", enable_memory_saver=False, start_layer=FIRST, end_layer=FIRST + len(LAYERS),
    )  # fmt: skip


def test_the_layers_of_a_later_stage_write_and_read_their_own_kv(monkeypatch):
    runner, pool = build(index_topk=64), kv_pool()
    monkeypatch.setattr(pool, "set_mla_kv_buffer", lambda layer, slots, k, k_rope: written(pool, layer, slots, k, k_rope))
    runner.token_to_kv_pool = pool
    runner.req_to_token_pool.req_to_token[1, :200] = 64 + torch.arange(200)
    backend = create_backend(runner)
    for buffer in pool.kv_buffer:
        buffer.normal_(generator=torch.Generator().manual_seed(len(buffer)))
    before = [buffer.clone() for buffer in pool.kv_buffer]
    batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE, batch_size=1, input_ids=None, req_pool_indices=torch.tensor([1]),
        seq_lens=torch.tensor([100]), seq_lens_cpu=torch.tensor([100]), seq_lens_sum=100, out_cache_loc=torch.tensor([163]),
        **calls.batch_fields(SimpleNamespace(runner=runner, pool=pool, backend=backend)),
    )  # fmt: skip
    backend.init_forward_metadata(batch)
    slots = torch.nn.functional.pad(64 + torch.arange(100), (0, 28), value=-1)[None, -64:].int()
    for layer in LAYERS:
        q, k, k_rope = torch.randn(1, HEADS * LATENT), torch.randn(1, 1, LATENT), torch.randn(1, 1, ROPE)
        radix = SimpleNamespace(
            layer_id=layer, tp_q_head_num=HEADS, head_dim=LATENT + ROPE, v_head_dim=LATENT, scaling=0.3, logit_cap=0.0
        )
        q_rope = torch.randn(1, HEADS * ROPE)
        out = backend.forward_decode(q, k, None, radix, batch, q_rope=q_rope, k_rope=k_rope, topk_indices=slots)
        kv = pool.kv_buffer[layer - FIRST][slots[slots >= 0].long(), 0]
        torch.testing.assert_close(pool.kv_buffer[layer - FIRST][163, 0], torch.cat([k, k_rope], -1)[0, 0])
        query = torch.cat([q.view(HEADS, LATENT), q_rope.view(HEADS, ROPE)], -1)
        expected = torch.softmax(0.3 * query @ kv.T, -1) @ kv[:, :LATENT]
        torch.testing.assert_close(out.view(HEADS, LATENT), expected)
    for old, buffer in zip(before, pool.kv_buffer, strict=True):
        assert (old != buffer).any(-1).nonzero()[:, 0].unique().tolist() == [163]


def written(pool: MLATokenToKVPool, layer, slots, k, k_rope) -> None:
    """What SGLang's kernel writes, which needs a GPU: one row a slot, in the layer's own buffer."""
    pool.get_key_buffer(layer.layer_id)[slots] = torch.cat([k, k_rope], -1)
