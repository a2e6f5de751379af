"""The KV pool that benchmarks write new tokens through: SGLang's own, of one layer, over memory that is handed to it."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache import memory_pool

from nsa_backend.testing.calls import calls


@pytest.mark.parametrize(("dtype", "packed", "width"), [(torch.bfloat16, None, 576), (torch.float8_e4m3fn, 656, 656)])
def test_it_is_a_pool_of_the_models_shape_whose_memory_can_be_replaced(dtype, packed, width):
    calls.publish(1, 2)
    pool = calls.mla_pool(dtype, packed, "cpu")
    (buffer,) = pool.kv_buffer
    assert (buffer.shape[1:], buffer.dtype) == ((1, width), pool.store_dtype)
    mine = torch.zeros(640, 1, width, dtype=dtype)
    pool.kv_buffer = [mine.view(pool.store_dtype)]
    assert pool.get_key_buffer(0).data_ptr() == mine.data_ptr()
    assert pool.get_key_buffer(0).dtype == dtype
    assert (getattr(pool, "dsa_kv_cache_store_fp8", False) or getattr(pool, "nsa_kv_cache_store_fp8", False)) == bool(packed)


def test_it_writes_in_a_process_without_ranks(monkeypatch):
    """SGLang's own call down to its kernel, which needs a GPU."""
    calls.publish(1, 2)
    written = []
    pool = calls.mla_pool(torch.bfloat16, None, "cpu")
    monkeypatch.setattr(memory_pool, "set_mla_kv_buffer_triton", lambda *arguments, **options: written.append(arguments))
    if hasattr(memory_pool, "set_mla_kv_buffer_dcp_sharded_triton"):
        monkeypatch.setattr(
            memory_pool, "set_mla_kv_buffer_dcp_sharded_triton", lambda *arguments, **options: written.append(arguments)
        )
    slots, k, k_rope = torch.tensor([65, 70]), torch.ones(2, 1, 512).bfloat16(), torch.ones(2, 1, 64).bfloat16()
    with calls.one_rank():
        pool.set_mla_kv_buffer(SimpleNamespace(layer_id=0), slots, k, k_rope)
    ((buffer, *given),) = written
    assert buffer.data_ptr() == pool.kv_buffer[0].data_ptr()
    assert all(torch.equal(a, b) for a, b in zip(given, (slots, k, k_rope), strict=True))
