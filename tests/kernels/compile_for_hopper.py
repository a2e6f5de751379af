"""Compile the kernels of sparse decode for Hopper, which takes no GPU, and print what ptxas says of each as JSON.

    python tests/kernels/compile_for_hopper.py

Run as a process of its own: elsewhere in these tests kernels are the interpreter's.
"""

from __future__ import annotations

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

from nsa_backend.kernels.sparse_decode_kernel import attend_kernel, join_kernel
from nsa_backend.kernels.sparse_decode_plan import Join, Split, Tile

TYPES = {name: "*bf16" for name in ("q_nope_ptr", "q_rope_ptr", "k_rope_ptr", "out_ptr")}
TYPES |= {
    "slots_ptr": "*i32",
    "lens_ptr": "*i32",
    "partial_ptr": "*fp32",
    "lse_ptr": "*fp32",
    "scales_ptr": "*fp32",
    "scale": "fp32",
    "cap": "fp32",
}
ALIGNED = {"q_nope_row_stride", "q_nope_head_stride", "q_rope_row_stride", "q_rope_head_stride"}
MODEL = {"LATENT": 512, "ROPE": 64}
SMS = 132
PTXAS = Path(nvidia.__file__).parent / "bin" / "ptxas"


def resources(kernel: triton.JITFunction, constants: dict, latent: str = "*bf16", **options: int) -> dict:
    """Registers and spilled bytes a thread, shared bytes a program, whether the next kernel may begin, and early reads."""
    types = TYPES | {"latent_ptr": latent}
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
        "ahead": sorted(set(re.findall(r"ld\.global|cp\.async", compiled.asm["ptx"].partition("griddepcontrol.wait")[0]))),
    }


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
            for ahead in (False, True) if shape["BLOCK_H"] == 16 else (False,):
                constants = MODEL | cache | shape | {"SPLIT": split, "CAPPED": False, "AHEAD": ahead, "COMPILED": True}
                used = resources(attend_kernel, constants, latent, num_warps=tile.warps)
                name = f"attend, {tile}, {latent[1:]}, split {split}" + ", ahead" * ahead
                found[name] = used | {"programs": tile.programs}
    for join in dict.fromkeys(Join.of(*shape) for shape in shapes):
        constants = {"LATENT": 512, "BLOCK_S": join.parts, "BLOCK_D": join.latent, "COMPILED": True}
        found[f"join, {join.parts} parts"] = resources(join_kernel, constants, num_warps=join.warps) | {"programs": 1}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
