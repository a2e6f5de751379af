"""Look at this installation: versions, what the plugin takes over, and which kernels can run on this GPU.

Works without a GPU. Exits with 0 where the plugin would load and every package is what SGLang pins, with 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import subprocess
import warnings
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any

from nsa_backend import __version__
from nsa_backend.adapters.options import OWN_PREFILL_VALUES
from nsa_backend.environment import VARIABLES, switched_on
from nsa_backend.releases import SUPPORTED, unsupported_host

EXAMPLE = "python -m nsa_backend doctor --heads 16"

PACKAGES = {
    "torch": "",
    "triton": "",
    "sglang": "",
    "sglang-kernel": "FA3, FlashMLA and the indexer's top-k",
    "sgl-deep-gemm": "the indexer's logits",
    "flashinfer_python": "trtllm",
}
"""Distribution to what we use it for. Where FlashMLA has a distribution of its own, it is added (from SGLang 0.5.23 on)."""

PINNED = tuple(name for name, purpose in PACKAGES.items() if purpose)
OF_FLASHINFER = {"nvidia-cutlass-dsl": "FlashInfer's norms, beside which a layer can have our front"}
"""What FlashInfer requires and SGLang does not pin."""
NO_GPU = {"name": None, "driver": None, "sm": 0}
KV_DTYPES = ("bfloat16", "float8_e4m3fn")
TAKEN_OVER = (
    "the attention backend nsa (dsa in newer releases): decode, target_verify, draft_extend, prefill",
    "the draft steps' backend and draft_extend's, for spec v1 and v2",
    "the draft-extend CUDA graph under overlap scheduling",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="everything as one JSON object")
    parser.add_argument(
        "--all", action="store_true", help="why kernels cannot run, what each environment variable does, what stops a start"
    )
    parser.add_argument("--heads", type=int, default=128, help="query heads on a GPU (128 / attention TP for DeepSeek-V3.2)")


def run(args: argparse.Namespace) -> int:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    report = examine(args.heads)
    if args.json:
        print(json.dumps(report, indent=1))  # noqa: T201 (the command's output)
    else:
        show(report)
        if args.all:
            show_all(report)
    return 1 if report["problems"] else 0


def examine(num_heads: int) -> dict[str, Any]:
    """Everything the command knows, as plain data."""
    problems = []
    loads = _plugin_problem()
    if loads:
        problems.append(loads)
    packages = {name: {"version": _version(name), "for": purpose} for name, purpose in (PACKAGES | OF_FLASHINFER).items()}
    environment = {one.name: {"value": os.environ.get(one.name)} | asdict(one) for one in VARIABLES}
    implementations: dict[str, dict[str, str | None]] = {}
    checks: list[dict[str, str]] = []
    gpu: dict[str, Any] = NO_GPU
    try:
        from nsa_backend.adapters.installed import adapter
        from nsa_backend.start_checks import CHECKS

        checks = [asdict(check) for check in CHECKS]
        pinned = dict.fromkeys((*PINNED, adapter.FLASH_MLA_DISTRIBUTION))
        packages |= {name: {"version": _version(name), "for": "FlashMLA"} for name in pinned if name not in packages}
        problems += [problem for problem in map(adapter.package_problem, pinned) if problem]
        gpu = _gpu(adapter)
        implementations = _implementations(num_heads, gpu)
    except ImportError as error:
        problems.append(f"SGLang cannot be imported: {error}")
    return {
        "nsa_backend": __version__,
        "python": platform.python_version(),
        "gpu": gpu,
        "packages": packages,
        "plugin": {"takes_over": [] if loads else list(TAKEN_OVER), "supported_hosts": SUPPORTED},
        "heads": num_heads,
        "implementations": implementations,
        "environment": environment,
        "start_checks": checks,
        "problems": problems,
    }


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _plugin_problem() -> str | None:
    """Why SGLang would not load the plugin, or None."""
    try:
        if switched_on("NSA_BACKEND_DISABLE"):
            return "NSA_BACKEND_DISABLE=1: the plugin does nothing"
    except SystemExit as error:
        return str(error)
    if not any(entry.name == "nsa_backend" for entry in entry_points(group="sglang.srt.plugins")):
        return "SGLang does not see the plugin: install the package (pip install .), its entry point is missing"
    return unsupported_host()


def _gpu(adapter: Any) -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return NO_GPU
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True, check=False)
    driver = found.stdout.splitlines()[0].strip() if found.returncode == 0 and found.stdout else None
    return {"name": torch.cuda.get_device_name(), "driver": driver, "sm": adapter.device_sm("cuda")}


def _implementations(num_heads: int, gpu: dict[str, Any]) -> dict[str, dict[str, str | None]]:
    """For each implementation and KV dtype, why it cannot run here, or None: in decode, where it is not made for prefill."""
    import torch

    from nsa_backend.attention.implementations import reasons
    from nsa_backend.config import AttentionConfig

    found: dict[str, dict[str, str | None]] = {}
    for dtype in KV_DTYPES:
        config = AttentionConfig(
            device_sm=gpu["sm"],
            num_heads=num_heads,
            kv_cache_dtype=getattr(torch, dtype),
            index_topk=2048,
            device_name=gpu["name"] or "",
            partner="trtllm",
        )
        of_prefill = {name: why for name, why in reasons(replace(config, prefill=True)).items() if name in OWN_PREFILL_VALUES}
        for name, reason in (reasons(config) | of_prefill).items():
            found.setdefault(name, {})[dtype] = reason
    return found


def show(report: dict[str, Any]) -> None:
    """Print what is installed, what a server on this machine can run, and what is wrong."""
    from rich.console import Console

    console = Console(highlight=False)
    gpu = report["gpu"]
    title = f"{gpu['name']} (SM{gpu['sm']}), driver {gpu['driver']}" if gpu["name"] else "no GPU"
    console.print(f"nsa_backend {report['nsa_backend']}, Python {report['python']}, {title}")
    versions = (f"{name} {facts['version'] or 'not installed'}" for name, facts in report["packages"].items())
    console.print("with " + ", ".join(versions))
    takes = report["plugin"]["takes_over"]
    console.print("the plugin takes over: " + "; ".join(takes) if takes else "the plugin takes over nothing")
    for dtype in KV_DTYPES:
        console.print(f"kernels for {report['heads']} heads on a {dtype} KV cache: {', '.join(_able(report, dtype)) or 'none'}")
    if not gpu["name"]:
        console.print("nothing is served without a GPU: `python -m nsa_backend demo` decodes here")
    given = (f"{name}={facts['value']}" for name, facts in report["environment"].items() if facts["value"] is not None)
    console.print("environment: " + (", ".join(given) or "no NSA_BACKEND_* variable is set"))
    for problem in report["problems"]:
        console.print(f"problem: {problem}", style="red")


def _able(report: dict[str, Any], dtype: str) -> list[str]:
    """Implementations that run here; `torch` is for machines without a GPU."""
    able = [name for name, by_dtype in report["implementations"].items() if by_dtype[dtype] is None and name != "torch"]
    return [f"{name} (prefill)" if name in OWN_PREFILL_VALUES else name for name in able]


def show_all(report: dict[str, Any]) -> None:
    """Print why implementations cannot run, what each variable does, and what stops a start."""
    from rich.console import Console
    from rich.table import Column, Table

    console = Console()
    table = Table("implementation", *(f"decode on a {dtype} KV cache" for dtype in KV_DTYPES))
    for name, by_dtype in report["implementations"].items():
        table.add_row(
            f"{name}, in prefill" if name in OWN_PREFILL_VALUES else name,
            *("yes" if by_dtype[dtype] is None else f"no: {by_dtype[dtype]}" for dtype in KV_DTYPES),
        )
    console.print(table)
    packages = Table("package", "used for")
    for name, facts in report["packages"].items():
        if facts["for"]:
            packages.add_row(name, facts["for"])
    console.print(packages)
    variables = Table(Column("environment variable", no_wrap=True), "value", "unset", "1", "0", "when to set it")
    for name, facts in report["environment"].items():
        variables.add_row(name, facts["value"] or "unset", *(facts[state] for state in ("unset", "one", "zero", "when")))
    console.print(variables)
    stops = Table("a start is stopped when", "by", Column("asked by", overflow="fold"))
    for check in report["start_checks"]:
        stops.add_row(*check.values())
    console.print(stops)
