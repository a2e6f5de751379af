"""Metadata of one replay: ours beside SGLang's own path, in one process and interleaved.

For draft decode SGLang's path comes in its three generations, all of which the installed release still holds: every step
computes its own metadata; it is computed once and copied tensor by tensor into every step; it is computed once and copied by
fused kernels (what the release does). target_verify and draft_extend compare with the release's replay, the only one it has.
SGLang 0.5.17 and later dropped the earlier generations: there, everything compares with the release's replay.

CPU time is the wall time of the replay call alone, before the graph is launched. GPU time is summed over kernels by torch's
profiler; ours is recorded in the graph, so its graph is replayed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from nsa_backend.adapters.installed import adapter
from nsa_backend.benchmarks.calls.builtin_replay import GENERATIONS, RELEASED
from nsa_backend.benchmarks.calls.h200 import LAUNCH_US, MEMORY_BYTES_PER_S
from nsa_backend.benchmarks.calls.timing import captured_graph, cpu_us, kernel_us
from nsa_backend.benchmarks.reports.cells import Cell
from nsa_backend.benchmarks.reports.report import print_table
from nsa_backend.kernels.plan import PAGE_SIZE
from nsa_backend.testing.calls import calls
from nsa_backend.testing.captured import DRAFT_EXTEND, MODES, Captured, CapturedRound, static_batch
from nsa_backend.testing.process import start_sglang
from nsa_backend.testing.runner import make_gpu_runner

SHAPES = [(1, 4096), (8, 16384), (32, 32768), (64, 65536), (64, 131072)]
"""(requests, length) of the tables; target_verify and draft_extend there have D = 4."""

CENTRE = {"steps": 4, "batch": 32, "length": 32768}
AXES = {
    "steps": (2, 3, 4, 5, 6, 7, 8),
    "batch": (1, 2, 4, 8, 16, 32, 64, 128),
    "length": (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072),
}
"""How cost grows: one axis at a time through the centre."""

CAPTURED_MODES = {"target_verify": MODES["target_verify"], "draft_extend": DRAFT_EXTEND}
NAMES = ("draft_decode", *CAPTURED_MODES)


def cells(options: argparse.Namespace, resources: ExitStack) -> list[Cell]:
    """Tables and the three axes; --steps, --batch and --length together name shapes of one's own instead."""
    start_sglang()
    repeats = (2, 20) if options.quick else (5, 40)
    return [
        Cell(f"{mode}, N = {steps}, {bs} x {length}", partial(measure_row, mode, bs, length, steps, *repeats), section)
        for section, mode, steps, bs, length in wanted(options)
    ]


def wanted(options: argparse.Namespace) -> list[tuple[str, str, int, int, int]]:
    """(section, mode, N, requests, length) of every cell, without repetition."""
    if options.steps or options.batch or options.length:
        return [
            ("rows", mode, steps, bs, length)
            for mode in NAMES
            for steps in options.steps or [CENTRE["steps"]]
            for bs in options.batch or [CENTRE["batch"]]
            for length in options.length or [CENTRE["length"]]
        ]
    shapes = SHAPES[:2] if options.quick else SHAPES
    found = [("rows", "draft_decode", steps, *shape) for steps in ((4,) if options.quick else (4, 8)) for shape in shapes]
    found += [("rows", mode, 3, *shape) for mode in CAPTURED_MODES for shape in shapes]
    if not options.quick:
        for mode in NAMES:
            points = [CENTRE | {axis: value} for axis, values in AXES.items() for value in values]
            found += dict.fromkeys(("growth", mode, p["steps"], p["batch"], p["length"]) for p in points)
    return found


def measure_row(mode: str, bs: int, length: int, num_steps: int, rounds: int, repeats: int) -> list[dict]:
    return [measure(mode, bs, length, num_steps, rounds, repeats)]


def batch_of(bs: int, length: int, num_steps: int) -> SimpleNamespace:
    """A graph runner's tensors, lengths a little apart so that nothing is uniform."""
    lengths = length - torch.arange(bs, device="cuda") % 50
    return static_batch(lengths, torch.randperm(bs, device="cuda") + 1, num_steps)


class Side:
    """One mode of one package: `call` is what SGLang calls before a replay, `device` what then runs on the GPU."""

    def __init__(self, classes: tuple, runner: Any, mode: str, batch: SimpleNamespace, num_steps: int, replay: Callable | None):
        backend_class, multi_step_class, in_graph = classes
        bs, rows = batch.batch_size, batch.batch_size * (num_steps + 1)
        if mode == "draft_decode":
            self.backend = multi_step_class(runner, 1, num_steps)
            self.backend.init_cuda_graph_state(bs, bs)
            captured = CapturedRound(self.backend, batch)
        else:
            self.backend = backend_class(runner)
            self.backend.init_cuda_graph_state(bs, rows)
            captured = Captured(self.backend, batch, CAPTURED_MODES[mode], rows)
        self.call = partial(replay, self.backend, batch, bs) if replay else captured.replay
        self.device = captured_graph(captured.in_graph).replay if in_graph else self.call


def sides(mode: str) -> dict[str, tuple[tuple, Callable | None]]:
    """By name: (backend class, multi-step class, whether its work is in the graph), and another way to call the replay."""
    from nsa_backend.backend import NativeSparseAttnBackend
    from nsa_backend.multi_step import NativeSparseAttnMultiStepBackend

    theirs = (*calls.builtin(), False)
    found = {"ours": ((NativeSparseAttnBackend, NativeSparseAttnMultiStepBackend, True), None), RELEASED: (theirs, None)}
    if mode == "draft_decode" and "dsa" not in adapter.BACKEND_NAMES:
        found |= {name: (theirs, replay) for name, replay in GENERATIONS.items()}
    return found


def moved_bytes(mode: str, bs: int, length: int, num_steps: int) -> int:
    """Bytes of the page tables: what is read of the request table, once, and every table written once."""
    page_rows = bs if mode == "draft_decode" else bs * (num_steps + 1)
    if adapter.TOPK_READS_PAGE_TABLE_1:
        return int(4 * (2 * bs * length + page_rows * length / PAGE_SIZE))
    return int(4 * (bs + page_rows) * length / PAGE_SIZE)


def measure(mode: str, bs: int, length: int, num_steps: int, rounds: int, repeats: int) -> dict:
    """One row: medians and spreads of every side, in turns."""
    batch = batch_of(bs, length, num_steps)
    runner = make_gpu_runner(num_steps=num_steps, context=max(length + 64, 8192), max_requests=bs + 1)
    req_to_token = runner.req_to_token_pool.req_to_token
    req_to_token.copy_(torch.randint(0, 2**20, req_to_token.shape, device="cuda"))
    found = {name: Side(classes, runner, mode, batch, num_steps, replay) for name, (classes, replay) in sides(mode).items()}
    samples = {name: {"cpu": [], "gpu": [], "launches": 0} for name in found}
    for _ in range(rounds):
        for name, side in found.items():
            samples[name]["cpu"] += cpu_us(side.call, repeats)
            gpu, samples[name]["launches"] = kernel_us(side.device, repeats)
            samples[name]["gpu"].append(gpu)
    moved = moved_bytes(mode, bs, length, num_steps)
    row = {"mode": mode, "steps": num_steps, "bs": bs, "length": length, "bytes": moved}
    row["floor_us"] = round(LAUNCH_US + 1e6 * moved / MEMORY_BYTES_PER_S, 2)
    for name, sample in samples.items():
        row[name] = {
            "cpu_us": round(statistics.median(sample["cpu"]), 2),
            "cpu_us_p10_p90": [round(q, 2) for q in quantiles(sample["cpu"])],
            "gpu_us": round(statistics.median(sample["gpu"]), 2),
            "gpu_us_min_max": [round(min(sample["gpu"]), 2), round(max(sample["gpu"]), 2)],
            "launches": samples[name]["launches"],
            "share_of_floor": round(row["floor_us"] / statistics.median(sample["gpu"]), 3),
        }
    return row


def quantiles(values: list[float]) -> tuple[float, float]:
    tenths = statistics.quantiles(values, n=10)
    return tenths[0], tenths[-1]


def show(report: dict) -> None:
    """Medians with their spread: min to max over rounds on the GPU, 10th to 90th percentile on the CPU."""

    def gpu(side: dict) -> str:
        return f"{side['gpu_us']:.1f} ({side['gpu_us_min_max'][0]:.1f}-{side['gpu_us_min_max'][1]:.1f})"

    def cpu(side: dict) -> str:
        return f"{side['cpu_us']:.1f} ({side['cpu_us_p10_p90'][0]:.1f}-{side['cpu_us_p10_p90'][1]:.1f})"

    columns = ("mode", "N", "bs x L", "floor us", "side", "launches", "GPU us", "share of floor", "CPU us")
    table = []
    for r in report.get("rows", []) + report.get("growth", []):
        for name in ("ours", RELEASED, *GENERATIONS):
            if name in r:
                side, what = r[name], (r["mode"], r["steps"], f"{r['bs']} x {r['length']}", r["floor_us"], name)
                table.append((*what, f"{side['launches']:.0f}", gpu(side), f"{side['share_of_floor']:.2f}", cpu(side)))
    print_table(columns, table)
