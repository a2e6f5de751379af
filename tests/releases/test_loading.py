"""What SGLang's plugin loader leaves behind: our backend under every name, our draft backends, or nothing at all."""

import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.draft_utils import DraftBackendFactory
from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import EAGLEDraftExtendCudaGraphRunner

from nsa_backend import plugin, registration
from nsa_backend.adapters import sglang_types
from nsa_backend.adapters.installed import adapter
from nsa_backend.adapters.shared import Settings, hook
from nsa_backend.backend import NativeSparseAttnBackend
from nsa_backend.multi_step import NativeSparseAttnMultiStepBackend
from nsa_backend.testing.calls import calls


def test_entry_point_is_installed():
    (entry,) = [e for e in entry_points(group="sglang.srt.plugins") if e.name == "nsa_backend"]
    assert entry.load() is plugin.register


@pytest.mark.parametrize("name", adapter.BACKEND_NAMES)
def test_the_registry_builds_our_backend(make_runner, name):
    assert isinstance(sglang_types.ATTENTION_BACKENDS[name](make_runner()), NativeSparseAttnBackend)


def test_all_names_of_the_builtin_are_ours():
    """A name that still reached the built-in backend would serve with it and say nothing."""
    assert {name for name in sglang_types.ATTENTION_BACKENDS if name in ("nsa", "dsa")} == set(adapter.BACKEND_NAMES)


HOOKED = ["ServerArgs.check_server_args"] + [
    f"DraftBackendFactory._create_{adapter.BACKEND_NAMES[0]}_{phase}_backend" for phase in ("decode", "prefill")
]


@pytest.mark.parametrize("name", HOOKED)
def test_every_hook_took(name):
    owner, method = name.split(".")
    assert getattr({"ServerArgs": ServerArgs, "DraftBackendFactory": DraftBackendFactory}[owner], method).__wrapped__


def test_what_other_plugins_hook_is_left_to_the_loader(monkeypatch):
    """SGLang patches a target once: were its registry applied before all plugins are loaded, later hooks would be lost.

    Its releases bring such a plugin along, which adds options of its own to the parser that ours adds options to.
    """
    module, calls_made = ModuleType("a_module_of_sglang"), []
    module.function = lambda: calls_made.append("original")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    target = f"{module.__name__}.function"

    def named(name):
        return lambda original: (calls_made.append(name), original())

    HookRegistry.register(target, named("a plugin before"), sglang_types.HookType.AROUND)
    hook(target, named("ours"), sglang_types.HookType.AROUND)
    hook(target, named("ours again"), sglang_types.HookType.AROUND)
    HookRegistry.register(target, named("a plugin after"), sglang_types.HookType.AROUND)
    HookRegistry.apply_hooks()
    module.function()
    assert calls_made == ["a plugin after", "a plugin before", "ours", "original"]


OF_MANAGERS = ("io_struct", "tokenizer", "detokenizer", "schedule_batch", "schedule_policy")
OF_THE_SCHEDULER = ("handle", "process", "get_next_batch", "abort")
REQUESTS = ("sglang.srt.entrypoints", "sglang.srt.sampling", *(f"sglang.srt.managers.{name}" for name in OF_MANAGERS))
REQUESTS += tuple(f"sglang.srt.managers.scheduler.Scheduler.{name}" for name in OF_THE_SCHEDULER)
"""What a request goes through before it is in a batch, where malformed ones, too long ones and aborts are decided."""


def test_what_becomes_of_a_request_before_its_batch_is_left_to_sglang():
    """So its answers are the built-in backend's."""
    sources = Path(registration.__file__).parent.rglob("*.py")
    names = {found for source in sources for found in re.findall(r"""["'](sglang\.srt\.[\w.]+)""", source.read_text())}
    assert {"sglang.srt.server_args.ServerArgs.check_server_args", "sglang.srt.managers.scheduler"} <= names
    assert [name for name in names if name.startswith(REQUESTS)] == []


def test_a_hook_that_does_not_take_is_an_error():
    with pytest.raises(RuntimeError, match=r"could not hook sglang\.srt\.plugins\.nothing_here"):
        hook("sglang.srt.plugins.nothing_here", lambda original: original(), sglang_types.HookType.AROUND)


@pytest.mark.parametrize("name", adapter.BACKEND_NAMES)
@pytest.mark.parametrize("num_steps", [2, 3, 9])
def test_the_draft_factory_builds_ours(make_runner, monkeypatch, name, num_steps):
    factory = calls.draft_factory(make_runner(num_steps=num_steps), num_steps)
    monkeypatch.setattr(factory, "draft_attn_backend", name)  # as --speculative-draft-attention-backend does
    multi_step, extend = factory.create_decode_backend(), factory.create_draft_extend_backend()
    assert isinstance(multi_step, NativeSparseAttnMultiStepBackend)
    assert isinstance(extend, NativeSparseAttnBackend)
    assert len(multi_step.attn_backends) == num_steps - 1
    stamps = {getattr(b, "decode_attention_backend_str", None) for b in (multi_step, extend, *multi_step.attn_backends)}
    assert stamps <= {None, *adapter.BACKEND_NAMES}  # SGLang chooses a model's attention method by this name, where it sets one


def test_one_draft_step_needs_no_multi_step_backend(make_runner):
    assert calls.draft_factory(make_runner(num_steps=1), 1).create_decode_backend() is None


def test_half_a_registration_stops_the_server(make_runner, monkeypatch):
    monkeypatch.setitem(sglang_types.ATTENTION_BACKENDS, adapter.BACKEND_NAMES[-1], lambda runner: None)
    with pytest.raises(RuntimeError, match="took over the draft side and not the target"):
        calls.draft_factory(make_runner(), 3).create_decode_backend()


def test_draft_backends_can_be_built_twice(make_runner):
    """A process may build more than one draft worker: SGLang's graph runner is hooked once."""
    factory = calls.draft_factory(make_runner(), 3)
    for _ in range(2):
        factory.create_decode_backend()
        factory.create_draft_extend_backend()
    build = EAGLEDraftExtendCudaGraphRunner.__init__
    assert not hasattr(build.__wrapped__, "__wrapped__")


def test_the_options_are_those_the_process_resolved(make_runner):
    runner = make_runner(num_steps=5)
    assert adapter.settings(runner) == Settings(
        decode="torch", prefill="torch", num_steps=5, num_draft_tokens=6, decode_by_user=True, prefill_by_user=True
    )
    assert registration.create_backend(runner).config.num_draft_tokens == 6


OUTSIDE = """
import logging, sys, types
import torch
from nsa_backend import releases
releases.version = lambda name: "0.5.24"
logging.basicConfig(level=logging.WARNING, format="%(name)s|%(message)s")
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
load_plugins()
hooks = [hook for hooks in HookRegistry._hooks.values() for _, hook, _ in hooks]
print("hooks", [hook for hook in hooks if hook.__module__.startswith("nsa_backend")])
print("adapter imported", "nsa_backend.adapters.installed" in sys.modules)
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
print("modules", {ATTENTION_BACKENDS[name].__module__ for name in ("nsa", "dsa") if name in ATTENTION_BACKENDS})
"""


@pytest.mark.slow
def test_a_release_outside_the_range_is_left_alone():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", OUTSIDE], env=dict(os.environ), capture_output=True, text=True, check=True
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("nsa_backend")]
    assert len(lines) == 1
    assert "this is 0.5.24, SGLang's built-in backend serves" in lines[0]
    assert done.stdout.splitlines()[-3:] == [
        "hooks []",
        "adapter imported False",
        "modules {'sglang.srt.layers.attention.attention_registry'}",
    ]
