"""Which ports an end-to-end run listens on; engines beside each other share none (tests/releases/test_side_by_side.py)."""

from __future__ import annotations

from itertools import accumulate

from case import Case
from engines import NCCL_PORT, PORTS_APART
from next_token import question
from nodes import AFTER_MEETING, MEETING, NCCL
from pd_servers import ALONE, BOOTSTRAP, DECODE, ROUTER

ENGINES = 50
"""After as many engines the next one gets the first one's ports, which ended long before."""
JUDGES = 1000
"""From the first engine's port to that of the first one that is asked about ties."""
DP_PORTS = (13, *range(233, 240))
"""Above the port of a server with DP attention: SGLang hands out its ranks' ports on the first, where only other machines would
ask for them, and its processes meet on the others."""


def ports_of(case: Case, port: int) -> set[int]:
    """Those of the engine of a case, of the servers of a disaggregated one, or of several nodes, from `port` up."""
    with_dp = case.engine.get("enable_dp_attention", False) or case.engine.get("attn_dp_size", 1) > 1
    if case.ranks_per_gpu > 1:
        meeting = {MEETING, *((MEETING + at for at in AFTER_MEETING) if with_dp else ())}
        return {port + at for at in (*range(case.ranks_per_gpu), NCCL, *meeting)}
    of_each = (0, NCCL_PORT, *(DP_PORTS if with_dp else ()))
    servers, beside = ((0, DECODE, ALONE), {port + ROUTER, port + BOOTSTRAP}) if case.disaggregated else ((0,), set())
    return {port + server + at for server in servers for at in of_each} | beside


def begins(cases: list[Case], port: int) -> list[int]:
    """The port of each engine, which start in this order; a disaggregated case is three servers."""
    before = accumulate((3 if case.disaggregated else 1 for case in cases), initial=0)
    return [port + PORTS_APART * (number % ENGINES) for number, _ in zip(before, cases, strict=False)]


def judge_begin(number: int, port: int) -> int:
    """The port of the engine that is asked about ties after `number` others; `port` is the run's."""
    return port + JUDGES + PORTS_APART * (number % ENGINES)


def ports_of_run(cases: list[Case], port: int) -> list[int]:
    """All ports of a run that starts an engine of each of `cases`, and then some without drafts to ask about ties."""
    engines = (ports_of(case, begin) for case, begin in zip(cases, begins(cases, port), strict=True))
    asked = {at for case in cases for at in ports_of(question(case), 0)}
    judges = ({judge_begin(number, port) + at for at in asked} for number in range(min(len(cases), ENGINES)))
    return sorted(set().union(*engines, *judges))
