"""What sampled rounds launch is compiled while a server starts."""

from __future__ import annotations

import inspect
import logging
import threading
from types import SimpleNamespace

import pytest

from nsa_backend.releases import installed, round_graph_problem

if round_graph_problem() is not None:
    pytest.skip(f"SGLang {installed()} has no rounds in one graph", allow_module_level=True)

from flashinfer.jit import core, sampling

from nsa_backend.adapters.dsa import draft
from nsa_backend.adapters.dsa.rounds import samplers
from nsa_backend.adapters.dsa.rounds.served import SAMPLED_SWITCH


class Kernels:
    """In place of FlashInfer's, which only a machine with a GPU may name."""

    def __init__(self, *, is_aot: bool = False, error: Exception | None = None):
        self.is_aot, self.error = is_aot, error
        self.began, self.may_end, self.built = threading.Event(), threading.Event(), 0

    def build(self, verbose: bool, need_lock: bool) -> None:
        self.began.set()
        assert self.may_end.wait(10)
        if self.error is not None:
            raise self.error
        self.built += need_lock


@pytest.fixture
def kernels(monkeypatch):
    def give(**more: object) -> Kernels:
        found = Kernels(**more)
        monkeypatch.setattr(sampling, "gen_sampling_module", lambda: found)
        return found

    monkeypatch.setenv(SAMPLED_SWITCH, "1")
    return give


def worker(monkeypatch, *, rounds: bool = True) -> object:
    monkeypatch.setattr("nsa_backend.adapters.dsa.rounds.worker.with_rounds", lambda worker_class, backends: "with rounds")
    arguments = (), lambda args: rounds, lambda algorithm, args: "SGLang's"
    return draft._round_worker(*arguments, SimpleNamespace(is_eagle=lambda: True), SimpleNamespace())


def test_a_start_goes_on_while_they_compile(kernels, monkeypatch):
    given = kernels()
    assert worker(monkeypatch) == "with rounds"
    assert given.began.wait(10)
    (thread,) = (one for one in threading.enumerate() if "FlashInfer" in one.name)
    assert thread.daemon
    given.may_end.set()
    thread.join(10)
    assert given.built == 1


def test_nothing_compiles_for_rounds_that_are_not_captured_or_where_flashinfer_came_with_them(kernels, monkeypatch):
    given = kernels(is_aot=True)
    assert samplers.compile_meanwhile() is None
    given = kernels()
    assert worker(monkeypatch, rounds=False) == "SGLang's"
    monkeypatch.setenv(SAMPLED_SWITCH, "0")
    assert samplers.compile_meanwhile() is None
    assert not given.began.is_set()


def test_the_log_says_why_they_do_not_compile(kernels, caplog):
    given = kernels(error=RuntimeError("Ninja build failed.\nnvcc: not found"))
    given.may_end.set()
    with caplog.at_level(logging.WARNING):
        samplers.compile_meanwhile().join(10)
    (said,) = (record.getMessage() for record in caplog.records)
    what = "FlashInfer's sampling kernels do not compile, RuntimeError: Ninja build failed."
    assert said == f"nsa_backend: {what}; sampled rounds will try again"


def test_a_start_goes_on_where_flashinfer_refuses(monkeypatch, caplog):
    def refuse() -> None:
        raise RuntimeError("FlashInfer requires GPUs with sm75 or higher.")

    monkeypatch.setenv(SAMPLED_SWITCH, "1")
    monkeypatch.setattr(sampling, "gen_sampling_module", refuse)
    with caplog.at_level(logging.WARNING):
        assert worker(monkeypatch) == "with rounds"
    (said,) = (record.getMessage() for record in caplog.records)
    assert "do not compile, RuntimeError: FlashInfer requires GPUs" in said


def test_flashinfers_own_are_asked_for_the_same():
    kernels = getattr(core, "JitSpecNvcc", core.JitSpec)
    assert isinstance(kernels.is_aot, property)
    inspect.signature(kernels.build).bind(None, verbose=False, need_lock=True)
