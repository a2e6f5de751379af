"""Compile the kernels of sparse decode, a layer's front and few experts for Hopper, without a GPU; print JSON of ptxas.

    python tests/kernels/compile_for_hopper.py

Run as a process of its own: elsewhere in these tests kernels are the interpreter's.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.compiler import ASTSource

from nsa_backend.kernels.choice_sums import choice_sums_kernel
from nsa_backend.kernels.down_rows import down_rows_kernel
from nsa_backend.kernels.down_rows import tile_for as tile_of_rows
from nsa_backend.kernels.expert_activation import MOST_OF_PROGRAM, activate_kernel
from nsa_backend.kernels.expert_order import CHUNK, GROUPS, order_kernel
from nsa_backend.kernels.few_experts import ONE as ONE_TOKEN
from nsa_backend.kernels.few_experts import SOME, down_kernel, gate_up_kernel
from nsa_backend.kernels.projection_inputs import quantise_kernel
from nsa_backend.kernels.sparse_decode_kernel import attend_kernel, join_kernel
from nsa_backend.kernels.sparse_decode_plan import Join, Split, Tile
from nsa_backend.kernels.value_products import DIVIDED, value_products_kernel

OF_TYPE = {
    "*bf16": "q_nope_ptr q_rope_ptr k_rope_ptr out_ptr attended_ptr weight_ptr",
    "*fp8e4nv": "x_ptr",
    "*fp32": "partial_ptr lse_ptr joined_ptr scales_ptr second_scales_ptr sums_ptr",
    "*i32": "slots_ptr lens_ptr arrived_ptr",
    "fp32": "scale cap",
}
TYPES = {name: of_type for of_type, names in OF_TYPE.items() for name in names.split()}
ALIGNED = {"q_nope_row_stride", "q_nope_head_stride", "q_rope_row_stride", "q_rope_head_stride"}
MODEL = {"LATENT": 512, "ROPE": 64}
ONE = {"RANKS": 1, "RANK": 0}
WHOLE = ONE | {"LSE": False}
SMS = 132
PTXAS = Path(nvidia.__file__).parent / "bin" / "ptxas"


def resources(
    kernel: triton.JITFunction, constants: dict, latent: str = "*bf16", more: dict | None = None, **options: int
) -> dict:
    """Registers and spilled bytes a thread, shared bytes a program, whether the next kernel may begin, and early reads."""
    types = TYPES | {"latent_ptr": latent} | (more or {})
    names = [parameter.name for parameter in kernel.params]
    specialized = {parameter.name for parameter in kernel.params if not parameter.do_not_specialize}
    aligned = [(i,) for i, name in enumerate(names) if (name.endswith("_ptr") and name in specialized) or name in ALIGNED]
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else types.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={place: [["tt.divisibility", 16]] for place in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        command = [PTXAS, "--verbose", "--gpu-name", "sm_90a", file.name, "--output-file", "/dev/null"]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    return {
        "registers": int(re.search(r"Used (\d+) registers", said).group(1)),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", said))),
        "shared": compiled.metadata.shared,
        "lets_begin": "griddepcontrol.launch_dependents" in compiled.asm["ptx"],
        "waits": "griddepcontrol.wait" in compiled.asm["ptx"],
        "ahead": ahead_of_the_wait(compiled.asm["ptx"]),
    }


def ahead_of_the_wait(ptx: str) -> list[str]:
    """What is read or written in global memory while the kernel ahead may run; asking for lines is not reading."""
    return sorted(set(re.findall(r"(?:ld|st|atom|red)\.[a-z_.]*global|cp\.async", ptx.partition("griddepcontrol.wait")[0])))


AHEAD = ", before one of ours"


def before(ours: bool) -> dict[str, bool]:
    """Whether the kernel behind is one of ours."""
    return {"BEFORE_OURS": ours}


def front() -> dict[str, dict]:
    """What quantises the inputs of a layer's first products, of both models."""
    found = {}
    for hidden, powers in itertools.product((7168, 6144), (False, True)):
        constants = {"WIDTH": hidden, "GROUPS": 8, "POWERS": powers, "COMPILED": True} | before(True)
        used = resources(quantise_kernel, constants, more={"x_ptr": "*bf16", "out_ptr": "*fp8e4nv"})
        found[f"front, quantise {hidden}, powers {powers}{AHEAD}"] = used | {"programs": 8}
    return found


def values() -> dict[str, dict]:
    """Values of attended latents, of both models on a rank of tensor parallel 8."""
    found = {}
    for (heads, width), rows, splits in itertools.product(((16, 128), (8, 256)), (16, 64), (1, DIVIDED)):
        constants = {"HEADS": heads, "LATENT": 512, "WIDTH": width, "ROWS": rows, "SPLITS": splits, "POWERS": True}
        constants |= {"ROW_STRIDE": heads * 512, "HEAD_STRIDE": 512, "WEIGHT_HEAD_STRIDE": width * 512}
        constants |= {"WEIGHT_LATENT_STRIDE": 1, "WEIGHT_VALUE_STRIDE": 512, "COMPILED": True}
        used = resources(value_products_kernel, constants, more={"out_ptr": "*fp8e4nv"})
        found[f"front, values of {heads} heads, {rows} rows, {splits} splits"] = used | {"programs": 1}
    return found


FEW_TILES = {"one": ONE_TOKEN, "some": SOME}


def few_experts() -> dict[str, dict]:
    """Experts of few tokens, of both models, and what is around the products of more."""
    types, found = {"inner_ptr": "*bf16", "weight_ptr": "*fp8e4nv", "chosen_ptr": "*i32", "shares_ptr": "*fp32"}, {}
    types |= {"x_ptr": "*bf16", "factor": "fp32", "shared_ptr": "*fp8e4nv", "shared_scales_ptr": "*fp32"}
    shapes = [(7168, 8, 0), (7168, 8, 1), (6144, 9, 0)]
    for (hidden, choices, shared), (name, tile) in itertools.product(shapes, FEW_TILES.items()):
        fixed = {"CHOSEN": choices, "HIDDEN": hidden, "WIDTH": 256, "SHARED": shared, "POWERS": shared > 0}
        fixed |= {"AHEAD": tile.ahead, "COMPILED": True}
        of = f"experts of {choices} choices{' and a shared one' * shared}, {name}"
        first = {"VALUES": tile.values, "STEP": tile.step, "STAGES": tile.stages}
        used = resources(gate_up_kernel, fixed | first, more=types, num_warps=tile.warps)
        found[f"{of}{AHEAD}"] = used | {"programs": 8, "threads": 128}
        used = resources(down_kernel, fixed | {"SUMS": tile.sums}, more=types, num_warps=tile.sum_warps)
        found[f"{of}, sums{', weights read ahead' * tile.ahead}"] = used | {"programs": 6, "threads": 128}
    types = {"both_ptr": "*bf16", "values_ptr": "*fp8e4nv"}
    types |= dict.fromkeys(("chosen_ptr", "sorted_ptr", "padded_ptr", "expert_ptr"), "*i32")
    for width, in_blocks, rows in (
        (128, False, 1),
        (256, False, 1),
        (256, True, 1),
        (2048, True, 1),
        (256, True, MOST_OF_PROGRAM),
    ):
        between = {"WIDTH": width, "SORTED": in_blocks, "ROWS": rows, "COMPILED": True}
        used = resources(activate_kernel, between, more=types) | {"programs": 8}
        found[f"experts of {width}, between products{', in blocks' * in_blocks}, {rows} a program, order read ahead"] = used
    types = {"x_ptr": "*bf16", "values_ptr": "*fp8e4nv"}
    types |= dict.fromkeys(("chosen_ptr", "sorted_ptr", "expert_ptr", "padded_ptr", "counters_ptr"), "*i32")
    for experts, block, bins in ((256, 16, 512), (257, 64, 512), (32, 16, 64)):
        fixed = {"EXPERTS": experts, "BLOCK": block, "COUNTERS": 2, "OTHERS": experts > 32, "BINS": bins}
        fixed |= {"CHUNK": CHUNK, "GROUPS": GROUPS, "COMPILED": True}
        used = resources(order_kernel, fixed, more=types) | {"programs": 8}
        found[f"{experts} experts in blocks of {block}, before products"] = used
    return found


def many_experts() -> dict[str, dict]:
    """The second product of experts of many tokens, and the sums behind it, of both models."""
    found, types = {}, dict.fromkeys(("sorted_ptr", "expert_ptr", "padded_ptr"), "*i32") | {"shares_ptr": "*fp32"}
    for hidden, block in itertools.product((7168, 6144), (16, 64, 128)):
        tile = tile_of_rows(hidden)
        descriptors = {"values": (block, 128), "second": (1, tile.columns, 128)}
        more = types | {name: f"tensordesc<fp8e4nv[{str(list(size))[1:-1]}]>" for name, size in descriptors.items()}
        fixed = {"HIDDEN": hidden, "BLOCK": block, "COLUMNS": tile.columns, "STEPS": tile.steps, "STAGES": tile.stages}
        used = resources(down_rows_kernel, fixed | {"COMPILED": True}, more=more, num_warps=tile.warps)
        fitting = {"programs": 2, "threads": 32 * tile.warps}
        found[f"experts of rows, {hidden} in blocks of {block}"] = used | fitting
    types = {"given_ptr": "*bf16", "shared_ptr": "*bf16", "chosen_ptr": "*i32", "factor": "fp32"}
    for choices, shared in ((8, True), (9, False)):
        fixed = {"CHOICES": choices, "HIDDEN": 7168, "COLUMNS": 1024, "SHARED": shared, "CHOSEN": shared, "COMPILED": True}
        used = resources(choice_sums_kernel, fixed, more=types)
        found[f"experts of {choices} choices summed{' with a shared one' * shared}"] = used | {"programs": 8}
    return found


def main() -> None:
    found = {}
    caches = {
        "*bf16": {"LATENT_STRIDE": 576, "ROPE_STRIDE": 576, "SCALES_STRIDE": 576, "FP8": False},
        "*fp8e4nv": {"LATENT_STRIDE": 656, "ROPE_STRIDE": 328, "SCALES_STRIDE": 164, "FP8": True},
    }
    shapes = [(rows, heads) for heads in (8, 16, 32, 64, 128) for rows in (1, 2, 4, 8, 16, 32, 64, 140, 512)]
    for latent, cache in caches.items():
        tiles = {shape: Tile.of(*shape, fp8=cache["FP8"]) for shape in shapes}
        for tile, split in dict.fromkeys((t, Split.of(*shape, 2048, SMS, t).parts > 1) for shape, t in tiles.items()):
            shape = {"BLOCK_H": tile.heads, "BLOCK_N": tile.tokens, "STAGES": tile.stages}
            constants = MODEL | cache | shape | {"SPLIT": split, "CAPPED": False, "COMPILED": True} | WHOLE
            used = resources(attend_kernel, constants, latent, num_warps=tile.warps)
            found[f"attend, {tile}, {latent[1:]}{AHEAD * split}"] = used | {"programs": tile.programs}
    for join in dict.fromkeys(Join.of(*shape) for shape in shapes):
        constants = {"LATENT": 512, "BLOCK_S": join.parts, "BLOCK_D": join.latent, "COMPILED": True, "LSE": False}
        found[f"join, {join.parts} parts"] = resources(join_kernel, constants, num_warps=join.warps) | {"programs": 1}
    found |= front() | values() | few_experts() | many_experts()
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
