"""`--speculative-algorithm NAIVE_EAGLE`: EAGLE with one draft token, whose round is one CUDA graph.

The name is that of an algorithm which SGLang's history has and no release: one draft step, one chain, two tokens to verify.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

FROM_ARGUMENTS = "sglang.srt.server_args.ServerArgs.from_cli_args"
NAME = "NAIVE_EAGLE"
SETTINGS = {"speculative_num_steps": 1, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 2}
SWITCH = "NSA_BACKEND_ROUND_GRAPH"


def from_arguments(original: Callable, cls: type, args: argparse.Namespace) -> Any:
    """Around `ServerArgs.from_cli_args`: spell the algorithm as SGLang knows it.

    Raises:
        ValueError: the command line asks for other settings than the algorithm has, or for no graph.
    """
    if (args.speculative_algorithm or "").upper() == NAME:
        for name, value in SETTINGS.items():
            option = "--" + name.replace("_", "-")
            given = getattr(args, name)
            if given not in (None, value):
                raise ValueError(
                    f"--speculative-algorithm {NAME} means {option} {value}, and {given} is given: drop {option}, or choose "
                    "EAGLE"
                )
            setattr(args, name, value)
        if os.environ.get(SWITCH) == "0":
            raise ValueError(
                f"--speculative-algorithm {NAME} is a round in one graph, and {SWITCH}=0: unset it, or choose EAGLE"
            )
        os.environ[SWITCH] = "1"  # the processes that SGLang starts read it too
        args.speculative_algorithm = "EAGLE"
    return original(cls, args)
