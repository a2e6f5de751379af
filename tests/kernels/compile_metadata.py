"""Compile the metadata launch for Hopper, without a GPU, as servers and tests use it; prints JSON by variant.

A process of its own: the tests beside it run kernels through Triton's interpreter, which never meets the compiler.
"""

from __future__ import annotations

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nsa_backend.kernels import metadata
from nsa_backend.kernels.metadata_kernel import metadata_kernel
from nsa_backend.kernels.plan import PAGE_SIZE, SCHEDULE_SPLIT_KV
from nsa_backend.kernels.topk_plan import CAPS, MAX_ROWS, THRESHOLDS

VARIANTS = {
    "decode": {},
    "decode without a plan": {"planned": False},
    "draft round": {"steps": 3},
    "target_verify": {"rows": 4},
    "target_verify, logits of pairs": {"rows": 4, "next_n": 2},
    "target_verify, wide tables": {"rows": 4, "wide": True, "planned": False},
    "ragged rows, wide tables": {"rows": 0, "wide": True, "planned": False},
}


def compiled(num_sms: int, rows: int = 1, steps: int = 1, wide: bool = False, planned: bool = True, next_n: int = 1) -> dict:
    """Of the launch for `num_sms` SMs, 0 for none that DeepGEMM schedules: what the compiler says of it."""
    column_block = metadata.COLUMN_BLOCK if wide else metadata.PAGED_COLUMN_BLOCK
    constants = {
        "NUM_STEPS": steps,
        "NUM_PLANS": steps if planned else 0,
        "ROWS_PER_REQUEST": rows,
        "NEXT_N": next_n,
        "WIDE": wide,
        "THRESHOLDS": THRESHOLDS,
        "CAPS": CAPS,
        "MAX_PLANNED_ROWS": MAX_ROWS,
        "NUM_SMS": num_sms,
        "SM_BLOCK": metadata.SM_BLOCK,
        "SCHEDULE_PARTS": triton.cdiv(num_sms + 1, metadata.SM_BLOCK) if num_sms else 0,
        "PAGE": PAGE_SIZE,
        "SPLIT_KV": SCHEDULE_SPLIT_KV,
        "ROW_BLOCK": metadata.ROW_BLOCK,
        "COLUMN_BLOCK": column_block,
        "PIECE": column_block // PAGE_SIZE if wide else metadata.PAGED_PIECE,
        "SURPLUS_LAST": True,
    }
    names = [parameter.name for parameter in metadata_kernel.params]
    wide_inputs = ("seq_lens_ptr", "req_pool_indices_ptr", "extend_lens_ptr")
    types = {name: "*i64" if name in wide_inputs else "*i32" if name.endswith("_ptr") else "i32" for name in names}
    aligned = {p.name for p in metadata_kernel.params if p.name.endswith("_ptr") and not p.do_not_specialize}
    source = ASTSource(
        fn=metadata_kernel,
        signature=types | dict.fromkeys(constants, "constexpr"),
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if name in aligned},
    )
    options = {"num_warps": metadata.NUM_WARPS if wide else metadata.PAGED_NUM_WARPS}
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return {"shared": found.metadata.shared}


def main() -> None:
    found = {f"{name}, {sms} SMs": compiled(sms, **variant) for name, variant in VARIANTS.items() for sms in (0, 132)}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
