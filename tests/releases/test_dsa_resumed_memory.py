"""Memory released and resumed, through SGLang's own manager: what captured graphs read of padding rows is known afterwards."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
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
    """(manager whose memory is released, request table); what comes back holds anything, what does not cannot be written."""
    pool = ReqToTokenPool(4, 64, "cpu", enable_memory_saver=False)
    backing, pool.req_to_token = pool.req_to_token, None

    def resume(tag: str) -> None:
        if tag == GPU_MEMORY_TYPE_KV_CACHE:
            pool.req_to_token = backing.fill_(-77)

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
    return manager, pool


def test_the_padding_row_is_zero_again(released):
    resumed_memory.clear_padding_row_on_resume()
    manager, pool = released
    manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=None))
    assert not pool.req_to_token[0].any()
    assert (pool.req_to_token[1:] == -77).all()


def test_memory_that_is_still_released_is_not_touched(released):
    resumed_memory.clear_padding_row_on_resume()
    manager, pool = released
    manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=[GPU_MEMORY_TYPE_WEIGHTS]))
    assert pool.req_to_token is None
    manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=[GPU_MEMORY_TYPE_KV_CACHE]))
    assert not pool.req_to_token[0].any()


@pytest.mark.parametrize("saved", [True, False])
def test_where_memory_can_be_released(make_runner, monkeypatch, saved):
    asked = []
    module = __import__(type(adapter).__module__, fromlist=["get_server_args"])
    monkeypatch.setattr(
        module, "get_server_args", lambda: SimpleNamespace(enable_memory_saver=saved, disaggregation_mode="null")
    )
    monkeypatch.setattr(resumed_memory, "clear_padding_row_on_resume", lambda: asked.append(True))
    create_backend(make_runner())
    assert asked == [True] * saved
