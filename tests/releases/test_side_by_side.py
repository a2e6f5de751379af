"""Engines side by side on the same GPUs: none takes a port of another, by SGLang's own rules, nor ends where another loads."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
from engines import PORTS
from next_token import question
from nodes import AFTER_MEETING, arguments_of
from pd_servers import ALONE, meeting, roles
from ports import DP_PORTS, ENGINES, JUDGES, begins, judge_begin, ports_of, ports_of_run
from run_case import engine_arguments
from sglang.srt import server_args as sglang_args
from sglang.srt.environ import envs
from workloads import CASES

from nsa_backend.benchmarks.servers.server import SIDE_BY_SIDE

FIRST = 12000
RUN_HERE = [case for case in CASES if case.runs_here()]
OF_EACH_KIND = {(c.disaggregated, c.ranks_per_gpu, *sorted(c.engine)): c for c in RUN_HERE if not c.dense_draft}.values()
"""One case of those that are asked for the same options, whatever their values."""


def test_what_lets_engines_load_beside_each_other_is_a_switch_of_sglang():
    """Otherwise ranks that see unequal memory, while another engine takes it, end the start."""
    for name in SIDE_BY_SIDE:
        assert getattr(envs, name).get() is True


@pytest.fixture
def ports_of_sglang(hopper, small_model, monkeypatch):
    """Returns a function of (case, port) to the ports that SGLang's own rules give such an engine, or such servers."""
    if hasattr(sglang_args, "wait_port_available"):
        monkeypatch.setattr(sglang_args, "wait_port_available", lambda *of_port: True)

    def found(case, port: int) -> set[int]:
        arguments = engine_arguments(case, str(small_model), port)
        if case.ranks_per_gpu > 1:
            return set().union(*map(of_server, arguments_of(arguments, case.ranks_per_gpu)))
        if not case.disaggregated:
            return of_server(arguments)
        pair = roles(arguments, case.disaggregated, case.gpus)
        (bootstrap,) = {role["disaggregation_bootstrap_port"] for role in pair}
        servers = [of_server(server) for server in (*pair, arguments | meeting(port + ALONE))]
        assert len(set().union(*servers)) == sum(map(len, servers))
        return {bootstrap}.union(*servers)

    def of_server(arguments: dict) -> set[int]:
        server_args = sglang_args.ServerArgs(**arguments, device="cuda")
        if hasattr(server_args, "resolve_once"):
            server_args.resolve_once()
        made = dataclasses.asdict(sglang_args.PortArgs.init_new(server_args)).values()
        addresses = [re.fullmatch(r"tcp://.*:(\d+)", str(value)) for value in made]
        own = {value for value in made if type(value) is int} | {int(address[1]) for address in addresses if address}
        return own | {arguments["port"]}

    return found


@pytest.mark.parametrize("ask", [False, True], ids=["measured", "asked about ties"])
@pytest.mark.parametrize("case", OF_EACH_KIND, ids=lambda case: case.name)
def test_a_run_knows_the_ports_of_its_engines(ports_of_sglang, case, ask):
    case = question(case) if ask else case
    assert ports_of_sglang(case, FIRST) <= ports_of(case, FIRST)


def test_dp_attention_counts_ports_up_from_its_own():
    """What `ports_of` takes from SGLang: the first is no part of PortArgs, the others are what it gives after this one."""
    handed_out, first_met, *_ = DP_PORTS
    assert (handed_out, first_met) == (sglang_args.DP_ATTENTION_HANDSHAKE_PORT_DELTA, sglang_args.ZMQ_TCP_PORT_DELTA)
    assert AFTER_MEETING[-1] == handed_out


@pytest.mark.parametrize(("gpus", "ranks"), sorted({(case.gpus, case.ranks_per_gpu) for case in RUN_HERE}))
def test_engines_side_by_side_share_no_port(gpus, ranks):
    """Nor do those asked about ties, though not beside them. Where ports are handed out nobody listens for longer than that."""
    cases = [case for case in RUN_HERE if (case.gpus, case.ranks_per_gpu) == (gpus, ranks) for _ in range(2)]
    listening = []
    for at in (begins(cases, FIRST), [judge_begin(number, FIRST) for number in range(len(cases))]):
        for case, begin in list(zip(cases, at, strict=True))[: ENGINES // 3]:
            listening.append(ports_of(case, begin) - {port + DP_PORTS[0] for port in at})
    for one, other in itertools.combinations(listening, 2):
        assert not one & other


def test_runs_on_other_gpus_share_no_port():
    most = [max(RUN_HERE, key=lambda case: len(ports_of(case, 0)))] * 2 * ENGINES
    ports = ports_of_run(most, FIRST)
    assert (ports[0], ports[-1] - FIRST < PORTS) == (FIRST, True)
    assert {FIRST + JUDGES, FIRST + DP_PORTS[-1], FIRST + JUDGES + DP_PORTS[-1]} <= set(ports)
