"""Metadata of one replay: ours beside SGLang's released path, in one process and interleaved.

    python benchmarks/bench_metadata.py OUT.json [--quick]

draft decode compares with the built-in multi-step backend's replay (precompute once, fused copies); target_verify and
draft_extend with the built-in backend's replay. CPU time is the wall time of the replay call alone, before the graph is
launched. GPU time is summed over kernels by torch's profiler; ours is recorded in the graph, so its graph is replayed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench_common import captured_graph, environment, fake_runner, forward_modes, kernel_us, print_table, start_host

HBM_BYTES_PER_US = 4.3e6  # device copies on an H200, read and written bytes together
LAUNCH_US = 1.3
SHAPES = [(1, 4096), (8, 16384), (32, 32768), (64, 65536)]


def static_batch(bs: int, length: int, num_steps: int) -> SimpleNamespace:
    """A graph runner's tensors, lengths a little apart so that nothing is uniform."""
    lengths = length - torch.arange(bs, device="cuda") % 50
    return SimpleNamespace(
        batch_size=bs,
        seq_lens=lengths.to(torch.int32),
        seq_lens_cpu=lengths.cpu().to(torch.int32),
        req_pool_indices=torch.randperm(bs, device="cuda") + 1,
        spec_info=SimpleNamespace(num_accept_tokens=torch.full((bs,), num_steps, dtype=torch.int32, device="cuda")),
    )


class Side:
    """One mode of one package: `call` is what SGLang calls before a replay, `device` what then runs on the GPU."""

    def __init__(self, classes, runner, mode: str, batch: SimpleNamespace, num_steps: int):
        backend_class, multi_step_class, launch_of = classes
        bs, rows = batch.batch_size, batch.batch_size * (num_steps + 1)
        if mode == "draft_decode":
            self.backend = multi_step_class(runner, 1, num_steps)
            self.backend.init_cuda_graph_state(bs, bs)
            self.backend.init_forward_metadata_capture_cuda_graph(batch)
            self.call = lambda: self.backend.init_forward_metadata_replay_cuda_graph(batch, bs)
        else:
            forward_mode = forward_modes()[mode]
            self.backend = backend_class(runner)
            self.backend.init_cuda_graph_state(bs, rows)
            self.backend.init_forward_metadata_capture_cuda_graph(
                bs, rows, batch.req_pool_indices, batch.seq_lens, None, forward_mode, batch.spec_info
            )
            self.call = lambda: self.backend.init_forward_metadata_replay_cuda_graph(
                bs, batch.req_pool_indices, batch.seq_lens, 0, None, forward_mode, batch.spec_info, batch.seq_lens_cpu
            )
        launch = launch_of(self.backend)
        self.device = captured_graph(launch).replay if launch else self.call


def sides() -> dict[str, tuple]:
    """Backend class, multi-step class, and the launch that our graphs record; SGLang's work all happens in the call."""
    from sglang.srt.layers.attention import nsa_backend as builtin

    from nsa_backend.backend import NativeSparseAttnBackend
    from nsa_backend.multi_step import NativeSparseAttnMultiStepBackend

    def recorded(backend):
        return backend._launch if isinstance(backend, NativeSparseAttnMultiStepBackend) else backend.captured._launch

    return {
        "ours": (NativeSparseAttnBackend, NativeSparseAttnMultiStepBackend, recorded),
        "builtin": (builtin.NativeSparseAttnBackend, builtin.NativeSparseAttnMultiStepBackend, lambda backend: None),
    }


def cpu_us(call, repeats: int) -> list[float]:
    out = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        out.append(1e6 * (time.perf_counter() - started))
    return out


def floor_us(mode: str, bs: int, length: int, num_steps: int) -> float:
    """Bytes of the page tables, read once and written once, over the copy bandwidth, and one launch."""
    page_rows = bs if mode == "draft_decode" else bs * (num_steps + 1)
    moved = 4 * (2 * bs * length + page_rows * length / 64)
    return LAUNCH_US + moved / HBM_BYTES_PER_US


def measure(mode: str, bs: int, length: int, num_steps: int, rounds: int, repeats: int) -> dict:
    batch = static_batch(bs, length, num_steps)
    runner = fake_runner(num_steps=num_steps, context=max(length + 64, 8192), max_requests=bs + 1)
    req_to_token = runner.req_to_token_pool.req_to_token
    req_to_token.copy_(torch.randint(0, 2**20, req_to_token.shape, device="cuda"))
    pair = {name: Side(classes, runner, mode, batch, num_steps) for name, classes in sides().items()}
    samples = {name: {"cpu": [], "gpu": [], "launches": 0} for name in pair}
    for _ in range(rounds):
        for name, side in pair.items():
            samples[name]["cpu"] += cpu_us(side.call, repeats)
            gpu, samples[name]["launches"] = kernel_us(side.device, repeats)
            samples[name]["gpu"].append(gpu)
    row = {
        "mode": mode,
        "steps": num_steps,
        "bs": bs,
        "length": length,
        "floor_us": round(floor_us(mode, bs, length, num_steps), 2),
    }
    for name, sample in samples.items():
        row[name] = {
            "cpu_us": round(statistics.median(sample["cpu"]), 2),
            "cpu_us_p10_p90": [round(q, 2) for q in quantiles(sample["cpu"])],
            "gpu_us": round(statistics.median(sample["gpu"]), 2),
            "gpu_us_min_max": [round(min(sample["gpu"]), 2), round(max(sample["gpu"]), 2)],
            "launches": samples[name]["launches"],
        }
    return row


def quantiles(values: list[float]) -> tuple[float, float]:
    tenths = statistics.quantiles(values, n=10)
    return tenths[0], tenths[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--quick", action="store_true", help="two shapes, four steps")
    args = parser.parse_args()
    start_host()
    shapes = SHAPES[:2] if args.quick else SHAPES
    rows = []
    for num_steps in (4,) if args.quick else (4, 8):
        rows += [measure("draft_decode", bs, length, num_steps, rounds=5, repeats=40) for bs, length in shapes]
    for mode in ("target_verify", "draft_extend"):
        rows += [measure(mode, bs, length, 3, rounds=5, repeats=40) for bs, length in shapes]
    report = {"environment": environment(), "rows": rows}
    args.out.write_text(json.dumps(report, indent=1))
    show(report)


def show(report: dict) -> None:
    """Configuration, then medians with their spread: min to max over rounds on the GPU, 10th to 90th percentile on the CPU."""

    def gpu(side: dict) -> str:
        return f"{side['gpu_us']:.1f} ({side['gpu_us_min_max'][0]:.1f}-{side['gpu_us_min_max'][1]:.1f})"

    def cpu(side: dict) -> str:
        return f"{side['cpu_us']:.1f} ({side['cpu_us_p10_p90'][0]:.1f}-{side['cpu_us_p10_p90'][1]:.1f})"

    print(report["environment"])
    columns = ("mode", "N", "bs x L", "floor us", "ours GPU us", "built-in", "ours CPU us", "built-in", "launches")
    table = []
    for r in report["rows"]:
        ours, builtin = r["ours"], r["builtin"]
        launches = f"{ours['launches']:.0f} / {builtin['launches']:.0f}"
        shape = f"{r['bs']} x {r['length']}"
        table.append((r["mode"], r["steps"], shape, r["floor_us"], gpu(ours), gpu(builtin), cpu(ours), cpu(builtin), launches))
    print_table(columns, table)


if __name__ == "__main__":
    main()
