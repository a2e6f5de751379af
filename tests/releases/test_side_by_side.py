"""Engines side by side on the same GPUs: none takes a port of another, by SGLang's own rules, nor ends where another loads."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import sys
from pathlib import Path

import pytest
from sglang.srt import server_args as sglang_args
from sglang.srt.environ import envs

from nsa_backend.benchmarks import faithful_checkpoint
from nsa_backend.benchmarks.servers import SIDE_BY_SIDE

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from engines import PORTS, PORTS_APART
from next_token import question
from run_case import engine_arguments
from workloads import CASES

CASE = "four GPUs, DP attention 4, fa3"
"""With DP attention SGLang counts ports up from the engine's own, and talks over sockets without."""
FIRST, MOST = 12000, 50
JUDGES = 1000
"""From the first engine's port to that of the first one that is asked about ties."""


def test_what_lets_engines_load_beside_each_other_is_a_switch_of_sglang():
    """Otherwise ranks that see unequal memory, while another engine takes it, end the start."""
    for name in SIDE_BY_SIDE:
        assert getattr(envs, name).get() is True


@pytest.fixture
def ports_of(resolve, tmp_path, monkeypatch):
    """Returns a function of (case, port) to the ports that such an engine listens on."""
    if hasattr(sglang_args, "wait_port_available"):
        monkeypatch.setattr(sglang_args, "wait_port_available", lambda *of_port: True)
    resolve()  # stands in for the GPU
    (tmp_path / "config.json").write_text(json.dumps(faithful_checkpoint.config(faithful_checkpoint.SHAPES["faithful"])))

    def found(case, port: int) -> set[int]:
        server_args = sglang_args.ServerArgs(**engine_arguments(case, str(tmp_path), port), device="cuda")
        if hasattr(server_args, "resolve_once"):
            server_args.resolve_once()
        made = dataclasses.asdict(sglang_args.PortArgs.init_new(server_args)).values()
        addresses = [re.fullmatch(r"tcp://.*:(\d+)", str(value)) for value in made]
        return {value for value in made if type(value) is int} | {int(address[1]) for address in addresses if address}

    return found


@pytest.mark.parametrize("ask", [False, True], ids=["measured", "asked about ties"])
@pytest.mark.parametrize("name", [CASE, "four GPUs, tensor parallel, fa3", "n3 fa3"])
def test_engines_side_by_side_share_no_port(ports_of, name, ask):
    case = next(c for c in CASES if c.name == name)
    case = question(case) if ask else case
    offsets, again = ({port - first for port in ports_of(case, first)} for first in (FIRST, FIRST + 60))
    widest = {port - FIRST for port in ports_of(next(c for c in CASES if c.name == CASE), FIRST)}
    assert offsets == again
    assert len(offsets) > 4 if "DP attention" in name else len(offsets) == 1
    begins = [*range(0, MOST * PORTS_APART, PORTS_APART), *range(JUDGES, JUDGES + MOST * PORTS_APART, PORTS_APART)]
    for one, other in itertools.permutations(set(begins), 2):
        assert not {one + offset for offset in offsets} & {other + offset for offset in widest}
    assert max(begins) + max(widest) < PORTS
