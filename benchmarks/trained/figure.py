"""The figure of the trained checkpoint: how often each draft is accepted, by its position and by what draft steps attend to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIDES = {
    "ours": ("L + i + 1 tokens (ours)", "#3b6fb6", 5.0),
    "shared": ("L + 1 tokens in every step", "#b4b4b4", 2.8),
    "builtin": ("L tokens in every step (SGLang's built-in)", "#d1702f", 1.0),
}
"""Side of a row to what draft step i attends to there, its colour and width: a thinner line lies on a wider one."""

STYLES = ("-", "--", ":")
"""Of the temperatures, lowest first."""


def trained(report: dict[str, Any]) -> Figure:
    """Share of rounds that accept draft 1, 2, ...; a panel for each N above 1, the shortest prompts, a style a temperature."""
    from matplotlib.figure import Figure

    rows = [row for row in report["accept"] if row["steps"] > 1]
    shortest = min(row["length"] for row in rows)
    temperatures = sorted({row["temperature"] for row in rows})
    chosen = [temperatures[0], temperatures[-1]] if len(temperatures) > 1 else temperatures
    steps = sorted({row["steps"] for row in rows})
    figure = Figure(figsize=(2.8 * max(len(steps), 3), 3.4))
    for axis, n in zip(figure.subplots(1, len(steps), sharey=True, squeeze=False)[0], steps, strict=True):
        for temperature, style in zip(chosen, STYLES, strict=False):
            wanted = (n, shortest, temperature)
            for row in (r for r in rows if (r["steps"], r["length"], r["temperature"]) == wanted):
                for side, (label, colour, width) in SIDES.items():
                    if side in row:
                        name = f"{label}, {'greedy' if not temperature else f'temperature {temperature:g}'}"
                        shares = row[side]["accepted"]
                        look = {"color": colour, "linewidth": width, "marker": "o", "markersize": width + 1}
                        axis.plot(range(1, len(shares) + 1), shares, style, label=name, **look)
        axis.set(title=f"N = {n}", xlabel="draft position", xticks=range(1, n + 1), ylim=(0, 1))
        axis.grid(alpha=0.25)
    axes = figure.axes
    axes[0].set_ylabel("rounds that accept it")
    figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.5, -0.3))
    environment = report["environment"]
    where = f"{environment['gpu']}, SGLang {environment['packages']['sglang']}, {environment['date']}"
    figure.suptitle(f"A small model trained on real text, prompts of {shortest} tokens ({where})", y=1.04)
    return figure
