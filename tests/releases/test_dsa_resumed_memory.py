"""Memory released and resumed, through SGLang's own manager: what captured graphs read of padding rows is known afterwards."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from kv_pools import PAGE, dsa_pool, scribble
from sglang.srt.constants import GPU_MEMORY_TYPE_CUDA_GRAPH, GPU_MEMORY_TYPE_KV_CACHE, GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput
from sglang.srt.managers.scheduler_components import weight_updater
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

from nsa_backend.adapters import resumed_memory
from nsa_backend.adapters.installed import adapter
from nsa_backend.registration import create_backend

TAGS = {GPU_MEMORY_TYPE_KV_CACHE, GPU_MEMORY_TYPE_WEIGHTS, GPU_MEMORY_TYPE_CUDA_GRAPH}


@pytest.fixture
def released(monkeypatch):
    """(manager whose memory is released, request table, KV pools of target and draft).

    What comes back holds anything, what does not cannot be written.
    """
    pool = ReqToTokenPool(4, 64, "cpu", enable_memory_saver=False)
    backing, pool.req_to_token = pool.req_to_token, None
    models = [dsa_pool(layers, seed=layers, pages=3) for layers in (2, 1)]
    for of_model in models:
        resumed_memory.clear_padding_on_resume(of_model)

    def resume(tag: str) -> None:
        if tag == GPU_MEMORY_TYPE_KV_CACHE:
            pool.req_to_token = backing.fill_(-77)
            for of_model in models:
                scribble(of_model)

    manager = object.__new__(weight_updater.SchedulerWeightUpdaterManager)
    model = torch.nn.Module()
    fields = {
        "offload_tags": set(TAGS), "memory_saver_adapter": SimpleNamespace(resume=resume), "scheduler": None,
        "tp_worker": SimpleNamespace(model_runner=SimpleNamespace(req_to_token_pool=pool, model=model)),
        "stashed_model_static_state": {"buffers": []}, "tp_cpu_group": None,
    }  # fmt: skip
    for name, value in fields.items():
        object.__setattr__(manager, name, value)
    monkeypatch.setattr(torch.distributed, "barrier", lambda *group: None)
    monkeypatch.setattr(
        weight_updater.SchedulerWeightUpdaterManager, "_assert_weight_cache_inactive", lambda *a: None, raising=False
    )
    return manager, pool, models


def test_what_padding_reads_is_zero_again(released):
    manager, pool, models = released
    manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=None))
    assert not pool.req_to_token[0].any()
    assert (pool.req_to_token[1:] == -77).all()
    for of_model in models:
        left = dsa_pool(len(of_model.kv_buffer), seed=99, pages=3)  # as it came back
        for mine, as_it_came in zip(of_model.kv_buffer, left.kv_buffer, strict=True):
            assert not mine[:PAGE].any()
            assert torch.equal(mine[PAGE:], as_it_came[PAGE:])
        for mine, as_it_came in zip(of_model.index_k_with_scale_buffer, left.index_k_with_scale_buffer, strict=True):
            assert not mine[0].any()
            assert torch.equal(mine[1:], as_it_came[1:])


def test_memory_that_is_still_released_is_not_touched(released):
    manager, pool, models = released
    before = [buffer.clone() for of_model in models for buffer in of_model.kv_buffer]
    manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=[GPU_MEMORY_TYPE_WEIGHTS]))
    assert pool.req_to_token is None
    assert all(map(torch.equal, before, (buffer for of_model in models for buffer in of_model.kv_buffer)))
    manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=[GPU_MEMORY_TYPE_KV_CACHE]))
    assert not pool.req_to_token[0].any()


@pytest.mark.parametrize("saved", [True, False])
def test_where_memory_can_be_released(make_runner, monkeypatch, saved):
    asked = []
    module = __import__(type(adapter).__module__, fromlist=["get_server_args"])
    monkeypatch.setattr(
        module, "get_server_args", lambda: SimpleNamespace(enable_memory_saver=saved, disaggregation_mode="null")
    )
    monkeypatch.setattr(resumed_memory, "clear_padding_on_resume", asked.append)
    runners = [make_runner(), make_runner()]
    runners[1].is_draft_worker = True
    for runner in runners:
        create_backend(runner)
    assert asked == [runner.token_to_kv_pool for runner in runners if saved]
