"""SGLang's own `draft_forward` and the copy that its eager runner makes: every step's KV locations are right and dense."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.cuda_graph_buffer_registry import build_eager_registry
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.model_executor.runner.eager_runner import EagerRunner
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

from nsa_backend.adapters.sglang_types import ForwardBatch, ForwardMode
from nsa_backend.testing.calls import calls


def eager_runner(requests: int) -> SimpleNamespace:
    """What `EagerRunner.load_batch` needs of itself: its static buffers."""
    registry = build_eager_registry(
        device=torch.device("cpu"),
        max_bs=requests,
        max_num_token=64,
        cache_loc_dtype=torch.int64,
        encoder_lens_dtype=torch.int64,
    )
    return SimpleNamespace(_eager_registry=registry)


def draft_round(make_runner, requests: int, num_steps: int, load_batch) -> list:
    """Run one round, each step on a backend of its own; returns what `load_batch` made of every step's batch."""
    runner, seen, backends = make_runner(num_steps=num_steps), [], []

    def forward(batch):
        seen.append(load_batch(batch))
        backends.append(get_attn_backend())
        logits = torch.zeros(requests, 8)
        return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=logits, hidden_states=logits))

    worker = SimpleNamespace(
        hot_token_id=None,
        topk=1,
        speculative_num_steps=num_steps,
        speculative_num_draft_tokens=num_steps + 1,
        draft_attn_backend=calls.draft_factory(runner, num_steps).create_decode_backend(),
        draft_runner=SimpleNamespace(forward=forward, model_config=runner.model_config, canary_manager=None),
        **calls.worker_fields(requests, num_steps),
    )
    batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=requests,
        input_ids=None,
        req_pool_indices=torch.arange(1, requests + 1),
        seq_lens=torch.full((requests,), 9),
        seq_lens_sum=9 * requests,
        out_cache_loc=torch.arange(requests * num_steps) * 7,
        positions=torch.zeros(requests, dtype=torch.int64),
        spec_info=EagleDraftInput(
            topk_p=torch.ones(requests, 1), topk_index=torch.zeros(requests, 1).long(), hidden_states=torch.zeros(requests, 8)
        ),
    )
    EagleDraftWorker.draft_forward(worker, batch)
    assert backends == worker.draft_attn_backend.attn_backends
    return seen


@pytest.mark.parametrize("copy", ["sglang's", "the demo's"])
@pytest.mark.parametrize(("requests", "num_steps"), [(1, 2), (2, 3), (5, 8)])
def test_the_eager_runner_makes_every_step_dense(make_runner, copy, requests, num_steps):
    """The demo copies as SGLang's runner does; both are held to the same."""
    runner = eager_runner(requests)
    seen = []

    def load_batch(batch):
        loaded = EagerRunner.load_batch(runner, batch) if copy == "sglang's" else calls.step_batch(batch)
        seen.append((loaded.out_cache_loc.tolist(), loaded.out_cache_loc.is_contiguous()))
        return loaded

    draft_round(make_runner, requests, num_steps, load_batch)
    assert seen == [([7 * (request * num_steps + step) for request in range(requests)], True) for step in range(num_steps - 1)]


def test_without_that_copy_they_are_strided(make_runner):
    """The host's defect itself: should a release mend it, the backend's refusal of strided locations can go."""
    steps = draft_round(make_runner, 3, 3, lambda batch: SimpleNamespace(out_cache_loc=batch.out_cache_loc))
    assert not any(step.out_cache_loc.is_contiguous() for step in steps)


def test_strided_locations_are_refused_before_anything_is_written(make_runner):
    backend = calls.draft_factory(make_runner(), 3).create_decode_backend().attn_backends[0]
    batch = SimpleNamespace(forward_mode=ForwardMode.DECODE, out_cache_loc=torch.arange(6)[::2], batch_size=3)
    with pytest.raises(ValueError, match="out_cache_loc is strided"):
        backend.forward_decode(torch.zeros(3, 8), torch.zeros(3, 1, 8), None, SimpleNamespace(layer_id=0), batch)
