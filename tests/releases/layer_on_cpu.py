"""One layer of SGLang's sparse attention on the CPU, whole, with its CUDA kernels in torch, and what stands around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated import compiled_here, multiplying_early, multiplying_tiles
from sglang.srt.layers.attention.dsa import dsa_indexer
from sglang.srt.layers.layernorm import LayerNorm, RMSNorm
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mla
from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA
from sglang_models import one_rank

from nsa_backend.benchmarks.calls.whole_front import one_layers_pool
from nsa_backend.kernels import early_products, tile_products
from nsa_backend.kernels import layer_front_torch as steps
from nsa_backend.kernels.layer_front_weights import Scales
from nsa_backend.testing.interpreter import round_as_a_gpu_does

HIDDEN, HEADS, INDEX_HEADS, ROWS, TOPK, PAGES = 256, 4, 32, 5, 16, 4
CONFIG = SimpleNamespace(
    architectures=["DeepseekV32ForCausalLM"], rms_norm_eps=1e-6, index_topk=TOPK, index_n_heads=INDEX_HEADS, index_head_dim=128,
    num_hidden_layers=1, rope_interleave=True,
)  # fmt: skip


def kernels_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's CUDA kernels in torch, each with the rounding and the order of the kernel; ours in CUDA C++ is emulated."""
    round_as_a_gpu_does()
    compiled_here(monkeypatch)
    multiply = early_products.early_products

    def multiplied(x, *given, gates_dtype=torch.float32, **named):
        launch = multiplying_early(x.shape[1], early_products.tile_for(x.shape[1]), gates_dtype)
        return multiply(x, *given, gates_dtype=gates_dtype, **named, launch=launch)

    of_tiles = tile_products.tile_products

    def multiplied_in_tiles(x, x_scales, *products, gates_dtype=torch.float32, **named):
        tile = tile_products.tile_for(x.shape[1], len(x), [len(weight) for weight, _ in products])
        return of_tiles(
            x, x_scales, *products, gates_dtype=gates_dtype, **named, **multiplying_tiles(x.shape[1], tile, gates_dtype)
        )

    monkeypatch.setattr(early_products, "early_products", multiplied)
    monkeypatch.setattr(tile_products, "tile_products", multiplied_in_tiles)

    def turn(embedding, positions, query, key, **_):
        angles = embedding.cos_sin_cache[positions]
        for part in (query, key):
            heads = part if part.dim() == 3 else part[:, None]
            heads.copy_(steps.rope(heads.float(), angles, embedding.is_neox_style).to(part.dtype))
        return query, key

    def store(key, cache, slots, page_size):
        scale = key.float().abs().amax(-1).clamp(min=1e-4) / steps.FP8_MAX
        rows = cache.view(-1, page_size * 132)
        values = rows[:, : page_size * 128].view(-1, page_size, 128)
        values[slots // page_size, slots % page_size] = steps.fp8(key.float() * (1 / scale)[:, None]).view(torch.uint8)
        rows.view(torch.float32)[slots // page_size, page_size * 32 + slots % page_size] = scale

    def fused_key(key, cache, slots, weight, bias, eps, angles, positions, page_size):
        key = steps.layer_norm(key, weight, bias, eps, fused=True)[:, None]
        store(steps.rope_neighbours(key, angles[positions])[:, 0].bfloat16(), cache, slots, page_size)

    def fused_query(query, gates, gate_scale, angles, positions):
        x = steps.rope_neighbours(query.float(), angles[positions])
        scale = x.abs().amax(-1).clamp(min=1e-4) / steps.FP8_MAX
        return steps.fp8(x * (1 / scale)[..., None]), (gates.float() * gate_scale * scale)[..., None]

    monkeypatch.setattr(dsa_indexer, "fused_k_indexer_norm_rope_store", fused_key, raising=False)
    monkeypatch.setattr(dsa_indexer, "fused_q_indexer_rope_first_quant", fused_query, raising=False)
    monkeypatch.setattr(dsa_indexer, "can_use_dsa_fused_store", lambda *a: True)
    monkeypatch.setattr(dsa_indexer, "fused_store_index_k_cache", store)
    monkeypatch.setattr(dsa_indexer, "rotate_activation", lambda x: steps.hadamard(x.float()).to(x.dtype))
    monkeypatch.setattr(dsa_indexer, "get_is_capture_mode", lambda: True)
    monkeypatch.setattr(
        dsa_indexer.Indexer, "_weights_proj_bf16_in_fp32_out", lambda s, x: x.float() @ s.weights_proj.weight.T.float()
    )
    monkeypatch.setattr(RMSNorm, "forward", lambda s, x: steps.rms_norm(x, s.weight, s.variance_epsilon).to(x.dtype))
    layer_norm = lambda s, x: steps.layer_norm(x, s.weight, s.bias, s.variance_epsilon).to(x.dtype)  # noqa: E731
    monkeypatch.setattr(LayerNorm, "forward", layer_norm)
    monkeypatch.setattr(RotaryEmbedding, "forward", turn)


def a_layer(monkeypatch: pytest.MonkeyPatch, fused: bool = False) -> Iterator[DeepseekV2AttentionMLA]:
    """With random weights of bfloat16; while it lasts SGLang takes its branches for CUDA.

    Where `fused` the indexer is GLM-5's: its heads rotate neighbours, and it is what SGLang makes of it on a GPU.
    """
    kernels_in_torch(monkeypatch)
    generator = torch.Generator().manual_seed(0)
    with one_rank(monkeypatch):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            attention = DeepseekV2AttentionMLA(
                SimpleNamespace(**vars(CONFIG), indexer_rope_interleave=fused),
                HIDDEN,
                HEADS,
                128,
                64,
                128,
                256,
                512,
                layer_id=0,
                max_position_embeddings=64,
                rope_theta=10000.0,
            )
            if fused:
                fuse(attention.indexer)
        finally:
            torch.set_default_dtype(before)
        for name, parameter in attention.named_parameters():
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype) + ("norm" in name)
        attention.w_kc = 0.1 * torch.randn(HEADS, 128, 512, generator=generator).bfloat16()
        for embedding in (attention.rotary_emb, attention.indexer.rotary_emb):
            embedding.cos_sin_cache = embedding.cos_sin_cache.float()  # as on CUDA
        attention.indexer._forward_method = attention.indexer.forward_cuda
        monkeypatch.setattr(dsa_indexer, "_is_cuda", True)
        yield attention


def fuse(indexer: dsa_indexer.Indexer) -> None:
    """As its constructor has it on CUDA."""
    assert not indexer.is_neox_style
    indexer.use_dsa_indexer_fusion = True
    indexer.wk_weights_proj = ReplicatedLinear(HIDDEN, 128 + INDEX_HEADS, bias=False, params_dtype=torch.bfloat16)
    del indexer.wk, indexer.weights_proj


def poisoned_pool() -> DSATokenToKVPool:
    pool = one_layers_pool(PAGES, "bf16", "cpu")
    pool.kv.fill_(7.0)
    pool.index_keys.fill_(0x5A)
    return pool


def in_front(
    attention: DeepseekV2AttentionMLA,
    monkeypatch: pytest.MonkeyPatch,
    mode: ForwardMode,
    prepare: Callable[..., tuple],
    backend: Any,
    slots: torch.Tensor,
    selection: torch.Tensor | None = None,
) -> tuple:
    """What `prepare` returns for the same random rows in every call, a row a slot, where `selection` is an earlier layer's."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(len(slots), HIDDEN, generator=generator).bfloat16()
    positions = torch.randint(64, (len(slots),), generator=generator)
    lens = torch.ones(len(slots))
    batch = SimpleNamespace(forward_mode=mode, out_cache_loc=slots, seq_lens=lens, seq_lens_cpu=lens, attn_cp_metadata=None)
    attention.current_attention_backend = "dsa"
    monkeypatch.setattr(forward_mla.DeepseekMLAForwardMixin, "_fuse_rope_for_trtllm_mla", lambda *a: False)
    latent = SimpleNamespace(fetch_qkv_latent=lambda: attention.fused_qkv_a_proj_with_mqa(x)[0], input_scattered=False)
    monkeypatch.setattr(forward_mla, "get_attn_tp_context", lambda: latent)
    monkeypatch.setattr("sglang.srt.layers.layer_boundary.get_attn_tp_context", lambda: latent)
    with torch.no_grad(), forward_context(ForwardContext(attn_backend=backend)):
        return prepare(positions, x, batch, None, None, selection)


def assert_same_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        other = theirs[name]
        assert value.shape == other.shape, name
        assert torch.equal(*(x.contiguous().view(torch.uint8) for x in (value, other))), name


class BlockFp8(torch.nn.Module):
    """A projection with FP8 weights: its input comes quantised, or it quantises by itself."""

    def __init__(self, linear: torch.nn.Module, form: Scales):
        super().__init__()
        self.form = form
        self.weight = torch.nn.Parameter(linear.weight.to(torch.float8_e4m3fn), requires_grad=False)
        rows, columns = self.weight.shape
        self.weight_scale_inv = torch.ones(-(-rows // 128), columns // 128)
        self.quant_method = SimpleNamespace(apply=lambda linear, x, bias=None: linear.multiplied(x))

    def forward(self, x):
        return self.quant_method.apply(self, x), None

    def multiplied(self, x):
        values, scales = x if isinstance(x, tuple) else steps.quantise(x.float(), self.form)
        x = values.float().unflatten(1, (-1, 128)) * scales[..., None]
        return (x.flatten(1) @ self.weight.float().T).bfloat16()
