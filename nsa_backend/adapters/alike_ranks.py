"""The check that the ranks of a server, on however many nodes, have the same NSA_BACKEND_* values.

Ranks that plan otherwise enter other collectives, and wait for one another. So each writes its values into the store by which
the ranks have just met and reads those of the others: no collective, and no rank waits longer than `PATIENCE`. A rank on which
the plugin is switched off takes part.
"""

from __future__ import annotations

import json
import socket
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from nsa_backend.environment import in_force

MEET = "sglang.srt.distributed.parallel_state.init_distributed_environment"
PATIENCE = timedelta(seconds=60)
"""For a rank that has joined the group already, to write a few values."""
KEY = "nsa_backend/environment/"
ELASTIC = ("recovered_rank", "max_world_size")
"""Options of groups that ranks leave and join while others serve: nobody waits for these."""


def nobody_serves() -> bool:
    """What a rank says of its server where the plugin is switched off."""
    return False


def meet(serves: Callable[[], bool], original: Callable, *arguments: Any, **options: Any) -> None:
    """Around SGLang's `init_distributed_environment`, which joins the ranks of a server once in a process.

    Args:
        serves: whether the server of this process is one of this backend; asked of a rank among several alone.
    """
    import torch.distributed as dist

    joined = dist.is_initialized()
    original(*arguments, **options)
    if joined or dist.get_world_size() == 1 or any(options.get(name) for name in ELASTIC):
        return
    from torch.distributed.distributed_c10d import _get_default_store

    check_alike(_get_default_store(), dist.get_rank(), dist.get_world_size(), serves(), in_force())


def check_alike(store: Any, rank: int, world_size: int, serves: bool, values: dict[str, str]) -> None:
    """Tell the other ranks this one's values, and compare all of them where a rank serves with this backend.

    Args:
        store: torch's, which all ranks have met by.
        rank: this one.
        world_size: ranks of the server.
        serves: whether this one does.
        values: of its variables, by name.

    Raises:
        ValueError: a variable differs, or a rank said nothing. Every rank that takes part raises the same.
    """
    store.set(f"{KEY}{rank}", json.dumps([socket.gethostname(), serves, values]))
    told, silent = {}, []
    for other in range(world_size):
        try:
            # One that is late made the ranks before it wait already.
            store.wait([f"{KEY}{other}"], timedelta(milliseconds=10) if silent else PATIENCE)
        except RuntimeError:
            silent.append(other)
        else:
            told[other] = json.loads(store.get(f"{KEY}{other}"))
    if not any(serving for _, serving, _ in told.values()):
        return
    if silent:
        raise ValueError(
            f"{_ranks(silent)} of this server did not say their NSA_BACKEND_* values within {PATIENCE.total_seconds():.0f} s "
            f"of joining, and {_ranks(list(told))} did: install this package on every node, and have SGLANG_PLUGINS alike"
        )
    found = [said for name in values if (said := _difference(name, told))]
    if found:
        raise ValueError(
            f"ranks of one server would wait for one another for ever: {'; '.join(found)}; set it alike on all nodes"
        )


def _difference(name: str, told: dict[int, list]) -> str | None:
    """Who has which value of `name`; None where all have one."""
    ranks, nodes = defaultdict(list), defaultdict(dict)
    for rank, (node, _, values) in told.items():
        ranks[values[name]].append(rank)
        nodes[values[name]][node] = None
    if len(ranks) == 1:
        return None
    return f"{name} is " + " and ".join(f"{value} on {_ranks(of)} ({', '.join(nodes[value])})" for value, of in ranks.items())


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
