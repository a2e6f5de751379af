"""Deployments whose ranks share GPUs, by SGLang's own rules for several nodes: arguments, ranks of each node, and ports."""

from __future__ import annotations

import dataclasses
import json
import re
import socket

import installed_source
import pytest
from free_ports import free_port
from nodes import AFTER_MEETING, HOST, LOOKED_AT_PORTS, MEETING, arguments_of
from pd_servers import command
from ports import ports_of
from run_case import engine_arguments
from sglang.srt import server_args as sglang_args
from workloads import CASES

from nsa_backend.adapters.installed import adapter
from nsa_backend.benchmarks.checkpoints import faithful
from nsa_backend.benchmarks.checkpoints.faithful_models import MODELS

PORT = free_port(*range(1, 20))
RUN_HERE = [case for case in CASES if case.ranks_per_gpu > 1 and case.runs_here()]
pytestmark = pytest.mark.skipif(not RUN_HERE, reason="the cases are of 0.5.23")
ATTENTION_DP = [case for case in RUN_HERE if "dp_size" in case.engine]


@pytest.fixture
def resolved(resolve, tmp_path):
    """Returns a function of a case to the arguments of its nodes, as their command lines are parsed and checked."""

    def of_nodes(case) -> list:
        written = faithful.config(faithful.ALL_SHAPES[case.shape], MODELS[case.model])
        (tmp_path / "config.json").write_text(json.dumps(written))
        found = []
        for arguments in arguments_of(engine_arguments(case, str(tmp_path), PORT), case.ranks_per_gpu):
            found.append(resolve(*command(arguments)[3:]))
            found[-1].check_server_args()
        return found

    return of_nodes


@pytest.mark.parametrize("case", RUN_HERE, ids=lambda case: case.name)
def test_every_node_has_one_rank_a_gpu(resolved, case):
    """`_calculate_rank_ranges` divides the ranks by the nodes, and a rank's GPU is its number among those of its node."""
    nodes = [adapter.resolved(one) for one in resolved(case)]
    assert [(node.nnodes, node.node_rank) for node in nodes] == [(case.ranks_per_gpu, n) for n in range(case.ranks_per_gpu)]
    for node in nodes:
        assert (node.tp_size // node.nnodes, node.pp_size, node.base_gpu_id, node.gpu_id_step) == (case.gpus, 1, 0, 1)
        assert node.tp_size == case.ranks_per_gpu * case.gpus
        assert node.attn_dp_size == case.engine.get("dp_size", 1)
        assert getattr(node, adapter.DECODE_ATTRIBUTE) == ("fa3" if case.decode == "auto" else case.decode)
        assert (node.disable_custom_all_reduce, node.flashinfer_allreduce_fusion_backend) == (True, None)
    assert {node.dist_init_addr for node in nodes} == {f"{HOST}:{PORT + MEETING}"}
    apart = {name for name in installed_source.server_fields() if len({str(getattr(node, name)) for node in nodes}) > 1}
    assert apart == {"port", "node_rank"}


@pytest.mark.slow
@pytest.mark.parametrize("case", ATTENTION_DP[:1], ids=lambda case: case.name)
def test_nodes_of_one_machine_must_look_before_the_first_one_listens(resolved, monkeypatch, case):
    """All that SGLang derives from where ranks meet is in `ports_of`, and each of it is looked at by every node."""
    monkeypatch.setenv("SGLANG_WAIT_PORT_TIMEOUT", "1")  # for a port that is taken SGLang waits for half a minute otherwise
    first, other = resolved(case)
    addresses = dataclasses.asdict(sglang_args.PortArgs.init_new(first))
    taken = {int(found[1]) for value in addresses.values() if (found := re.fullmatch(r"tcp://.*:(\d+)", str(value)))}
    assert taken == {PORT + MEETING + at for at in AFTER_MEETING[:-1]}
    assert taken | {PORT, PORT + MEETING + AFTER_MEETING[-1]} <= ports_of(case, PORT)
    again = dataclasses.asdict(sglang_args.PortArgs.init_new(other))  # nobody listens
    assert {again[name] for name in again if "tcp://" in str(again[name])} == {f"tcp://{HOST}:{port}" for port in taken}
    for port in (PORT + MEETING, *sorted(taken)):
        with socket.socket() as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((HOST, port))
            listening.listen()
            with pytest.raises(ValueError, match=str(port)):
                sglang_args.PortArgs.init_new(other)


def test_a_node_says_when_it_has_looked():
    """The line comes after the ports were looked at, and before anything of the node listens."""
    engine = (installed_source.ROOT / "entrypoints" / "engine.py").read_text()
    start = engine.index("def _launch_subprocesses")
    looked, said = (
        engine.index("PortArgs.init_new(server_args)", start),
        engine.index(f'logger.info(f"{LOOKED_AT_PORTS}{{', start),
    )
    started = engine.index("cls._launch_scheduler_processes(", start)
    assert looked < said < started
    server = (installed_source.ROOT / "entrypoints" / "http_server.py").read_text()
    assert "Engine._launch_subprocesses(" in server[server.index("\ndef launch_server(") :]
