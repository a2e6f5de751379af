"""Ranks of one server with different NSA_BACKEND_* values: each ends with a sentence, and none waits for another."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from nsa_backend.adapters import alike_ranks
from nsa_backend.environment import VARIABLES, in_force

PLAIN = {variable.name: variable.default for variable in VARIABLES}
ONE, OFF, NO_PLUGIN = {"NSA_BACKEND_ROUND_GRAPH": "1"}, {"NSA_BACKEND_DISABLE": "1"}, None


@pytest.fixture
def ends(monkeypatch):
    """Returns a function of each rank's values to what every rank with the plugin ends with, all of them at once."""
    monkeypatch.setattr(alike_ranks, "PATIENCE", timedelta(seconds=1))
    monkeypatch.setattr(alike_ranks.socket, "gethostname", lambda: "here")

    def ended(ranks: list[dict[str, str] | None], serves: bool = True) -> set[str]:
        store = HashStore()

        def one(rank: int) -> str:
            serving = serves and ranks[rank] is not OFF
            try:
                alike_ranks.check_alike(store, rank, len(ranks), serving, PLAIN | ranks[rank])
            except ValueError as error:
                return str(error)
            return "it starts"

        with ThreadPoolExecutor(len(ranks)) as pool:
            return set(pool.map(one, [rank for rank, given in enumerate(ranks) if given is not NO_PLUGIN]))

    return ended


FOR_EVER, ALIKE = "ranks of one server would wait for one another for ever: ", "set it alike on all nodes"


@pytest.mark.parametrize(
    ("ranks", "end"),
    [
        ([{}, {"NSA_BACKEND_CHECK": "0"}], "it starts"),  # what it is anyway
        ([ONE] * 4, "it starts"),
        ([OFF, OFF], "it starts"),
        (
            [ONE, {}, ONE, {}],
            f"{FOR_EVER}NSA_BACKEND_ROUND_GRAPH is 1 on ranks 0, 2 (here) and unset on ranks 1, 3 (here); {ALIKE}",
        ),
        (
            [{}, OFF | ONE],
            f"{FOR_EVER}NSA_BACKEND_DISABLE is 0 on rank 0 (here) and 1 on rank 1 (here); NSA_BACKEND_ROUND_GRAPH is unset on "
            f"rank 0 (here) and 1 on rank 1 (here); {ALIKE}",
        ),
        (
            [{}, NO_PLUGIN, {}, NO_PLUGIN],
            "ranks 1, 3 of this server did not say their NSA_BACKEND_* values within 1 s of joining, and ranks 0, 2 did: "
            "install this package on every node, and have SGLANG_PLUGINS alike",
        ),
    ],
)
def test_all_ranks_end_alike(ends, ranks, end):
    assert ends(ranks) == {end}


def test_servers_of_other_backends_are_left_alone(ends):
    assert ends([{}, ONE, NO_PLUGIN], serves=False) == {"it starts"}


def test_values_are_those_of_the_environment(monkeypatch):
    for name in PLAIN:
        monkeypatch.delenv(name, raising=False)
    assert in_force() == PLAIN
    monkeypatch.setenv("NSA_BACKEND_ROUND_GRAPH", "0")
    assert in_force() == PLAIN | {"NSA_BACKEND_ROUND_GRAPH": "0"}


RANK = """
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.distributed import parallel_state
if "NSA_BACKEND_DISABLE" not in os.environ:
    from nsa_backend.testing.calls import calls
    options = calls.publish(3, 4)["server_args"]
    if hasattr(module := sys.modules["sglang.srt.server_args"], "_global_server_args"):
        options.get_attention_backends = lambda: ("nsa", "nsa")
        module._global_server_args = options
parallel_state.init_distributed_environment(
    backend="gloo", world_size=2, rank=int(sys.argv[1]), local_rank=0, distributed_init_method=f"file://{sys.argv[2]}"
)
"""


@pytest.mark.slow
def test_processes_that_meet_as_sglang_lets_them(tmp_path):
    """One has the plugin switched off, and says so."""
    others = {name: value for name, value in os.environ.items() if name not in PLAIN}
    command = [sys.executable, "-W", "ignore", "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "met")], env=others | given, stderr=subprocess.PIPE, text=True)
        for rank, given in enumerate(({}, OFF))
    ]
    for rank in ranks:
        _, said = rank.communicate(timeout=300)
        assert f"ValueError: {FOR_EVER}NSA_BACKEND_DISABLE is 0 on rank 0" in said
        assert rank.returncode == 1
