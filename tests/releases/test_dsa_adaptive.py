"""Adaptive speculation: SGLang's own controller, policy and switch, over backends of ours for each N."""

import inspect
import json
from types import MethodType, SimpleNamespace

import pytest
import torch
from batches import check, fill, random_batch, static_batch
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative import eagle_worker_v2
from sglang.srt.speculative.adaptive_runtime_state import AdaptiveController, SpecRuntimeState
from sglang.srt.speculative.adaptive_spec_params import AdaptiveSpeculativeParams

from nsa_backend.adapters.installed import adapter
from nsa_backend.adapters.sglang_types import ForwardMode
from nsa_backend.registration import create_backend
from nsa_backend.testing.calls import calls

CANDIDATES = [0, 1, 3, 7]
REQUESTS = 5


@pytest.fixture
def worker(make_runner, tmp_path, monkeypatch):
    """SGLang's EAGLE worker as far as it builds and switches states; graphs are captured by the test."""
    runner = make_runner(num_steps=3)
    monkeypatch.setattr(runner, "is_draft_worker", True)
    target = SimpleNamespace(
        **vars(runner) | {"is_draft_worker": False}, init_new_workspace=False, decode_cuda_graph_runner=None
    )
    target._get_attention_backend = lambda init_new_workspace: create_backend(target)
    target.attn_backend = create_backend(target)

    def init_attention_backend(draft):
        factory = calls.draft_factory(runner, draft.speculative_num_steps)
        draft.draft_attn_backend = factory.create_decode_backend()
        draft.draft_extend_attn_backend = factory.create_draft_extend_backend()

    draft = SimpleNamespace(
        speculative_num_steps=3,
        speculative_num_draft_tokens=4,
        draft_runner=SimpleNamespace(draft_attn_backend=None, attn_backend=None),
        cuda_graph_runner=None,
        cuda_graph_runner_for_draft_extend=None,
        _capture_cuda_graphs=lambda: None,
        _rebuild_topk1_chain_buffers=lambda: None,
    )
    draft.init_attention_backend = MethodType(init_attention_backend, draft)
    draft.init_attention_backend()
    worker = SimpleNamespace(
        speculative_num_steps=3,
        speculative_num_draft_tokens=4,
        device="cpu",
        gpu_id=0,
        _draft_worker=draft,
        _target_worker=SimpleNamespace(model_runner=target),
    )
    for name in ("build_adaptive_runtime_state", "apply_runtime_state", "_override_worker_state"):
        setattr(worker, name, MethodType(getattr(eagle_worker_v2.EAGLEWorkerV2, name), worker))
    monkeypatch.setattr(eagle_worker_v2, "get_available_gpu_memory", lambda *where: 0.0)
    monkeypatch.setattr(eagle_worker_v2, "check_cuda_graph_backend", lambda *asked: True)  # graphs are off for SGLang
    path = tmp_path / "adaptive.json"
    path.write_text(json.dumps({"1": {"candidate_steps": CANDIDATES, "warmup_batches": 0, "update_interval": 1}}))
    takes_policy = "policy" in inspect.signature(AdaptiveController).parameters  # 0.5.17 makes it itself
    worker.policy = AdaptiveSpeculativeParams(initial_steps=3, cfg_path=str(path)) if takes_policy else str(path)
    yield worker
    calls.publish(3, 4)


def parts(state: SpecRuntimeState) -> list[tuple]:
    """(mode, SGLang's mode, backend, rows of a request) of what runs in a round with this state's N."""
    d = state.speculative_num_draft_tokens
    found = [
        ("target_verify", ForwardMode.TARGET_VERIFY, state.target_attn_backend, d),
        ("draft_extend_v2", ForwardMode.DRAFT_EXTEND_V2, state.draft_extend_attn_backend, d),
    ]
    if state.draft_attn_backend is not None:
        found.append(("draft_decode", ForwardMode.DECODE, state.draft_attn_backend, 1))
    return found


def capture(state: SpecRuntimeState) -> list[tuple]:
    """Capture every part of a round; returns (part, static batch, the launch that its graph has)."""
    captured = []
    for part in parts(state):
        _, mode, backend, rows = part
        backend.init_cuda_graph_state(REQUESTS, REQUESTS * rows)
        static = static_batch(REQUESTS, REQUESTS * rows, mode)
        backend.init_forward_metadata_out_graph(static, in_capture=True)
        backend.init_forward_metadata_in_graph(static)
        captured.append((part, static, backend.captured.current))
    return captured


def test_states_of_several_n_are_switched(worker):
    """Each has the lengths and plans of its own N, whichever ran before, and all share one pool's page tables."""
    controller = AdaptiveController(worker, worker.policy)
    draft, target = worker._draft_worker, worker._target_worker.model_runner
    initial = SpecRuntimeState(
        3, 4, draft.draft_attn_backend, None, target.attn_backend, None, draft.draft_extend_attn_backend, None
    )
    controller.register(initial)
    graphs = {3: capture(initial)}
    build = worker.build_adaptive_runtime_state

    def build_and_capture(**asked):
        state = build(**asked)
        graphs[state.speculative_num_steps] = capture(state)
        return state

    worker.build_adaptive_runtime_state = build_and_capture
    controller.init_states()
    assert sorted(graphs) == CANDIDATES
    assert (get_spec().speculative_num_steps, get_spec().speculative_num_draft_tokens) == (3, 4)
    for seed, steps in enumerate((3, 7, 1, 0, 7, 3)):
        controller._activate(steps)
        assert adapter.settings(target).num_draft_tokens == steps + 1
        assert target.attn_backend.config.num_draft_tokens == steps + 1
        assert [part[2] for part, *_ in graphs[steps]][:2] == [target.attn_backend, draft.draft_extend_attn_backend]
        assert (draft.draft_attn_backend is None) == (steps < 2)
        for (mode, _, backend, _), static, launch in graphs[steps]:
            batch = random_batch(draft_runner_of(backend), mode, REQUESTS, seed, steps)
            fill(static, batch)
            backend.init_forward_metadata_out_graph(static)
            backend.writer.write(launch.plan, launch.buffers, launch.inputs)
            steps_of = backend.attn_backends if mode == "draft_decode" else [backend]
            for step, child in enumerate(steps_of):
                check(child.forward_metadata, batch, step)
    tables = {g[2].buffers.real_page_table.data_ptr() for n in (7, 3) for g in graphs[n] if g[0][0] == "draft_decode"}
    assert len(tables) <= 2


def draft_runner_of(backend) -> SimpleNamespace:
    """What `random_batch` reads of a runner."""
    pool = SimpleNamespace(req_to_token=backend.writer.req_to_token)
    config = SimpleNamespace(index_topk=backend.writer.config.attention.index_topk)
    return SimpleNamespace(req_to_token_pool=pool, model_config=SimpleNamespace(hf_config=config))


def test_sglangs_policy_reaches_the_largest_n(worker):
    """As every draft is accepted, it climbs; as none is, it comes down to verifying alone."""
    controller = AdaptiveController(worker, worker.policy)
    draft, target = worker._draft_worker, worker._target_worker.model_runner
    controller.register(
        SpecRuntimeState(3, 4, draft.draft_attn_backend, None, target.attn_backend, None, draft.draft_extend_attn_backend, None)
    )
    controller.init_states()
    seen = []
    for accepted in (*[True] * 20, *[False] * 60):
        controller.on_verify_complete([worker.speculative_num_steps if accepted else 0], 1)
        controller.activate_step_by_batch(1)
        seen.append(worker.speculative_num_steps)
        assert target.attn_backend.config.num_draft_tokens == worker.speculative_num_steps + 1
    assert max(seen[:20]) == 7
    assert min(seen[20:]) == 0


def test_a_verify_without_drafts_outside_graphs(worker):
    """N = 0: the target verifies the one token it has, in a batch that no graph was captured for."""
    with worker._override_worker_state(0, 1):
        backend = create_backend(worker._target_worker.model_runner)
    batch = random_batch(draft_runner_of(backend), "target_verify", 3, 1, 0)
    eager = static_batch(3, 3, ForwardMode.TARGET_VERIFY)
    fill(eager, batch)
    eager.seq_lens_cpu = None
    backend.init_forward_metadata(eager)
    check(backend.forward_metadata, batch)
    assert backend.forward_metadata.nsa_seqlens_expanded.dtype == torch.int32
