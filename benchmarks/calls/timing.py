"""Microseconds of calls and captured graphs, on the GPU and on the host; needs a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


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


def right_ones(
    calls: dict[str, Callable], distance: Callable[[Callable], float], too_far: float, reference: str
) -> tuple[dict[str, Callable], dict[str, str]]:
    """Those of `calls` whose relative `distance` from `reference` is below `too_far`, and what is wrong with each other one."""
    right, wrong = {}, {}
    for name, call in calls.items():
        try:
            far = distance(call)
        except Exception as error:  # whatever a library or a compiler raises is a finding
            wrong[name] = (str(error) or type(error).__name__).splitlines()[0]
            continue
        if far < too_far:
            right[name] = call
        else:
            wrong[name] = f"relative distance from {reference} {far:.1e}"
    return right, wrong


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


def cpu_us(call: Callable[[], None], repeats: int) -> list[float]:
    """Wall microseconds of each of `repeats` calls, an idle GPU before each."""
    out = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        out.append(1e6 * (time.perf_counter() - started))
    return out
