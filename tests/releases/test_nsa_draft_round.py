"""SGLang's own `draft_forward`, spec v2 and v1, under our hook: every step's KV locations are right and contiguous."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from properties import tried
from sglang.srt.speculative.draft_utils import DraftBackendFactory
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.eagle_worker import EAGLEWorker
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

from nsa_backend.adapters.nsa import draft as nsa_draft
from nsa_backend.adapters.nsa.entry_points import contiguous_by_step
from nsa_backend.kernels.batch_inputs import BatchInputs
from nsa_backend.testing.calls import calls

WORKERS = [EagleDraftWorker, EAGLEWorker]


def draft_round(worker_class, make_runner, requests: int, num_steps: int, backend=None) -> list[torch.Tensor]:
    """Run one round and return the `out_cache_loc` that every draft forward was given."""
    seen = []

    def forward(batch, skip_attn_backend_init):
        seen.append(batch.out_cache_loc)
        logits = torch.zeros(requests, 8)
        return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=logits, hidden_states=logits))

    runner = make_runner(num_steps=num_steps)
    factory = DraftBackendFactory(runner.server_args, runner, 1, num_steps)
    draft_runner = SimpleNamespace(forward=forward)
    worker = SimpleNamespace(
        hot_token_id=None,
        topk=1,
        speculative_num_steps=num_steps,
        speculative_num_draft_tokens=num_steps + 1,
        draft_attn_backend=backend or factory.create_decode_backend(),
        draft_runner=draft_runner,
        draft_model_runner=draft_runner,
        server_args=SimpleNamespace(speculative_algorithm="EAGLE"),
    )
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_idle=lambda: False),
        batch_size=requests,
        out_cache_loc=torch.arange(requests * num_steps) * 7,
        positions=torch.zeros(requests, dtype=torch.int64),
        spec_info=EagleDraftInput(
            topk_p=torch.ones(requests, 1), topk_index=torch.zeros(requests, 1).long(), hidden_states=torch.zeros(requests, 8)
        ),
    )
    worker_class.draft_forward(worker, batch)
    return seen


@pytest.mark.parametrize("worker_class", WORKERS)
@pytest.mark.parametrize("num_steps", [2, 3, 8])
@pytest.mark.parametrize("requests", [1, 2, 5])
def test_locations_of_every_step(make_runner, worker_class, requests, num_steps):
    seen = draft_round(worker_class, make_runner, requests, num_steps)
    assert len(seen) == num_steps - 1
    for step, locations in enumerate(seen):
        assert locations.tolist() == [7 * (request * num_steps + step) for request in range(requests)]
        assert locations.is_contiguous()


@pytest.mark.parametrize("worker_class", WORKERS)
def test_without_the_hook_they_are_strided(make_runner, worker_class):
    """The host's defect itself: should a release mend it, the copy in `begin_draft_round` can go."""
    foreign = SimpleNamespace(attn_backends=[None, None])
    seen = draft_round(worker_class, make_runner, 3, 3, backend=foreign)
    assert not any(locations.is_contiguous() for locations in seen)


def test_draft_workers_are_hooked(make_runner):
    calls.draft_factory(make_runner(), 3).create_decode_backend()
    for worker in WORKERS:
        assert worker.draft_forward.__wrapped__.__qualname__ == f"{worker.__name__}.draft_forward"
        assert worker.init_cuda_graphs.__wrapped__.__qualname__ == f"{worker.__name__}.init_cuda_graphs"


def test_an_idle_round_is_left_alone(make_runner, monkeypatch):
    runner = make_runner()
    multi_step = DraftBackendFactory(runner.server_args, runner, 1, 3).create_decode_backend()
    multi_step.init_cuda_graph_state(2, 2)
    multi_step.before_capture(BatchInputs(torch.ones(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)))
    monkeypatch.setattr(multi_step.captured, "write", lambda: pytest.fail("metadata was launched for an idle rank"))
    assert multi_step.runs_captured
    idle = SimpleNamespace(forward_mode=SimpleNamespace(is_idle=lambda: True), batch_size=0, out_cache_loc=None)
    multi_step.begin_draft_round(idle)
    assert idle.out_cache_loc is None


@given(requests=st.integers(1, 40), num_steps=st.integers(1, 9))
@tried(50)
def test_layout(requests, num_steps):
    locations = torch.randperm(requests * num_steps)
    laid_out = contiguous_by_step(locations, requests, num_steps)
    assert torch.equal(laid_out, locations.view(requests, num_steps))
    by_step = laid_out.reshape(requests, 1, num_steps).permute(2, 0, 1).reshape(num_steps, -1)
    assert by_step.data_ptr() == laid_out.data_ptr()
    assert all(row.is_contiguous() for row in by_step)


def test_draft_extend_is_captured_where_the_host_does_not(monkeypatch, make_runner):
    from nsa_backend.registration import OURS, create_backend

    runners = []
    monkeypatch.setattr(nsa_draft, "draft_extend_graph_runner", lambda worker: runners.append(worker) or "graphs")
    backend = create_backend(make_runner())

    def worker(disable_cuda_graph, existing, attn_backend=backend):
        return SimpleNamespace(
            draft_extend_attn_backend=attn_backend,
            server_args=SimpleNamespace(disable_cuda_graph=disable_cuda_graph),
            cuda_graph_runner_for_draft_extend=existing,
        )

    for built, expected in (
        (worker(False, None), "graphs"),
        (worker(True, None), None),
        (worker(False, "the host's"), "the host's"),
        (worker(False, None, object()), None),
    ):
        nsa_draft.capture_draft_extend(OURS, lambda worker: None, built)
        assert built.cuda_graph_runner_for_draft_extend == expected
    assert len(runners) == 1
