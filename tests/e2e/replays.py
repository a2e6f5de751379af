"""Rounds that were one graph, as /server_info counts them by DP rank and kind: a capture alone says nothing of replays."""

from __future__ import annotations

import json
import re
from typing import Any

from nsa_backend.releases import ROUND_COUNTS

SAID = "replayed rounds: "
LINE = re.compile(rf"^{SAID}(\{{.*\}})$", re.MULTILINE)


def replayed(server_info: dict[str, Any]) -> list[dict[str, int]]:
    """Rounds by kind of each DP rank whose server has a count."""
    return [state[ROUND_COUNTS] for state in server_info.get("internal_states", []) if ROUND_COUNTS in state]


def tell(server_info: dict[str, Any]) -> None:
    """Print a line a DP rank, for the log of a case."""
    for counts in replayed(server_info):
        print(SAID + json.dumps(counts), flush=True)


def problem(kind: str, log: str) -> str | None:
    """Why rounds were not one graph as a case wants them, by what `tell` printed: some of this kind, and some on every rank."""
    ranks = [json.loads(line) for line in LINE.findall(log)]
    if not ranks:
        return "no server says how many rounds were one graph"
    if idle := [number for number, counts in enumerate(ranks) if not any(counts.values())]:
        return f"no round was one graph on DP rank {', '.join(map(str, idle))} of {len(ranks)}"
    if not any(counts.get(kind) for counts in ranks):
        return f"no round of {kind} was one graph, but those of {', '.join(k for k, n in ranks[0].items() if n)}"
    return None
