"""Attention of several rows a request by how much these share: sparse_verify beside what reads every row alone.

    python benchmarks/tuning/sparse_verify.py OUT.json [--kv bf16 fp8] [--heads 16 8] [--rows 4 6] [--requests 8 16 32]
    python benchmarks/tuning/sparse_verify.py OUT.json --context 304 1024 --overlap 1.0  # all tokens of short requests

A row shares `overlap` of its slots with the row before it, at random places of a million tokens. Every variant is compared with
the first other implementation before it is timed. Calls repeat in a captured graph, variants in turns, as in `bench attention`.
OUT.json is written after every cell.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path

import torch

from nsa_backend.benchmarks.calls.attention_case import CONTEXT, MAX_ROWS, SLOTS, Case
from nsa_backend.benchmarks.calls.overlapping import overlapping
from nsa_backend.benchmarks.commands.attention import timed
from nsa_backend.benchmarks.reports.report import environment, print_table, write_report
from nsa_backend.kernels.sparse_verify import LINES, Groups, VerifyMemory, parts_of, sparse_verify
from nsa_backend.testing.process import start_sglang
from nsa_backend.testing.shape import SCALE, TOPK

OTHERS = {"bf16": ("fa3", "sparse_decode"), "fp8": ("flashmla_kv", "sparse_decode")}
SERVED = "sparse_verify"
OVERLAPS = (0.35, 0.5, 0.75, 0.95, 1.0, 0.0)
SAMPLES = 5
SHAPE = ("kv", "heads", "context", "rows_per_request", "requests", "overlap", "different")
TOO_FAR = {"bf16": 5e-3, "fp8": 1e-2}
"""Relative distance of two that are right: on an FP8 cache each rounds dequantised values, FlashMLA their scales too."""


class SharingCase(Case):
    """Calls of whole requests; `share` draws what their rows choose."""

    def share(self, rows_per_request: int, overlap: float) -> None:
        generator = torch.Generator(device="cuda").manual_seed(1)
        requests = 4 * MAX_ROWS // rows_per_request
        found = overlapping(requests, rows_per_request, self.entries, overlap, SLOTS, generator)
        self._chosen = torch.nn.functional.pad(found, (0, TOPK - self.entries), value=-1)

    @property
    def entries(self) -> int:
        """Slots that a row chooses."""
        return min(self.context, TOPK)

    def chosen(self, rows: int, call: int) -> torch.Tensor:
        start = call % (len(self._chosen) // rows) * rows
        return self._chosen[start : start + rows]


def variants(
    case: SharingCase, requests: int, rows_per_request: int, num_sms: int, *, other_parts: bool
) -> dict[str, Callable]:
    """Calls of the kernel, by name: as served, and with other numbers of blocks a tile; none of more heads than a tile has."""
    if case.heads > LINES:
        return {}
    rows, groups = requests * rows_per_request, Groups.of(rows_per_request, case.heads)
    q_nope, q_rope = case.query(rows)
    lens = torch.full((rows,), case.entries, dtype=torch.int32, device="cuda")
    own = parts_of(requests * groups.of_request, num_sms)
    memory = VerifyMemory.allocate(rows, rows_per_request, case.heads, TOPK, num_sms, "cuda")

    def of_parts(parts: int) -> Callable[[int], torch.Tensor]:
        return lambda i: sparse_verify(
            q_nope,
            q_rope,
            case.cache,
            case.chosen(rows, i),
            lens,
            SCALE,
            rows_per_request,
            memory,
            num_sms=num_sms,
            parts=parts,
        )

    tried = (own // 2, own - 1) if other_parts else ()
    return {SERVED: of_parts(own)} | {f"{parts} parts": of_parts(parts) for parts in tried if 1 <= parts < own}


def cell(case: SharingCase, requests: int, rows_per_request: int, overlap: float, num_sms: int, *, other_parts: bool) -> dict:
    """Microseconds of every variant that is right, and of the others; what is wrong is named."""
    case.share(rows_per_request, overlap)
    rows, others = requests * rows_per_request, OTHERS[case.kv]
    wanted, calls, wrong = case.ours(others[0], rows)(0).float(), {}, {}
    for name, one in variants(case, requests, rows_per_request, num_sms, other_parts=other_parts).items():
        distance = float((one(0).float() - wanted).norm() / wanted.norm())
        if distance < TOO_FAR[case.kv]:
            calls[name] = one
        else:
            wrong[name] = f"relative distance from {others[0]} {distance:.1e}"
    chosen = case.chosen(rows, 0).view(requests, -1)[0]
    different = chosen[chosen >= 0].unique().numel()
    full_rows = max(1, requests * different // TOPK)  # that read as much, for which L2 is emptied
    times = timed({name: case.ours(name, rows) for name in others} | calls, full_rows, SAMPLES)
    return {
        "kv": case.kv,
        "heads": case.heads,
        "context": case.context,
        "rows_per_request": rows_per_request,
        "requests": requests,
        "overlap": overlap,
        "different": different,
        "us": {name: round(us, 2) for name, (us, _) in times.items()},
        "min_max": {name: [round(x, 2) for x in spread] for name, (_, spread) in times.items()},
        "wrong": wrong,
    }


def show(found: list[dict]) -> None:
    """sparse_verify as it is served and the best variant, both beside the fastest other."""
    table = []
    for row in found:
        others = {name: row["us"][name] for name in OTHERS[row["kv"]]}
        ours = {name: us for name, us in row["us"].items() if name not in others}
        best, own, other = (
            min(ours, key=ours.get, default="-"),
            ours.get(SERVED, float("nan")),
            min(others.values()),
        )
        told = ", ".join(f"{name} {us:.1f}" for name, us in others.items())
        shape = tuple(row[name] for name in SHAPE)
        table.append((*shape, told, own, own / other, best, ours.get(best), len(row["wrong"])))
    columns = (*SHAPE, "others us", SERVED, "over the fastest other")
    print_table((*columns, "best variant", "its us", "wrong"), table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kv", nargs="+", choices=OTHERS, default=list(OTHERS))
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 8])
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 6], help="of a request")
    parser.add_argument("--requests", type=int, nargs="+", default=[8, 16, 32, 1])
    parser.add_argument("--overlap", type=float, nargs="+", default=OVERLAPS)
    parser.add_argument("--context", type=int, nargs="+", default=[CONTEXT], help="tokens of a request")
    parser.add_argument("--other-parts", action="store_true", help="other numbers of blocks a tile too")
    args = parser.parse_args()
    start_sglang()
    num_sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    found: list[dict] = []
    for kv, heads, context in itertools.product(args.kv, args.heads, args.context):
        case = SharingCase(kv, heads, context)
        for rows, requests, overlap in itertools.product(args.rows, args.requests, args.overlap):
            found.append(cell(case, requests, rows, overlap, num_sms, other_parts=args.other_parts))
            write_report(args.out, {"environment": environment(), "rows": found})
            show(found[-1:])
    show(found)


if __name__ == "__main__":
    main()
