"""`--speculative-algorithm NAIVE_EAGLE`: EAGLE with one draft token, whose round is one CUDA graph.

The name is that of an algorithm which SGLang's history has and no release: one draft step, one chain, two tokens to verify.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
from collections.abc import Callable, Iterator
from typing import Any

from nsa_backend.environment import asked

FROM_ARGUMENTS = "sglang.srt.server_args.ServerArgs.from_cli_args"
NAME = "NAIVE_EAGLE"
SETTINGS = {"speculative_num_steps": 1, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 2}
SWITCH = "NSA_BACKEND_ROUND_GRAPH"


MARK = "_nsa_backend_one_graph"
"""On SGLang's arguments of a server with this algorithm, which travel to the processes that it starts."""


def from_arguments(original: Callable, cls: type, args: argparse.Namespace) -> Any:
    """Around `ServerArgs.from_cli_args`: spell the algorithm as SGLang knows it, and mark the arguments.

    Raises:
        ValueError: the command line asks for other settings than the algorithm has, or for no graph.
    """
    if (args.speculative_algorithm or "").upper() != NAME:
        return original(cls, args)
    args = copy.copy(args)
    for name, value in SETTINGS.items():
        option = "--" + name.replace("_", "-")
        given = getattr(args, name)
        if given not in (None, value):
            raise ValueError(
                f"--speculative-algorithm {NAME} means {option} {value}, and {given} is given: drop {option}, or choose EAGLE"
            )
        setattr(args, name, value)
    if asked(SWITCH) is False:
        raise ValueError(f"--speculative-algorithm {NAME} is a round in one graph, and {SWITCH}=0: unset it, or choose EAGLE")
    args.speculative_algorithm = "EAGLE"
    server_args = original(cls, args)
    setattr(server_args, MARK, True)
    return server_args


def is_marked(server_args: Any) -> bool:
    """Whether these are the arguments of a server that was started with this algorithm."""
    return getattr(server_args, MARK, False)


def switch_on(server_args: Any) -> None:
    """In a scheduler's process, which serves one server: set the switch where its algorithm asks for it."""
    if is_marked(server_args):
        os.environ[SWITCH] = "1"


@contextlib.contextmanager
def switched_on_while_checked(server_args: Any) -> Iterator[None]:
    """In the process that starts servers: the switch is set for this one, and is the caller's again afterwards."""
    before = os.environ.get(SWITCH)
    switch_on(server_args)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(SWITCH, None)
        else:
            os.environ[SWITCH] = before
