"""What every benchmark shares: the environment it ran in, a model runner without a model, a table."""

from __future__ import annotations

import datetime
import os
import statistics
import subprocess
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace

import torch


def start_host() -> None:
    """Load SGLang's plugins and its single-rank parallel state."""
    from sglang.srt.plugins import load_plugins

    from nsa_backend.testing.cpu_process import start_single_rank

    load_plugins()
    start_single_rank()


def environment(gpus: int = 1) -> dict:
    """GPU, or how many of which, versions, commit and date, for the head of a result file."""
    packages = {}
    for name in ("torch", "triton", "sglang", "sglang-kernel", "sgl-deep-gemm", "sgl-flash-mla", "flashinfer-python"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    commit = (
        os.environ.get("NSA_BENCH_COMMIT")
        or subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    )
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "gpu": name if gpus == 1 else f"{gpus} x {name}",
        "packages": packages,
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }


def accept_length(histogram: list[int]) -> float:
    """Mean tokens a round (accepted drafts and the bonus), from SGLang's count of rounds by correct drafts."""
    rounds = sum(histogram)
    return sum((drafts + 1) * count for drafts, count in enumerate(histogram)) / rounds if rounds else 0.0


def captured_graph(launch) -> torch.cuda.CUDAGraph:
    """A graph of one call of `launch`, which is warmed up first."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph


def interleaved(replays: dict[str, Callable[[], object]], repeats: int, samples: int) -> dict[str, tuple[float, list[float]]]:
    """Median microseconds of one call, and the least and the most, where each replay makes `repeats` calls.

    The replays take turns, so that a clock that wanders meets all of them alike.
    """
    found = {name: [] for name in replays}
    for sample in range(samples + 1):
        for name, replay in replays.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            replay()
            end.record()
            end.synchronize()
            if sample:  # the first warms up
                found[name].append(1e3 * start.elapsed_time(end) / repeats)
    return {name: (statistics.median(us), [min(us), max(us)]) for name, us in found.items()}


def kernel_us(call, repeats: int) -> tuple[float, float]:
    """(kernel microseconds, kernel launches) of one call, by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(e.device_time_total for e in events) / repeats, len(events) / repeats


def fake_runner(
    *, num_steps: int, context: int, max_requests: int = 128, heads: int = 64, num_draft_tokens: int | None = None
) -> SimpleNamespace:
    """What both backends read from SGLang's ModelRunner, in DeepSeek-V3.2's shape."""
    from nsa_backend.benchmarks import entry_points

    width = context + 4 + num_steps + 1
    slots = torch.zeros(max_requests + 1, width, dtype=torch.int32, device="cuda")
    return SimpleNamespace(
        device="cuda",
        page_size=64,
        is_draft_worker=True,
        kv_cache_dtype=torch.bfloat16,
        req_to_token_pool=SimpleNamespace(req_to_token=slots, size=max_requests),
        token_to_kv_pool=SimpleNamespace(
            dtype=torch.bfloat16,
            page_size=64,
            size=2**20 - 64,
            kv_cache_dim=576,
            start_layer=0,
            nsa_kv_cache_store_fp8=False,
            dsa_kv_cache_store_fp8=False,
        ),
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(architectures=["DeepseekV32ForCausalLM"], index_topk=2048),
            num_attention_heads=heads,
            context_len=context,
            qk_nope_head_dim=128,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
        ),
        server_args=entry_points.server_args(num_steps, num_draft_tokens or num_steps + 1),
        hisparse_coordinator=None,
        max_running_requests=max_requests,
    )


def print_table(columns: tuple[str, ...], rows: list[tuple]) -> None:
    """Print a table as wide as it needs to be; floats with one digit after the point."""
    from rich.box import MARKDOWN
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, box=MARKDOWN)
    for row in rows:
        table.add_row(*("" if cell is None else f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in row))
    Console(width=240, soft_wrap=True).print(table)
