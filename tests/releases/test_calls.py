"""What the backend calls of SGLang and of its kernels: every call, bound against the installed signature."""

import inspect
from dataclasses import fields
from importlib.util import find_spec

import pytest
from installed_source import signature

from nsa_backend.adapters import sglang_types
from nsa_backend.adapters.installed import adapter

X = object()
IN_GRAPH = "dsa" in adapter.BACKEND_NAMES

OWN_FLASH_MLA = "sglang.kernels.ops.attention.flash_mla_interface"
FLASH_MLA = OWN_FLASH_MLA if find_spec("sglang.kernels") and find_spec(OWN_FLASH_MLA) else "sgl_kernel.flash_mla"
"""Read as text: on some releases it loads its CUDA library at once."""


def test_flash_mla_comes_from_the_distribution_that_is_checked():
    assert ("sgl-flash-mla" if FLASH_MLA == OWN_FLASH_MLA else "sglang-kernel") == adapter.FLASH_MLA_DISTRIBUTION


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("get_mla_metadata", "cache_seqlens num_q_tokens_per_head_k num_heads_k num_heads_q is_fp8_kvcache topk"),
        (
            "flash_mla_with_kvcache",
            "q k_cache cache_seqlens head_dim_v tile_scheduler_metadata num_splits softmax_scale indices block_table "
            "is_fp8_kvcache",
        ),
        ("flash_mla_sparse_fwd", "q kv indices sm_scale d_v"),
    ],
)
def test_flash_mla(function, arguments):
    signature(FLASH_MLA, function).bind(**dict.fromkeys(arguments.split(), X))


def test_fa3():
    attend, varlen = adapter.fa3_functions()
    inspect.signature(attend).bind(
        q=X, k_cache=X, v_cache=X, qv=X, page_table=X, cache_seqlens=X, cu_seqlens_q=X, cu_seqlens_k_new=X, max_seqlen_q=1,
        softmax_scale=1.0, causal=True, softcap=0.0, return_softmax_lse=False, num_splits=0,
    )  # fmt: skip
    inspect.signature(varlen).bind(
        q=X, k=X, v=X, cu_seqlens_q=X, cu_seqlens_k=X, max_seqlen_q=1, max_seqlen_k=1, softmax_scale=1.0, causal=True
    )


def test_the_topk_kernels():
    from sgl_kernel import fast_topk_transform_fused, fast_topk_v2

    inspect.signature(fast_topk_v2).bind(X, X, 2048, row_starts=None)
    inspect.signature(fast_topk_transform_fused).bind(
        score=X, lengths=X, page_table_size_1=X, cu_seqlens_q=X, topk=2048, row_starts=None
    )


def fp8_functions() -> dict:
    """SGLang's own functions behind the adapter's, which pass their arguments on."""
    if not IN_GRAPH:
        return {"dequantize": adapter.dequantize_k_cache_paged, "rope": adapter.mla_quantize_and_rope_for_fp8}
    from sglang.kernels.ops.attention.dsa import dequant_k_cache
    from sglang.kernels.ops.attention.utils import mla_quantize_and_rope_for_fp8

    names = ("dequantize_k_cache_paged_dsa", "dequantize_k_cache_paged")
    (dequantize,) = [getattr(dequant_k_cache, name) for name in names if hasattr(dequant_k_cache, name)]
    return {"dequantize": dequantize, "rope": mla_quantize_and_rope_for_fp8}


def test_fp8():
    functions = fp8_functions()
    inspect.signature(functions["dequantize"]).bind(X, X)
    rope = inspect.signature(functions["rope"])
    assert list(rope.parameters) == [
        "q_nope", "q_rope", "k_nope", "k_rope", "pos_ids", "cos_sin_cache", "is_neox", "kv_lora_rank", "qk_rope_head_dim",
    ]  # fmt: skip


def test_the_adapter_finds_the_fp8_functions():
    """With arguments that stop it before any kernel."""
    with pytest.raises((AttributeError, AssertionError, TypeError)) as stop:
        adapter.dequantize_k_cache_paged(None, None)
    assert "dequant_k_cache" in str(stop.traceback[-1].path)
    with pytest.raises((AttributeError, AssertionError, TypeError)) as stop:
        adapter.mla_quantize_and_rope_for_fp8(*[None] * 9)
    assert "nsa_backend" not in str(stop.traceback[-1].path)


def test_the_pool():
    from sglang.srt.mem_cache import memory_pool

    pool = getattr(memory_pool, f"{adapter.BACKEND_NAMES[0].upper()}TokenToKVPool")
    inspect.signature(pool.set_mla_kv_buffer).bind(X, X, X, X, X)
    inspect.signature(pool.get_key_buffer).bind(X, 0)
    inspect.signature(sglang_types.ForwardBatch.get_max_chunk_capacity).bind(X)


def test_the_draft_extend_graph_runner():
    from sglang.srt.speculative import eagle_draft_extend_cuda_graph_runner as module

    build = module.EAGLEDraftExtendCudaGraphRunner.__init__
    inspect.signature(build).bind(X, X)
    inspect.signature(build).bind(X, X, draft_extend_attn_backend=X, speculative_num_steps=3)
    plain = module.get_batch_sizes_to_capture
    (width,) = [name for name in ("num_tokens_per_bs", "captured_req_width") if name in inspect.signature(plain).parameters]
    with adapter.draft_extend_sizes_in_tokens(4):
        counted = module.get_batch_sizes_to_capture
        assert (counted.func, counted.keywords) == (plain, {width: 4})
        inspect.signature(counted).bind(X)
    assert module.get_batch_sizes_to_capture is plain


def test_the_hooked_methods():
    from sglang.srt.server_args import ServerArgs

    assert list(inspect.signature(ServerArgs.check_server_args).parameters) == ["self"]
    for phase in ("decode", "prefill"):
        create = getattr(sglang_types.DraftBackendFactory, f"_create_{adapter.BACKEND_NAMES[0]}_{phase}_backend")
        assert list(inspect.signature(create.__wrapped__).parameters) == ["self"]


def test_deep_gemm_can_be_asked_for_its_sms():
    import deep_gemm

    assert callable(deep_gemm.get_num_sms)


def test_the_packages_are_those_that_sglang_pins():
    for package in ("sglang-kernel", "sgl-deep-gemm", "flashinfer_python", adapter.FLASH_MLA_DISTRIBUTION):
        assert adapter.package_problem(package) is None


def test_the_batch_has_every_field_that_is_read():
    read = {
        "batch_size", "forward_mode", "seq_lens", "seq_lens_cpu", "req_pool_indices", "extend_seq_lens", "extend_seq_lens_cpu",
        "out_cache_loc", "positions", "spec_info",
    }  # fmt: skip
    assert read <= {field.name for field in fields(sglang_types.ForwardBatch)}


def test_modes():
    modes = sglang_types.ForwardMode
    assert [mode for mode in modes if adapter.is_ragged_draft_extend(mode)] == [m for m in modes if m.name == "DRAFT_EXTEND"]
    assert {mode.name for mode in modes if adapter.is_draft_extend(mode)} <= {"DRAFT_EXTEND", "DRAFT_EXTEND_V2"}
    assert adapter.is_draft_extend(modes.DRAFT_EXTEND_V2)


def test_what_the_adapter_reads_from_the_process():
    assert adapter.attention_tp_size() == 1
    assert adapter.fuse_topk(False) is True
    assert adapter.fuse_topk(True) is True
    assert adapter.dense_prefill_limit() > 0
    assert adapter.in_prefill_graph() is False
    assert adapter.environment_problems() == []
    assert adapter.flashinfer_workspace_bytes() > 0
