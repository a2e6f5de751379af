"""When the plugin does nothing or stops the server, and what it says; tests/releases/test_loading.py has what it registers."""

import logging
import os
import re
import subprocess
import sys

import pytest

from nsa_backend import plugin, registration, releases
from nsa_backend.environment import SWITCHES


@pytest.fixture
def environment(monkeypatch):
    """Returns a function that sets our switches and the host release, for one call of `register`."""

    def prepare(release: str = releases.installed(), **switches: str) -> None:
        for name in SWITCHES:
            monkeypatch.delenv(name, raising=False)
        for name, value in switches.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(releases, "version", lambda name: release)

    return prepare


REASONS = [
    ({"release": "0.6.0"}, "it supports SGLang .* and this is 0.6.0"),
    ({"release": "0.5.24"}, "it supports SGLang .* and this is 0.5.24"),
    ({"release": "0.5.16"}, "this is 0.5.16"),
    ({"NSA_BACKEND_DISABLE": "1"}, "NSA_BACKEND_DISABLE is set"),
]


@pytest.mark.parametrize(("setting", "reason"), REASONS)
def test_says_in_one_line_why_it_does_nothing(monkeypatch, caplog, environment, setting, reason):
    environment(**setting)
    monkeypatch.setattr(registration, "take_over", lambda: pytest.fail("the plugin took over"))
    with caplog.at_level(logging.INFO):
        plugin.register()
    assert len(caplog.records) == 1
    assert re.search(f"{reason}, SGLang's built-in backend serves", caplog.text)


@pytest.mark.parametrize(("setting", "reason"), REASONS)
def test_required_and_not_served_stops_the_server(environment, setting, reason):
    environment(**setting, NSA_BACKEND_REQUIRED="1")
    with pytest.raises(SystemExit, match=f"NSA_BACKEND_REQUIRED=1: .*{reason}"):
        plugin.register()


def test_required_and_broken_stops_the_server(monkeypatch, environment):
    def broken():
        raise RuntimeError("a hook did not take")

    monkeypatch.setattr(registration, "take_over", broken)
    environment(NSA_BACKEND_REQUIRED="1")
    with pytest.raises(SystemExit, match="did not load and NSA_BACKEND_REQUIRED=1: a hook did not take"):
        plugin.register()
    environment()
    with pytest.raises(RuntimeError, match="a hook did not take"):  # SGLang logs it at error level and goes on
        plugin.register()


@pytest.mark.parametrize("name", SWITCHES)
def test_a_bad_switch_stops_the_server(environment, name):
    environment(**{name: "yes"})
    with pytest.raises(SystemExit, match=f"{name} must be 0 or 1, and it is 'yes'"):
        plugin.register()


@pytest.mark.slow
def test_a_stop_passes_through_sglangs_loader():
    """SGLang catches exceptions of plugins; SystemExit is not one."""
    code = "from sglang.srt.plugins import load_plugins; load_plugins(); print('went on')"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=os.environ | {"NSA_BACKEND_DISABLE": "1", "NSA_BACKEND_REQUIRED": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "went on" not in done.stdout
    assert "NSA_BACKEND_REQUIRED=1: NSA_BACKEND_DISABLE is set" in done.stderr


def test_one_log_line_says_that_the_backend_serves(make_runner, caplog):
    with caplog.at_level(logging.INFO, logger="nsa_backend"):
        registration.create_backend(make_runner(num_steps=3))
    (line,) = [r.getMessage() for r in caplog.records]
    for part in ("is active", "decode=torch", "prefill=torch", "draft steps=3", "page size=64"):
        assert part in line


def test_a_draft_model_is_silent(make_runner, caplog):
    runner = make_runner()
    runner.is_draft_worker = True
    with caplog.at_level(logging.INFO, logger="nsa_backend"):
        registration.create_backend(runner)
    assert not caplog.records


@pytest.mark.parametrize("switch", [None, "0", "1"])
@pytest.mark.parametrize("problem", [None, "another release"])
def test_rounds_are_taken_where_the_release_has_them(monkeypatch, switch, problem):
    """A server of another model than ours has no start-up check, and must not meet hooks made for another release."""
    seen = []
    monkeypatch.delenv("NSA_BACKEND_ROUND_GRAPH", raising=False)
    if switch is not None:
        monkeypatch.setenv("NSA_BACKEND_ROUND_GRAPH", switch)
    monkeypatch.setattr(registration, "round_graph_problem", lambda: problem)
    monkeypatch.setattr(registration.adapter, "take_over", lambda ours: seen.append("registered"))
    monkeypatch.setattr(registration.adapter, "take_rounds", lambda ours: seen.append("rounds"))
    registration.take_over()
    assert seen == (["registered"] if problem or switch == "0" else ["registered", "rounds"])
