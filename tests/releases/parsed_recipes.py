"""Start commands as far as a server goes before it touches a GPU: parsed, resolved and checked, each in a process of its own.

    python tests/releases/parsed_recipes.py < COMMANDS.json > OUTCOMES.json

A command is {"words": what follows `python -m sglang.launch_server`, "environment": {...}, "gpu": its name, "heads": of the
model}. SGLang writes to its environment while it resolves, so no two commands share a process. What it asks of the machine is
answered for Hopper; the rest of what it does is its own.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from typing import Any

from parsed_commands import adapter, against_one_graph, attention_ranks, checked, graphs, load_plugins

import torch  # isort: skip  # after parsed_commands, which loads SGLang as a machine without a GPU can
from sglang.srt.utils import common

from nsa_backend.attention.implementations import implementation
from nsa_backend.config import AttentionConfig, prefill_name
from nsa_backend.releases import round_graph_problem

MEMORY = {"H100": 81559, "H200": 143771, "H20": 97871, "Hopper": 143771}
"""MiB, as nvidia-smi says it; a recipe that names no GPU gets an H200's."""
DTYPES = {"bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}


def on_hopper(gpu: str) -> None:
    """SGLang's questions about the machine, answered for eight of these GPUs."""
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 8
    torch.cuda.get_device_capability = lambda *device: (9, 0)
    torch.cuda.get_device_name = lambda *device: f"NVIDIA {gpu}"
    common.get_nvgpu_memory_capacity = lambda: MEMORY[gpu]
    for function in vars(common).values():
        if hasattr(function, "cache_clear"):  # what it found out without a GPU
            function.cache_clear()


def rounds(args: Any) -> list[str] | None:
    """What to change for rounds in one graph; None of a server that has no rounds."""
    if not args.speculative_num_steps or args.disaggregation_mode == "prefill" or round_graph_problem() is not None:
        return None
    return against_one_graph(args)


def problems(args: Any, heads: int) -> list[str]:
    """Why the implementations could not be built on a rank of this server."""
    kv = DTYPES[args.kv_cache_dtype]
    names = getattr(args, adapter.DECODE_ATTRIBUTE), prefill_name(getattr(args, adapter.PREFILL_ATTRIBUTE), kv)
    of_rank = heads * attention_ranks(args) * max(getattr(args, "attn_cp_size", 1), 1) // args.tp_size
    found = []
    for name, partner, prefill in ((*names, False), (*names[::-1], True)):
        config = AttentionConfig(
            device_sm=90, num_heads=of_rank, kv_cache_dtype=kv, index_topk=2048, prefill=prefill, partner=partner
        )
        found += implementation(name).problems(config)
    return found if of_rank else ["a rank has no head"]


def outcome(command: dict) -> dict:
    """What comes of a command in this process."""
    os.environ.update(command["environment"])
    on_hopper(command["gpu"])
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            server_args = checked(command["words"])
    except SystemExit:
        return {"stopped": said.getvalue().strip().splitlines()[-1]}
    except (ValueError, AssertionError) as error:
        return {"stopped": str(error)}
    args = adapter.resolved(server_args)
    return {
        "backends": adapter.served_backends(server_args),
        "decode": getattr(args, adapter.DECODE_ATTRIBUTE),
        "prefill": getattr(args, adapter.PREFILL_ATTRIBUTE),
        "kv": args.kv_cache_dtype,
        "page": args.page_size,
        "steps": args.speculative_num_steps or 0,
        "rounds": rounds(args),
        "problems": problems(args, command["heads"]),
        "graphs": graphs(args),
    }


def in_a_process(command: dict) -> dict:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        with os.fdopen(writing, "w") as pipe:
            json.dump(outcome(command), pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    status = os.waitpid(child, 0)[1]
    return json.loads(answer) if answer else {"stopped": f"the process ended with {status}"}


if __name__ == "__main__":
    load_plugins()
    json.dump([in_a_process(command) for command in json.load(sys.stdin)], sys.__stdout__)
