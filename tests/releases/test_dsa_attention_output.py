"""A prefill's attention lies where SGLang's next piece reads it: SGLang copies what lies elsewhere, 67 MB for 4096 tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers import radix_attention
from torch.utils._python_dispatch import TorchDispatchMode

from nsa_backend.adapters.installed import adapter
from nsa_backend.attention.sparse_inputs import sparse_inputs

REAL, PADDED, HEADS, LATENT, ROPE = 5, 8, 2, 16, 4


class Copies(TorchDispatchMode):
    """How many values are copied into tensors that exist."""

    values = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.copy_.default:
            self.values += args[0].numel()
        return function(*args, **(kwargs or {}))


takes_back = pytest.mark.skipif(
    not hasattr(radix_attention, "attention_input_scope"),
    reason="this release leaves in a batch where it wanted the last layer",
)


@pytest.mark.skipif(hasattr(radix_attention, "attention_input_scope"), reason="this release takes it back")
def test_a_release_that_leaves_it_in_the_batch_is_not_asked():
    """A later forward of this batch would write where another tensor lies by then."""
    assert adapter.attention_output(SimpleNamespace(_attn_output=torch.zeros(1))) is None


@takes_back
@pytest.mark.parametrize("in_place", [True, False])
def test_what_is_written_where_sglang_wants_it_is_not_copied(monkeypatch, in_place):
    """Rows of padding are zeros behind it, as they are behind a copy."""
    query = torch.randn(PADDED, HEADS * LATENT)
    batch = SimpleNamespace(
        global_num_token_non_padded_cpu=REAL, out_cache_loc=torch.arange(PADDED), positions=torch.arange(PADDED),
        mha_return_lse=False, _attn_output=None,
    )  # fmt: skip
    layer = SimpleNamespace(tp_q_head_num=HEADS, v_head_dim=LATENT, head_dim=LATENT + ROPE, scaling=1.0, logit_cap=0.0)
    metadata = SimpleNamespace(
        nsa_cache_seqlens_int32=torch.ones(REAL), nsa_cu_seqlens_q=torch.arange(REAL + 1),
        nsa_cu_seqlens_k=torch.arange(REAL + 1), schedule=None, rows_per_request=1,
    )  # fmt: skip

    def forward(q, k, v, layer, batch, save_kv_cache, *, q_rope):
        out = adapter.attention_output(batch) if in_place else None
        inputs = sparse_inputs(q, q_rope, layer, None, None, metadata, out=out)
        assert (inputs.out is not None) == in_place
        found = torch.empty_like(inputs.q_nope) if inputs.out is None else inputs.out
        return torch.mul(inputs.q_nope, 2, out=found)

    monkeypatch.setattr(radix_attention, "get_forward_batch", lambda: batch)
    monkeypatch.setattr(radix_attention, "get_attn_backend", lambda: SimpleNamespace(forward=forward))
    monkeypatch.setattr(radix_attention, "get_prefill_raw_num_tokens", lambda: REAL)
    output = torch.full((PADDED, HEADS * LATENT), float("nan"))
    rope = torch.zeros(PADDED, HEADS * ROPE)
    with Copies() as copies:
        radix_attention.RadixAttention._eager_attention(layer, query, None, None, output, q_rope=rope)
    assert torch.equal(output[:REAL], 2 * query[:REAL])
    assert not output[REAL:].any()
    assert copies.values == (0 if in_place else REAL * HEADS * LATENT)
    assert adapter.attention_output(batch) is None  # of what comes next
