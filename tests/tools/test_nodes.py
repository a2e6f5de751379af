"""Nodes of one deployment on one machine: their start, their end, and what is said of one that ends, with small stand-ins."""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import nodes
import pytest
import run_case
from free_ports import free_port
from living import have_ended, is_alive
from nodes import MEETING, NCCL, Nodes
from pd_servers import command

E2E = Path(run_case.__file__).parent
NODE = E2E.parent / "support" / "stand_in_node.py"


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """Puts small processes in place of nodes; returns a function of what they do to arguments, with `seen` of them."""
    seen = tmp_path / "seen"
    monkeypatch.setenv("NODE_SEEN", str(seen))
    monkeypatch.setattr(nodes, "command", lambda arguments: [sys.executable, str(NODE), *command(arguments)[3:]])

    def arguments(**asked) -> dict:
        return {"port": free_port(*range(1, 20)), "tp_size": 4, "model_path": json.dumps(asked)}

    arguments.seen = lambda: [json.loads(line) for line in seen.read_text().splitlines()]
    return arguments


def started(seen: list) -> dict[int, SimpleNamespace]:
    """What each node was started with, by its number, in the order in which they started."""
    names = ("at", "option", "environment", "pid")
    return {row[0]: SimpleNamespace(**dict(zip(names, row[1:], strict=True))) for row in seen if row[0] != "asked"}


def test_the_first_node_starts_once_the_others_have_looked_at_its_ports(stand_ins, tmp_path):
    arguments = stand_ins(seconds=1.0)
    port = arguments["port"]
    with Nodes(arguments, 3, tmp_path / "case.json") as deployment:
        deployment.wait(20)
        answers = deployment.generate([[1, 2], [3, 4, 5]], {"temperature": 0})
        found = started(stand_ins.seen())
        assert all(is_alive(node.pid) for node in found.values())
    assert [a["output_ids"] for a in answers] == [[2], [3]]
    assert sorted(found) == [0, 1, 2]
    assert found[0].at > max(found[1].at, found[2].at) + 1.0
    assert [found[n].environment["NCCL_HOSTID"] for n in range(3)] == ["node0", "node1", "node2"]
    for node in found.values():
        assert (
            node.environment.items() >= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo"}.items()
        )
        assert (node.option["--nnodes"], node.option["--dist-init-addr"]) == ("3", f"127.0.0.1:{port + MEETING}")
        assert (node.option["--nccl-port"], node.option["--tp-size"]) == (str(port + NCCL), "4")
        assert not is_alive(node.pid)
    assert [found[n].option["--port"] for n in range(3)] == [str(port + n) for n in range(3)]


def nodes_have_ended(stand_ins) -> bool:
    return have_ended(node.pid for node in started(stand_ins.seen()).values())


def test_a_node_that_does_not_start_says_why(stand_ins, tmp_path):
    with pytest.raises(
        RuntimeError, match=r"^node 1 of 3: exit code 1, after \d+ s: ValueError: there is no such option\n"
    ) as told:
        Nodes(stand_ins(**{"fails at once": 1}), 3, tmp_path / "case.json").__enter__()
    assert "The last lines of node 1:" in str(told.value)
    assert nodes_have_ended(stand_ins)


def test_a_node_that_ends_ends_the_wave_it_is_missing_in(stand_ins, tmp_path):
    began = time.monotonic()
    with Nodes(stand_ins(raises=1, **{"answers after": 60}), 2, tmp_path / "case.json") as deployment:
        deployment.wait(20)
        with pytest.raises(RuntimeError, match=r"^node 1 of 2: exit code 5, after \d+ s: KeyError: 'why'\n"):
            deployment.generate([[1]], {})
        assert nodes_have_ended(stand_ins)
    assert time.monotonic() - began < 15


def answered(deployment: Nodes) -> None:
    """In a function of its own: a rank may end before the node is ready, where the machine has much to do."""
    deployment.wait(20)
    deployment.generate([[1]], {})


def test_a_node_that_lives_on_without_a_rank(stand_ins, tmp_path):
    """A rank that is killed leaves a node which waits for another of its ranks."""
    lasting = f"scheduler_{tmp_path.name}"
    ranks = [[1, lasting, 60, 0], [1, "scheduler_TP3", 3, 9]]
    told = pytest.raises(RuntimeError, match=r"^node 1 of 2: sglang::scheduler_TP3 ended first: exit code 9, after")
    with Nodes(stand_ins(ranks=ranks, **{"answers after": 60}), 2, tmp_path / "case.json") as deployment, told:
        answered(deployment)
    assert lasting not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
