"""Draw figures from result files: attention by rows, and the metadata of one replay. SVG and PNG, one pair a figure.

Needs matplotlib: pip install 'sglang-nsa-backend[plot]'.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXAMPLE = "python -m nsa_backend plot --results benchmarks/results --out docs/figures"

COLOURS = {"fa3": "#3b6fb6", "flashmla_sparse": "#d1702f", "ours": "#3b6fb6", "builtin": "#9a9a9a", "floor": "#444444"}
MODES = {
    "draft_decode": "draft decode, N = {steps}",
    "target_verify": "target_verify, D = 4",
    "draft_extend": "draft_extend, D = 4",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"), help="folder with *_h200.json")
    parser.add_argument("--out", type=Path, default=Path("docs/figures"), help="folder for the figures")


def run(args: argparse.Namespace) -> int:
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit("plot needs matplotlib: pip install 'sglang-nsa-backend[plot]'") from error
    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "nsa_backend"  # the same numbers give the same file
    args.out.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        source = args.results / f"{name}_h200.json"
        if not source.exists():
            raise SystemExit(f"{source} does not exist: pass the folder with the result files as --results")
        figure = draw(json.loads(source.read_text()))
        for suffix in ("svg", "png"):
            path = args.out / f"{name}.{suffix}"
            figure.savefig(path, dpi=130, bbox_inches="tight", metadata={"Date": None} if suffix == "svg" else None)
            print(path)  # noqa: T201 (the command's output)
    return 0


def attention(report: dict[str, Any]) -> Figure:
    """Time of a call by rows, one panel a head count; both implementations that a bfloat16 cache has."""
    from matplotlib.figure import Figure

    panels = [found for found in report["by_rows"] if found["heads"] in (16, 64, 128)]
    figure = Figure(figsize=(11, 3.4))
    axes = figure.subplots(1, len(panels), sharey=True)
    for axis, found in zip(axes, panels, strict=True):
        first, last = found["rows"]
        rows = range(first, last + 1)
        for name in ("fa3", "flashmla_sparse"):
            mean = [sum(times) / len(times) for times in zip(*(one[name] for one in found["passes"]), strict=True)]
            axis.plot(rows, mean, label=name, color=COLOURS[name], linewidth=1.4)
        axis.set(title=f"{found['heads']} heads", xlabel="query rows", xscale="log", yscale="log")
        axis.set_xticks([1, 4, 16, 64, 256], ["1", "4", "16", "64", "256"])
        axis.minorticks_off()
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("us a call")
    axes[0].set_yticks([20, 50, 100, 200, 500], ["20", "50", "100", "200", "500"])
    axes[0].legend(frameon=False)
    figure.suptitle(_where("Sparse MLA decode, 2048 of a million tokens, bfloat16 KV", report), y=1.04)
    return figure


def metadata(report: dict[str, Any]) -> Figure:
    """GPU time of one replay's metadata, ours beside the built-in backend's and the floor, for one and for many requests."""
    from matplotlib.figure import Figure

    sizes = (1, 64)
    figure = Figure(figsize=(11, 3.4))
    for axis, bs in zip(figure.subplots(1, 2), sizes, strict=True):
        rows = [r for r in report["rows"] if r["bs"] == bs]
        for offset, side in ((-0.2, "builtin"), (0.2, "ours")):
            bars = axis.bar(
                [i + offset for i in range(len(rows))], [r[side]["gpu_us"] for r in rows], 0.4,
                color=COLOURS[side], label={"builtin": "built-in", "ours": "ours"}[side],
            )  # fmt: skip
            axis.bar_label(bars, fmt="%.1f", fontsize=8)
        for i, row in enumerate(rows):
            label = "floor" if i == 0 else None
            axis.hlines(row["floor_us"], i, i + 0.4, color=COLOURS["floor"], linewidth=1.6, label=label)
        axis.set_xticks(
            range(len(rows)), [MODES[r["mode"]].format(steps=r["steps"]).replace(", ", "\n") for r in rows], fontsize=8
        )
        axis.set(title=f"{bs} x {rows[0]['length'] // 1024}K tokens", yscale="log", ylabel="us on the GPU")
        axis.set_ylim(1, 4 * max(r["builtin"]["gpu_us"] for r in rows))
        axis.legend(frameon=False, ncols=3, loc="upper left")
    figure.suptitle(_where("Metadata of one replay", report), y=1.04)
    return figure


def _where(title: str, report: dict[str, Any]) -> str:
    environment = report["environment"]
    return f"{title} ({environment['gpu']}, SGLang {environment['packages']['sglang']}, {environment['date']})"


FIGURES = {"attention": attention, "metadata": metadata}
"""Result file (without _h200.json) to the function that draws it."""
