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

from nsa_backend.kernels.sparse_decode import Join, Tile
from nsa_backend.kernels.sparse_decode_kernel import attend_kernel, join_kernel

TYPES = {name: "*bf16" for name in ("q_nope_ptr", "q_rope_ptr", "kv_ptr", "out_ptr")}
TYPES |= {"slots_ptr": "*i32", "lens_ptr": "*i32", "partial_ptr": "*fp32", "lse_ptr": "*fp32", "scale": "fp32", "cap": "fp32"}
ALIGNED = {"q_nope_row_stride", "q_nope_head_stride", "q_rope_row_stride", "q_rope_head_stride", "kv_stride"}
PTXAS = Path(nvidia.__file__).parent / "bin" / "ptxas"


def resources(kernel: triton.JITFunction, constants: dict, **options: int) -> dict[str, int]:
    """Registers a thread, bytes spilled a thread and bytes of shared memory a program."""
    names = [parameter.name for parameter in kernel.params]
    aligned = [(place,) for place, name in enumerate(names) if name.endswith("_ptr") or name in ALIGNED]
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else TYPES.get(name, "i32") for name in names},
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
    }


def main() -> None:
    model = {"LATENT": 512, "ROPE": 64}
    found = {}
    for tile in dict.fromkeys(map(Tile.of, (8, 16, 32, 64, 128))):
        for split in (True, False):
            shape = {"BLOCK_H": tile.heads, "BLOCK_N": tile.tokens, "STAGES": tile.stages}
            constants = model | shape | {"SPLIT": split, "CAPPED": False, "DEPENDENT": True}
            found[f"attend, {tile.heads} heads, split {split}"] = resources(attend_kernel, constants, num_warps=tile.warps)
    join = Join()
    constants = {"LATENT": 512, "MAX_SPLITS": 64, "BLOCK_S": join.parts, "BLOCK_D": join.latent, "DEPENDENT": True}
    found["join"] = resources(join_kernel, constants, num_warps=join.warps)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
