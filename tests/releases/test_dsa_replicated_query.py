"""Copies of the query's projection of all ranks, through SGLang's own updater of weights: they follow updates, in place."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from layer_on_cpu import a_layer
from sglang.srt.model_executor import model_runner
from sglang.srt.runtime_context import get_parallel

from nsa_backend.adapters import replicated_query
from nsa_backend.adapters.installed import adapter
from nsa_backend.releases import CONTEXT_RANKS, installed

if installed() not in CONTEXT_RANKS:
    pytest.skip("no other release divides KV of these models", allow_module_level=True)

from sglang.srt.model_executor.model_runner_components import weight_updater


@pytest.fixture
def layer(monkeypatch):
    yield from a_layer(monkeypatch)


GROUP = SimpleNamespace(world_size=2, all_gather=lambda mine, dim: torch.cat([mine, mine.neg()], dim))
RANKS = {"dcp_group": GROUP, "attn_dcp_size": 2, "attn_dcp_rank": 0, "dcp_enabled": True, "dcp_replicate_q_proj": True}


def updater_of(model: torch.nn.Module) -> weight_updater.WeightUpdater:
    fields = dict.fromkeys(("model_config", "update_model_fields", "recapture_cuda_graph", "get_model_runner"))
    return weight_updater.WeightUpdater(
        tp_rank=0, device="cpu", gpu_id=0, custom_weight_loaders={}, get_model=lambda: model, **fields
    )


def test_an_update_of_weights_renews_the_copies_where_graphs_read_them(layer, monkeypatch):
    """SGLang's updater alone leaves them: the mend is needed as long as this fails without it."""
    model = torch.nn.ModuleList([layer])
    runner = SimpleNamespace(model=model, is_draft_worker=True)
    with get_parallel().override(**RANKS):
        model_runner.ModelRunner._prepare_replicated_q_proj(runner)
        copies = layer.q_b_proj_qrep_weight, layer.w_kc_qrep
        before = [copy.clone() for copy in copies]
        layer.q_b_proj.weight.data.mul_(2)
        layer.w_kc.mul_(2)
        updater_of(model).end_weight_update(run_post_load=False)
        stale = [torch.equal(copy, was) for copy, was in zip(copies, before, strict=True)]
        adapter.take_context_parts(runner)
        updater_of(model).end_weight_update(run_post_load=False)
    assert stale == [True, True]
    assert (layer.q_b_proj_qrep_weight is copies[0], layer.w_kc_qrep is copies[1]) == (True, True)
    for copy, was in zip(copies, before, strict=True):
        assert torch.equal(copy, 2 * was)


@pytest.mark.parametrize(
    ("how", "arguments", "gathers"),
    [
        ("update_weights_from_ipc", {"recv_req": SimpleNamespace(zmq_handles={})}, 1),
        ("update_weights_from_disk", {"model_path": "", "load_format": "auto"}, 1),
        # Of experts, on the ranks that take those of one that failed: others would not come to a gather.
        ("update_weights_from_disk", {"model_path": "", "load_format": "auto", "weight_name_filter": bool}, 0),
    ],
)
def test_what_ends_no_update_by_itself_renews_them_too(monkeypatch, how, arguments, gathers):
    """As SGLang's scheduler and its balancer of experts call it."""
    renewed, model = [], torch.nn.Linear(1, 1)
    monkeypatch.setattr(replicated_query, "renew", renewed.append)
    replicated_query.renew_after_updates()
    monkeypatch.setattr(weight_updater.WeightUpdater, "_assert_weight_cache_inactive", lambda *of_update: None)
    monkeypatch.setattr(weight_updater, "_unsupported_derived_weight_cache_error", lambda of_model: "not here")
    assert getattr(updater_of(model), how)(**arguments) == (False, "not here")
    assert renewed == [model] * gathers


def test_copies_with_8_bits_are_renewed_with_their_scales(layer, monkeypatch):
    def gathered(linear, group):
        found = torch.nn.Module()
        found.weight = torch.nn.Parameter(group.all_gather(linear.weight.data, 0), requires_grad=False)
        found.weight_scale_inv = torch.nn.Parameter(linear.weight.data.abs().amax(1), requires_grad=False)
        return found

    monkeypatch.setattr(model_runner, "_gather_block_fp8_linear", gathered)
    layer.q_b_proj_qrep, layer.w_kc_qrep = gathered(layer.q_b_proj, GROUP), GROUP.all_gather(layer.w_kc, 0)
    copy = layer.q_b_proj_qrep
    weight, scales = copy.weight.data.clone(), copy.weight_scale_inv.data.clone()
    layer.q_b_proj.weight.data.mul_(2)
    with get_parallel().override(**RANKS):
        replicated_query.renew(torch.nn.ModuleList([layer]))
    assert layer.q_b_proj_qrep is copy
    assert torch.equal(copy.weight, 2 * weight)
    assert torch.equal(copy.weight_scale_inv, 2 * scales)
