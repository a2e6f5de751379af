"""What stops a rank as it builds its backend: one sentence each; tests/releases/test_refused.py has what options alone tell."""

import pytest
import torch

from nsa_backend import config
from nsa_backend.adapters import shared
from nsa_backend.adapters.installed import adapter
from nsa_backend.attention.implementations import build_attention
from nsa_backend.config import AttentionConfig


def test_model_without_index_topk(make_runner):
    runner = make_runner()
    runner.model_config.hf_config.index_topk = None
    with pytest.raises(ValueError, match="DeepseekV32ForCausalLM has none: choose another --attention-backend"):
        config.BackendConfig.from_runner(runner)


def test_page_size_of_the_pool(make_runner):
    runner = make_runner()
    runner.page_size = 32
    with pytest.raises(ValueError, match="--page-size 32: pass --page-size 64"):
        config.BackendConfig.from_runner(runner)


def test_topk_that_sgl_kernel_cannot_select(make_runner):
    runner = make_runner(index_topk=1024)
    runner.device = "cuda"
    with pytest.raises(ValueError, match="keeps index_topk = 1024 tokens and sgl-kernel's top-k is built for 2048"):
        config.BackendConfig.from_runner(runner)


@pytest.mark.parametrize(
    ("name", "changed", "reason"),
    [
        ("fa3", {"device_sm": 100}, r"FA3 is built for Hopper \(SM90\) and this device is SM100"),
        ("fa3", {"device_sm": 0}, "this device is no GPU"),
        ("fa3", {"kv_cache_dtype": torch.float8_e4m3fn}, "reads a bfloat16 KV cache and this one is torch.float8_e4m3fn"),
        ("flashmla_sparse", {"device_sm": 100}, r"Hopper \(SM90\) alone"),
        ("flashmla_sparse", {"kv_cache_dtype": torch.float8_e4m3fn}, "reads a bfloat16 KV cache"),
        ("flashmla_kv", {}, "reads an fp8_e4m3 KV cache and this one is torch.bfloat16: pass --kv-cache-dtype fp8_e4m3"),
        ("flashmla_kv", {"device_sm": 100, "kv_cache_dtype": torch.float8_e4m3fn}, r"Hopper \(SM90\) alone"),
        ("flashmla_kv", {"num_heads": 192, "kv_cache_dtype": torch.float8_e4m3fn}, "at most 128 query heads a rank"),
        (
            "flashmla_kv",
            {"page_size": 32, "kv_cache_dtype": torch.float8_e4m3fn},
            "pages of 64 tokens",
        ),
        ("flashmla_kv", {"index_topk": 100, "kv_cache_dtype": torch.float8_e4m3fn}, "index_topk in multiples of 64"),
        ("flashmla_sparse", {"index_topk": 192}, "index_topk in multiples of 128 and this model has 192"),
        ("sparse_decode", {"device_sm": 100}, r"Hopper \(SM90\) alone so far and this device is SM100"),
        ("sparse_decode", {"kv_cache_dtype": torch.float8_e5m2}, "reads a bfloat16 or fp8_e4m3 KV cache"),
        ("sparse_decode", {"kv_cache_dtype": torch.float8_e4m3fn, "latent_dim": 256}, "four groups of 128 and this model's"),
        ("sparse_decode", {"prefill": True}, f"made for few rows: name it for {adapter.DECODE_OPTION} alone"),
        ("sparse_decode", {"sinks": True}, "its kernel adds none"),
        ("sparse_verify", {"prefill": True}, f"made for few rows: name it for {adapter.DECODE_OPTION} alone"),
        ("sparse_verify", {"num_heads": 128}, "a tile has 64 heads and this rank has 128: raise --tp-size"),
        ("sparse_verify", {"num_heads": 128, "context_ranks": 8}, "this rank has 128: lower --dcp-size"),
        ("sparse_verify", {"latent_dim": 256}, "written for a latent of 512 and RoPE of 64 values, and these are 256"),
        ("sparse_prefill", {}, f"made for the rows of a prompt: name it for {adapter.PREFILL_OPTION} alone"),
        ("sparse_prefill", {"prefill": True}, "rows of up to 32 heads together and this rank has 64: raise --tp-size"),
        ("sparse_prefill", {"prefill": True, "num_heads": 16, "device_sm": 100}, "written for Hopper .* this device is SM100"),
        (
            "sparse_prefill",
            {"prefill": True, "num_heads": 16, "kv_cache_dtype": torch.float8_e5m2},
            "reads a bfloat16 or fp8_e4m3 KV cache and this one is torch.float8_e5m2",
        ),
        ("sparse_prefill", {"prefill": True, "num_heads": 16, "index_topk": 8192}, "choose 32768 slots, and it has room for"),
        ("trtllm", {}, r"built for Blackwell \(SM100, SM103\) and this device is SM90"),
        ("trtllm", {"device_sm": 120}, "this device is SM120"),
        ("trtllm", {"device_sm": 0}, "this device is no GPU"),
        ("trtllm", {"device_sm": 100, "kv_cache_dtype": torch.float8_e5m2}, "a bfloat16 or fp8_e4m3 KV cache"),
        ("trtllm", {"device_sm": 100, "page_size": 16}, "pages of 32 or 64 tokens"),
        (
            "trtllm",
            {"device_sm": 103, "kv_cache_dtype": torch.float8_e4m3fn, "partner": "flashmla_kv"},
            f"pass {adapter.PREFILL_OPTION} trtllm too",
        ),
        (
            "trtllm",
            {"device_sm": 100, "kv_cache_dtype": torch.float8_e4m3fn, "partner": "flashmla_sparse", "prefill": True},
            f"pass {adapter.DECODE_OPTION} trtllm too",
        ),
        ("auto", {"device_name": "NVIDIA H100"}, "measured on NVIDIA H200 and this device is NVIDIA H100: unset it"),
        ("torch", {}, "reference for machines without a GPU"),
        ("tilelang", {}, "no such implementation"),
    ],
)
def test_an_implementation_that_cannot_run_says_why_and_which_can(name, changed, reason):
    facts = {"device_sm": 90, "num_heads": 64, "kv_cache_dtype": torch.bfloat16, "index_topk": 2048} | changed
    with pytest.raises(ValueError, match=rf"--nsa-decode-backend {name} cannot run here: .*{reason}.*Choose one of: "):
        build_attention(name, f"--nsa-decode-backend {name}", AttentionConfig(**facts))


def test_an_implementation_gives_all_its_reasons():
    facts = {"device_sm": 100, "num_heads": 192, "kv_cache_dtype": torch.bfloat16, "index_topk": 100}
    with pytest.raises(
        ValueError, match=r"\(SM90\) alone so far; it reads an fp8_e4m3 .*; it takes at most 128 .*; .* multiples of 64 "
    ):
        build_attention("flashmla_kv", "--nsa-decode-backend flashmla_kv", AttentionConfig(**facts))


@pytest.mark.parametrize(("topk", "num_steps", "message"), [(2, 3, "--speculative-eagle-topk 2"), (1, 1, "N >= 2")])
def test_multi_step_refuses(make_runner, topk, num_steps, message):
    from nsa_backend.multi_step import NativeSparseAttnMultiStepBackend

    with pytest.raises(ValueError, match=message):
        NativeSparseAttnMultiStepBackend(make_runner(), topk, num_steps)


NEEDED = {
    "fa3": "sglang-kernel",
    "flashmla_sparse": adapter.FLASH_MLA_DISTRIBUTION,
    "flashmla_kv": adapter.FLASH_MLA_DISTRIBUTION,
    "trtllm": "flashinfer_python",
}


@pytest.mark.parametrize(("package", "name"), [(package, name) for name, package in NEEDED.items()])
@pytest.mark.parametrize("installed", [None, "0.0.1"])
def test_an_implementation_whose_package_is_missing_or_another_release(monkeypatch, package, name, installed):
    def version(asked):
        if asked == package:
            if installed is None:
                raise shared.PackageNotFoundError
            return installed
        return real(asked)

    real = shared.version
    monkeypatch.setattr(shared, "version", version)
    facts = {"device_sm": 100 if name == "trtllm" else 90, "num_heads": 64, "index_topk": 2048}
    facts["kv_cache_dtype"] = torch.float8_e4m3fn if name == "flashmla_kv" else torch.bfloat16
    found = "is not installed" if installed is None else "0.0.1 is installed"
    pin = rf"{package}(\[\w+\])?==\S+"
    with pytest.raises(ValueError, match=rf"{package} {found} and SGLang \S+ needs {pin}: pip install '{pin}'"):
        build_attention(name, f"--nsa-decode-backend {name}", AttentionConfig(**facts))


@pytest.mark.parametrize("package", ["sglang-kernel", "sgl-deep-gemm"])
def test_an_indexer_without_its_packages(make_runner, monkeypatch, package):
    runner = make_runner(index_topk=2048)
    runner.device = "cuda"
    monkeypatch.setattr(adapter, "package_problem", lambda name: f"{name} is missing" if name == package else None)
    with pytest.raises(ValueError, match=f"^{package} is missing$"):
        config.BackendConfig.from_runner(runner)


def test_a_context_beyond_the_table(make_runner):
    runner = make_runner(table_width=700)
    runner.model_config.context_len = 701
    with pytest.raises(ValueError, match="--context-length 701 is beyond the 700 tokens"):
        config.BackendConfig.from_runner(runner)
