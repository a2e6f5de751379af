"""Figures from result files: attention by rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {"fa3": "#3b6fb6", "flashmla_sparse": "#d1702f", "sparse_decode": "#3f8f4f"}


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


def _where(title: str, report: dict[str, Any]) -> str:
    environment = report["environment"]
    return f"{title} ({environment['gpu']}, SGLang {environment['packages']['sglang']}, {environment['date']})"


FIGURES = {"attention": ("auto_0_5_23", attention)}
"""Figure to its result file (without _h200.json) and the function that draws it."""
