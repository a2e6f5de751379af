"""NSA_BACKEND_REQUIRED=1: a server that anything else would serve does not start, and says what serves and what to change."""

import json
import sys
from functools import partial
from types import SimpleNamespace

import pytest
from server_words import OWN, SPECULATIVE
from sglang.srt.managers import scheduler as scheduler_module
from sglang.srt.model_executor.model_runner import ModelRunner

from nsa_backend.adapters import sglang_types, shared, startup
from nsa_backend.adapters.installed import adapter
from nsa_backend.backend import NativeSparseAttnBackend
from nsa_backend.benchmarks.checkpoints.faithful import SHAPES, config
from nsa_backend.multi_step import NativeSparseAttnMultiStepBackend
from nsa_backend.registration import OURS, create_backend
from nsa_backend.required import check_built
from nsa_backend.testing.calls import calls

SPARSE = config(SHAPES["faithful"])
DENSE = {name: value for name, value in SPARSE.items() if not name.startswith("index_")} | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
}


@pytest.fixture
def required(monkeypatch):
    monkeypatch.setenv("NSA_BACKEND_REQUIRED", "1")


EAGLE3 = *SPECULATIVE, "--speculative-algorithm", "EAGLE3", "--speculative-draft-attention-backend", "fa3"
"""Whose drafts a dense model makes."""


@pytest.mark.parametrize("options", [(), OWN, SPECULATIVE, EAGLE3])
def test_a_server_that_ours_serves_starts(resolve, required, options):
    resolve(*options).check_server_args()


@pytest.mark.parametrize(
    ("options", "part", "name"),
    [
        (["--attention-backend", "triton"], "prefill", "triton"),
        ([*OWN, "--decode-attention-backend", "flashmla"], "decode", "flashmla"),
        ([*OWN, "--prefill-attention-backend", "fa3"], "prefill", "fa3"),
        ([*SPECULATIVE, "--speculative-draft-attention-backend", "fa3"], "drafts", "fa3"),
    ],
)
def test_options_that_choose_another_backend(resolve, monkeypatch, options, part, name):
    server_args = resolve(*options)
    if options[:2] == ["--attention-backend", "triton"]:
        server_args.check_server_args()  # without the switch it is none of our business
    monkeypatch.setenv("NSA_BACKEND_REQUIRED", "1")
    with pytest.raises(ValueError, match=f"^NSA_BACKEND_REQUIRED=1 and the attention backend of {part} is {name}: .*unset"):
        server_args.check_server_args()


def test_a_plugin_that_registered_later(resolve, required, monkeypatch):
    server_args = resolve(*OWN)
    other = lambda runner: None  # noqa: E731
    other.__module__ = "another_plugin.backend"
    monkeypatch.setitem(sglang_types.ATTENTION_BACKENDS, OWN[1], other)
    with pytest.raises(ValueError, match=f"another_plugin.backend has registered the attention backend {OWN[1]} since.*SGL"):
        server_args.check_server_args()


def test_a_model_that_is_not_sparse(resolve, required, tmp_path):
    """SGLang chooses a backend for it by itself, and ours is not asked."""
    folder = tmp_path / "dense"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(DENSE))
    server_args = resolve("--model-path", str(folder))
    with pytest.raises(ValueError, match=r"backend of prefill is .*: pass --attention-backend .* with a model that has"):
        server_args.check_server_args()


class Other:
    """Some other backend."""


@pytest.fixture
def watched(monkeypatch):
    """SGLang's own hooks taken around stand-ins that build what a test says; undone afterwards."""
    adapter.take_draft_side(OURS)  # which stays, and must not be hooked twice
    monkeypatch.setattr(shared, "_HOOKED", {shared.EXTEND_RUNNER})
    method = next(name for name in startup.INIT_BACKENDS if hasattr(ModelRunner, name))

    def build(runner):
        runner.attn_backend = runner.builds

    def construct(scheduler, runners):
        for runner in runners:
            getattr(ModelRunner, method)(runner)

    monkeypatch.setattr(ModelRunner, method, build)
    monkeypatch.setattr(scheduler_module.Scheduler, "__init__", construct)
    for name in ("create_decode_backend", "create_draft_extend_backend"):
        monkeypatch.setattr(sglang_types.DraftBackendFactory, name, getattr(sglang_types.DraftBackendFactory, name))
    adapter.watch_backends(partial(check_built, ours=(NativeSparseAttnBackend, NativeSparseAttnMultiStepBackend)))
    return lambda *runners: scheduler_module.Scheduler(runners)


def runner(backend, is_draft_worker=False, algorithm="EAGLE"):
    args = SimpleNamespace(speculative_algorithm=algorithm)
    return SimpleNamespace(builds=backend, is_draft_worker=is_draft_worker, server_args=args)


def test_what_ours_serves_is_let_pass(watched, make_runner):
    ours = create_backend(make_runner())
    hybrid = SimpleNamespace(prefill_backend=ours, decode_backend=create_backend(make_runner()))
    watched(runner(ours), runner(ours, is_draft_worker=True))
    watched(runner(hybrid))


def test_a_dense_draft_model_has_another_backend(watched, make_runner):
    """And the target has not."""
    drafts = runner(Other(), is_draft_worker=True, algorithm="EAGLE3")
    watched(runner(create_backend(make_runner()), algorithm="EAGLE3"), drafts)
    with pytest.raises(ValueError, match="serves the target model"):
        watched(runner(Other(), algorithm="EAGLE3"), drafts)


@pytest.mark.parametrize("is_draft_worker", [False, True])
def test_what_another_backend_serves_stops_the_scheduler(watched, make_runner, is_draft_worker):
    ours = create_backend(make_runner())
    part = "draft model" if is_draft_worker else "target model"
    for built in (Other(), SimpleNamespace(prefill_backend=ours, decode_backend=Other())):
        with pytest.raises(
            ValueError, match=rf"REQUIRED=1 and test_required\.Other serves the {part}: pass --attention-backend"
        ):
            watched(runner(ours), runner(built, is_draft_worker))


def test_a_target_that_nobody_saw_built_stops_the_scheduler(watched, make_runner):
    with pytest.raises(ValueError, match="NoneType serves the target model"):
        watched()
    with pytest.raises(ValueError, match="NoneType serves the target model"):
        watched(runner(create_backend(make_runner()), is_draft_worker=True))


@pytest.mark.parametrize(("phase", "part"), [("decode", "draft steps"), ("draft_extend", "draft-extend")])
def test_draft_backends_are_looked_at_as_well(watched, make_runner, monkeypatch, phase, part):
    watched(runner(create_backend(make_runner())))
    factory = calls.draft_factory(make_runner(), 3)
    create = getattr(factory, f"create_{phase}_backend")
    assert isinstance(create(), NativeSparseAttnMultiStepBackend | NativeSparseAttnBackend)
    stamped = "dsa" in adapter.BACKEND_NAMES and adapter.factory_returns_a_name()
    built = SimpleNamespace(attn_backends=[])
    name = f"_create_triton_{'decode' if phase == 'decode' else 'prefill'}_backend"
    monkeypatch.setattr(type(factory), name, lambda factory: ("triton", built) if stamped else built)
    monkeypatch.setattr(factory, "draft_attn_backend", "triton")
    with pytest.raises(ValueError, match=f"SimpleNamespace serves the {part}"):
        create()
    monkeypatch.setattr(startup, "drafts_are_dense", lambda server_args: server_args is factory.draft_model_runner.server_args)
    assert create() is built or stamped
    one_step = calls.draft_factory(make_runner(num_steps=1), 1)
    assert one_step.create_decode_backend() is None


def test_processes_without_a_scheduler_are_left_alone(monkeypatch):
    monkeypatch.delitem(sys.modules, startup.SCHEDULER)
    monkeypatch.setattr(startup, "hook", lambda *args: pytest.fail("a module was loaded to be hooked"))
    adapter.watch_backends(lambda part, backend: None)
