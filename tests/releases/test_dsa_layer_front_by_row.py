"""Projections of few rows without tensor cores: which of a layer's they are, and what is left to SGLang's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from layer_on_cpu import HIDDEN, ROWS, BlockFp8, a_layer
from sglang.srt.layers.quantization import fp8
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from test_dsa_layer_front import prepared, recorded

from nsa_backend.adapters.dsa.layer_front import by_row, front, options, projections
from nsa_backend.adapters.dsa.layer_front.by_row import ByRow, multiply_by_row
from nsa_backend.kernels import row_products as kernel
from nsa_backend.kernels.layer_front_torch import product_torch, quantise
from nsa_backend.kernels.layer_front_weights import GROUP, Scales
from nsa_backend.testing.interpreter import round_as_a_gpu_does


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Tiles of which a layer on the CPU has whole ones."""
    round_as_a_gpu_does()
    monkeypatch.setattr(kernel, "SERVED", kernel.Tile(columns=16, step=128, stages=2))


@pytest.mark.parametrize(("fused", "form"), [(False, Scales.POWERS_OF_TWO), (True, Scales.EXACT)], ids=["deepseek", "glm"])
def test_a_layer_has_them_before_its_norms_and_behind(monkeypatch, fused, form):
    """What is behind each is a kernel of ours; with one row more than there may be, sums are divided as before."""
    layers = a_layer(monkeypatch, fused=fused)
    layer = next(layers)
    for path in ("fused_qkv_a_proj_with_mqa", "q_b_proj", "indexer.wq_b", *([] if fused else ["indexer.wk"])):
        layer.set_submodule(path, BlockFp8(layer.get_submodule(path), form))
    for module in (front, projections):
        monkeypatch.setattr(module, "scales_of", lambda linear: linear.form)
    monkeypatch.setattr(projections, "LEAST_INNER", HIDDEN)
    monkeypatch.setenv(options.ROW_PRODUCTS, "1")
    launched, found, launches = [], [], []
    for module, name in (
        *((projections, name) for name in ("quantise", "split_products", "row_products")),
        *((front, name) for name in ("norm_rope_store", "rope_quantise")),
    ):
        recorded(launched, module, name, monkeypatch)
    slots = torch.tensor([70, 200, 65, 131, 255])
    for most in (ROWS, ROWS - 1):
        for module in (kernel, by_row):
            monkeypatch.setattr(module, "MOST_ROWS", most)
        found.append(prepared(layer, monkeypatch, ForwardMode.DECODE, True, slots))
        launches.append([name for name, _ in launched])
        assert [before_ours for _, before_ours in launched] == [True] * (len(launched) - 1) + [False]
        launched.clear()
    assert launches[0] == ["row_products", "norm_rope_store", "row_products", "rope_quantise"]
    assert launches[1] == ["quantise", "split_products", "norm_rope_store", "split_products", "rope_quantise"]
    ours, divided = found
    for name in ("q_rope", "q_nope"):
        assert (ours[name] - divided[name]).float().norm() < 0.01 * divided[name].float().norm()
    assert (ours["kv"][slots] - divided["kv"][slots]).float().norm() < 0.01 * divided["kv"][slots].float().norm()
    layers.close()


@pytest.fixture
def linear(monkeypatch):
    """A block-FP8 layer of SGLang's as it is on Hopper, but for its weights' device; 192 columns of 256."""
    from sglang.srt.layers import deep_gemm_wrapper
    from sglang.srt.layers.quantization import fp8_utils

    backend = SimpleNamespace(is_auto=lambda: True, is_deep_gemm=lambda: False)
    monkeypatch.setattr(fp8_utils, "get_fp8_gemm_runner_backend", lambda: backend)
    monkeypatch.setattr(deep_gemm_wrapper, "ENABLE_JIT_DEEPGEMM", True)
    monkeypatch.setattr(deep_gemm_wrapper, "DEEPGEMM_SCALE_UE8M0", False)
    config = fp8.Fp8Config(True, "dynamic", None, [GROUP, GROUP])
    config.scale_fmt = "ue8m0"
    weight = torch.randn(192, 256).to(torch.float8_e4m3fn)
    return SimpleNamespace(
        quant_method=fp8.Fp8LinearMethod(config), prefix="o_proj", weight=weight, weight_scale_inv=torch.rand(2, 2)
    )


def test_a_layer_of_sglangs_multiplies_few_quantised_rows_so(linear, monkeypatch):
    """From its method's `apply`, which hands over keywords."""
    own = linear.quant_method.w8a8_block_fp8_linear
    multiply_by_row(linear)
    assert linear.quant_method.w8a8_block_fp8_linear is own  # nobody asked
    monkeypatch.setenv(options.ROW_PRODUCTS, "1")
    for _ in range(2):
        multiply_by_row(linear)
    replaced = linear.quant_method.w8a8_block_fp8_linear
    assert isinstance(replaced, ByRow)
    assert replaced.own is own
    assert replaced.func is own.func  # by which SGLang tells DeepGEMM's
    assert projections.scales_of(linear) is Scales.POWERS_OF_TWO
    values, scales = quantise(torch.randn(3, 256), Scales.POWERS_OF_TWO)
    found = linear.quant_method.apply(linear, (values, scales))
    wanted = product_torch(values, scales, linear.weight, linear.weight_scale_inv)
    assert (found - wanted).float().norm() < 0.01 * wanted.float().norm()


@pytest.mark.parametrize("change", ["many rows", "no rows", "rows of bfloat16", "a bias", "weights in bfloat16 too"])
def test_all_else_is_sglangs(linear, monkeypatch, change):
    monkeypatch.setenv(options.ROW_PRODUCTS, "1")
    asked = []
    linear.quant_method.w8a8_block_fp8_linear = lambda *given, **named: asked.append((given, named)) or "SGLang's"
    multiply_by_row(linear)
    rows = {"many rows": kernel.MOST_ROWS + 1, "no rows": 0}.get(change, 2)
    x, scales = quantise(torch.randn(rows, 256), Scales.EXACT)
    given = {"input_scale": scales, "bias": None}
    if change == "rows of bfloat16":
        given["input_scale"] = None
    elif change == "a bias":
        given["bias"] = torch.zeros(192)
    elif change == "weights in bfloat16 too":
        given["weight_bf16"] = linear.weight.bfloat16()
    call = linear.quant_method.w8a8_block_fp8_linear
    assert call(input=x, weight=linear.weight, block_size=[GROUP, GROUP], weight_scale=linear.weight_scale_inv, **given) == (
        "SGLang's"
    )
    ((positional, named),) = asked
    assert positional[0] is x
    assert named == given


def test_weights_of_which_no_tile_is_whole_are_sglangs(linear, monkeypatch):
    monkeypatch.setenv(options.ROW_PRODUCTS, "1")
    monkeypatch.setattr(kernel, "SERVED", kernel.Tile(step=512))
    own = linear.quant_method.w8a8_block_fp8_linear
    multiply_by_row(linear)
    assert linear.quant_method.w8a8_block_fp8_linear is own


def test_they_need_our_front(monkeypatch):
    args = SimpleNamespace(**{rule.attribute: rule.served[0] for rule in options.NEEDED}, kv_cache_dtype="auto")
    args.dsa_decode_backend = args.dsa_prefill_backend = None
    assert options.dependent_problems(args) == []
    monkeypatch.setenv("NSA_BACKEND_LAYER_FRONT", "0")
    (sentence,) = options.dependent_problems(args)
    assert sentence == "NSA_BACKEND_LAYER_FRONT=0 leaves SGLang's front, and they need ours: unset one"
