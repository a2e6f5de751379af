"""What the metadata launch alone takes on this GPU, and by which parameters it is fastest: all of them in one run, in turns.

    python benchmarks/tuning/metadata.py OUT.json [--wide]

Every launch repeats inside a captured graph. Its buffers are those of a server: page tables for contexts of 163840 tokens, the
top-k's plan and DeepGEMM's schedule; with --wide those of SGLang 0.5.12 instead, which keeps page_table_1. Before it is timed,
every launch writes poisoned buffers, which must then hold what the first one has written. The constants in kernels/metadata.py
name the file that chose them.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path

import torch

from nsa_backend.benchmarks.calls.timing import captured_graph, interleaved
from nsa_backend.benchmarks.reports.report import environment, print_table
from nsa_backend.kernels import metadata
from nsa_backend.kernels import plan as plans
from nsa_backend.kernels.batch_inputs import BatchInputs
from nsa_backend.kernels.buffers import MetadataBuffers
from nsa_backend.testing.shape import TOPK

TABLE = 163_848
SHAPES = [(1, 4096), (64, 4096), (64, 65536), (64, 131072)]
MODES = {
    "decode": plans.plan_decode,
    "draft decode, 4 steps": lambda bs: plans.plan_draft_decode(bs, 4),
    "target_verify": lambda bs: plans.plan_target_verify(bs, 4),
    "draft_extend": lambda bs: plans.plan_draft_extend_v2(bs, 4),
}
RAGGED = {"draft_extend, ragged": lambda bs: plans.plan_draft_extend_v1(bs, 4 * bs)}
"""Of SGLang 0.5.12 alone, where every request has ACCEPTED rows here."""
ACCEPTED = 3
PAGED = {
    "served": {},
    "1 warp": {"PAGED_NUM_WARPS": 1},
    "4 warps": {"PAGED_NUM_WARPS": 4},
    "64 rows": {"ROW_BLOCK": 64},
    "128 pages": {"PAGED_COLUMN_BLOCK": 8192},
    "256 pages in a row": {"PAGED_PIECE": 256},
    "512 pages": {"PAGED_COLUMN_BLOCK": 32768},
}
WIDE = {
    "served": {},
    "8 warps": {"NUM_WARPS": 8},
    "256 rows": {"ROW_BLOCK": 256},
    "1024 columns": {"COLUMN_BLOCK": 1024},
    "2048 columns": {"COLUMN_BLOCK": 2048},
    "512 programs": {"TARGET_TABLE_PROGRAMS": 512},
    "4096 programs": {"TARGET_TABLE_PROGRAMS": 4096},
}
"""Constants of kernels/metadata.py that a variant changes."""

REPEATS, SAMPLES, POISON = 100, 15, -7777


class Launch:
    """The launch of one mode and shape by one variant, into buffers of its own."""

    def __init__(self, plan: plans.MetadataPlan, length: int, constants: dict[str, int], *, wide: bool):
        bs = plan.num_requests
        self._plan, self._constants = plan, constants
        self.buffers = MetadataBuffers.allocate(
            plan, table_width=TABLE, num_sms=132, device="cuda", wide=wide, planned=not wide
        )
        self._pool = pool(bs)
        lengths = (length - torch.arange(bs, device="cuda") % 50).int()
        slots = torch.randperm(bs, generator=torch.Generator().manual_seed(bs)).cuda() + 1
        extend_lens = torch.full((bs,), ACCEPTED, dtype=torch.int32, device="cuda") if plan.ragged else None
        self._inputs = BatchInputs(lengths, slots, extend_lens)

    def __call__(self) -> None:
        before = {name: getattr(metadata, name) for name in self._constants}
        try:
            for name, value in self._constants.items():
                setattr(metadata, name, value)
            metadata.write_metadata(self._plan, self.buffers, self._inputs, req_to_token=self._pool, index_topk=TOPK)
        finally:
            for name, value in before.items():
                setattr(metadata, name, value)

    def written(self) -> dict[str, torch.Tensor]:
        """What it writes into poisoned buffers, by field."""
        fields = {name: value for name, value in vars(self.buffers).items() if isinstance(value, torch.Tensor)}
        for value in fields.values():
            value.fill_(POISON)
        self()
        return {name: value.clone() for name, value in fields.items()}


@functools.cache
def pool(requests: int) -> torch.Tensor:
    """A request table, int32 [requests + 1, TABLE]."""
    return torch.randint(0, 2**20, (requests + 1, TABLE), dtype=torch.int32, device="cuda")


def measure(mode: str, plan: plans.MetadataPlan, length: int, variants: dict[str, dict[str, int]], *, wide: bool) -> dict:
    """Microseconds of one launch by variant; raises RuntimeError where one writes something else than the first."""
    launches = {name: Launch(plan, length, constants, wide=wide) for name, constants in variants.items()}
    first = next(iter(launches.values())).written()
    for name, launch in launches.items():
        differ = [field for field, value in launch.written().items() if not torch.equal(value, first[field])]
        if differ:
            raise RuntimeError(f"{mode}, {plan.num_requests} x {length}: {name} writes other values of {', '.join(differ)}")

    def repeated(launch: Launch) -> Callable[[], None]:
        return captured_graph(lambda: [launch() for _ in range(REPEATS)]).replay

    times = interleaved({name: repeated(launch) for name, launch in launches.items()}, REPEATS, SAMPLES)
    us = {name: round(median, 2) for name, (median, _) in times.items()}
    spread = {name: [round(x, 2) for x in ends] for name, (_, ends) in times.items()}
    return {"mode": mode, "bs": plan.num_requests, "length": length, "us": us, "min_max": spread}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--wide", action="store_true", help="with page_table_1")
    args = parser.parse_args()
    variants, modes = (WIDE, MODES | RAGGED) if args.wide else (PAGED, MODES)
    report = {"environment": environment(), "table": TABLE, "variants": variants, "rows": []}
    for mode, plan in modes.items():
        for bs, length in SHAPES:
            report["rows"].append(measure(mode, plan(bs), length, variants, wide=args.wide))
            args.out.write_text(json.dumps(report, indent=1))
    table = [(f"{row['mode']}, {row['bs']} x {row['length']}", *row["us"].values()) for row in report["rows"]]
    print_table(("launch", *variants), table)


if __name__ == "__main__":
    main()
