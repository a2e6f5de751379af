"""Figures from result files: tokens per second, attention by rows, how the metadata of a replay grows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {
    "fa3": "#3b6fb6", "flashmla_sparse": "#d1702f", "sparse_decode": "#3f8f4f", "ours": "#3b6fb6", "floor": "#444444",
    "builtin": "#d1702f", "builtin_precompute": "#9a9a9a", "builtin_per_step": "#c9c9c9",
}  # fmt: skip
GENERATIONS = {
    "builtin_per_step": "SGLang, every step by itself",
    "builtin_precompute": "SGLang, computed once, copied",
    "builtin": "SGLang 0.5.12.post1, fused copies",
    "ours": "ours",
}
"""Side of a metadata row to its label, oldest first."""

SERVERS = {"ours": "ours", "builtin": "SGLang's built-in"}
"""Side of a serving row to its label."""

CENTRE = {"steps": 4, "bs": 32, "length": 32768}
AXES = {"steps": "draft steps N", "bs": "requests", "length": "tokens of a request"}
FIXED = {"steps": "{steps} steps", "bs": "{bs} requests", "length": "{length} tokens"}
"""The point through which each axis of `growth` runs, and how a panel names what stays the same."""


def draw_all(results: Path, out: Path) -> Iterator[Path]:
    """Draw every figure that `results` has a file for into `out`, and yield its files.

    Raises:
        SystemExit: a file is missing.
    """
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "nsa_backend"  # the same numbers give the same file
    out.mkdir(parents=True, exist_ok=True)
    for name, (result, draw) in FIGURES.items():
        source = results / f"{result}_h200.json"
        if not source.exists():
            raise SystemExit(f"{source} does not exist: pass the folder with the result files as --results")
        figure = draw(json.loads(source.read_text()))
        for suffix in ("svg", "png"):
            path = out / f"{name}.{suffix}"
            figure.savefig(path, dpi=130, bbox_inches="tight", metadata={"Date": None} if suffix == "svg" else None)
            yield path


def attention(report: dict[str, Any]) -> Figure:
    """Time of a call by rows, one panel a head count; all implementations that a bfloat16 cache has."""
    from matplotlib.figure import Figure

    panels = [found for found in report["by_rows"] if found["kv"] == "bf16" and found["heads"] in (16, 64, 128)]
    figure = Figure(figsize=(11, 3.4))
    axes = figure.subplots(1, len(panels), sharey=True)
    for axis, found in zip(axes, panels, strict=True):
        rows = found["rows"]
        for name in found["passes"][0]:
            mean = [sum(times) / len(times) for times in zip(*(one[name] for one in found["passes"]), strict=True)]
            axis.plot(rows, mean, label=name, color=COLOURS[name], linewidth=1.4)
        axis.set(title=f"{found['heads']} heads", xlabel="query rows", xscale="log", yscale="log")
        axis.set_xticks([1, 4, 16, 64, 256], ["1", "4", "16", "64", "256"])
        axis.minorticks_off()
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("us a call")
    axes[0].set_yticks([10, 20, 50, 100, 200, 500], ["10", "20", "50", "100", "200", "500"])
    axes[0].legend(frameon=False)
    figure.suptitle(_where("Sparse MLA decode, 2048 of a million tokens, bfloat16 KV", report), y=1.04)
    return figure


def metadata(report: dict[str, Any]) -> Figure:
    """GPU time of a draft replay's metadata by steps, requests and length: ours, SGLang's three generations, the floor."""
    from matplotlib.figure import Figure

    rows = [r for r in report["growth"] if r["mode"] == "draft_decode"]
    figure = Figure(figsize=(11, 3.4))
    for axis, (name, label) in zip(figure.subplots(1, 3, sharey=True), AXES.items(), strict=True):
        line = sorted((r for r in rows if all(r[k] == v for k, v in CENTRE.items() if k != name)), key=lambda r: r[name])
        values = [r[name] for r in line]
        for side, text in GENERATIONS.items():
            axis.plot(values, [r[side]["gpu_us"] for r in line], label=text, color=COLOURS[side], marker="o", markersize=3)
        axis.plot(values, [r["floor_us"] for r in line], label="floor", color=COLOURS["floor"], linestyle=":")
        fixed = (text.format(**CENTRE) for key, text in FIXED.items() if key != name)
        axis.set(xlabel=label, yscale="log", title=", ".join(fixed))
        if name != "steps":
            axis.set_xscale("log", base=2)
            axis.set_xticks(values, [f"{v // 1024}K" if name == "length" else str(v) for v in values], fontsize=8)
        axis.minorticks_off()
        axis.grid(alpha=0.25)
    axes = figure.axes
    axes[0].set_ylabel("us on the GPU")
    axes[0].set_yticks([1, 3, 10, 30, 100, 300], ["1", "3", "10", "30", "100", "300"])
    figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, ncols=5, loc="lower center", bbox_to_anchor=(0.5, -0.14))
    figure.suptitle(_where("Metadata of one draft replay", report), y=1.06)
    return figure


def serve(report: dict[str, Any]) -> Figure:
    """Tokens per second by draft steps, shortest prompts; a panel a checkpoint and batch; a thin line spans least and most."""
    from matplotlib.figure import Figure

    shortest = min(r["length"] for r in report["rows"])
    rows = [r for r in report["rows"] if r["length"] == shortest]
    checkpoints, batches, steps = (list(dict.fromkeys(r[key] for r in rows)) for key in ("checkpoint", "batch", "steps"))
    figure = Figure(figsize=(11, 2.6 * len(checkpoints)))
    grid = figure.subplots(len(checkpoints), len(batches), squeeze=False)
    for axis, (checkpoint, batch) in zip(grid.flat, product(checkpoints, batches), strict=True):
        found = [r for r in rows if (r["checkpoint"], r["batch"]) == (checkpoint, batch)]
        for shift, (side, text) in zip((-0.2, 0.2), SERVERS.items(), strict=True):
            rates = [r[side]["tokens_per_s"] for r in found]
            middle = [rate["median"] for rate in rates]
            ends = [[abs(rate["min_max"][end] - rate["median"]) for rate in rates] for end in (0, 1)]
            places = [steps.index(r["steps"]) + shift for r in found]
            axis.bar(places, middle, 0.38, label=text, color=COLOURS[side], yerr=ends, error_kw={"linewidth": 0.8})
        axis.set(title=f"{checkpoint}, batch {batch}", xticks=range(len(steps)), xticklabels=[f"N = {n}" for n in steps])
        axis.grid(axis="y", alpha=0.25)
    for row in grid:
        row[0].set_ylabel("tokens per second")
    grid[0][0].legend(frameon=False)
    figure.suptitle(_where(f"Serving over HTTP, N draft steps, prompts of {shortest} tokens", report))
    figure.tight_layout()
    return figure


def _where(title: str, report: dict[str, Any]) -> str:
    environment = report["environment"]
    return f"{title} ({environment['gpu']}, SGLang {environment['packages']['sglang']}, {environment['date']})"


FIGURES = {
    "serve": ("serve", serve),
    "attention": ("auto_0_5_23", attention),
    "metadata": ("metadata", metadata),
}
"""Figure to its result file (without _h200.json) and the function that draws it."""
