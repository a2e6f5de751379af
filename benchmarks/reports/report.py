"""What every result file and every table of a benchmark is made of: the environment it ran in, JSON on disk, columns."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


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


def dumped(report: dict[str, Any]) -> str:
    """JSON with one row a line."""
    parts = []
    for name, value in report.items():
        body = "[\n" + ",\n".join(map(json.dumps, value)) + "\n]" if value and isinstance(value, list) else json.dumps(value)
        parts.append(f"{json.dumps(name)}: {body}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Write `report`, whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(dumped(report))
    part.replace(path)


def print_table(columns: tuple[str, ...], rows: list[tuple]) -> None:
    """Print a table as wide as it needs to be; floats with one digit after the point."""
    from rich.box import MARKDOWN
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, box=MARKDOWN)
    for row in rows:
        table.add_row(*("" if cell is None else f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in row))
    Console(width=240, soft_wrap=True).print(table)
