"""What SGLang builds between the draft and the verify graph, as it asks our backend for the form of the mask."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from sglang.srt.speculative import eagle_worker_common
from sglang.srt.speculative.eagle_utils import TreeMaskMode, default_tree_mask_mode

from nsa_backend.adapters.sglang_types import ForwardMode
from nsa_backend.registration import create_backend

N = 3
CONTEXT = 4096


def mask_asked_for(backend, monkeypatch, requests: int) -> dict:
    """What SGLang's own preparation of a verify hands to the kernel that builds tree and mask."""
    asked = {}

    def tree(*arguments, fill_prefix_mask):
        lens_sum, _, _, _, mode, buffer = arguments[5:11]
        asked.update(lens_sum=lens_sum, mode=mode, buffer=buffer, fill=fill_prefix_mask)
        return (torch.empty(0),) * 6

    monkeypatch.setattr(eagle_worker_common, "build_tree_kernel_efficient", tree)
    batch = SimpleNamespace(
        forward_mode=ForwardMode.DECODE,
        seq_lens=torch.full((requests,), 100),
        seq_lens_sum=None,
        req_pool_indices=torch.arange(requests),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(requests, CONTEXT, dtype=torch.int32)),
    )
    eagle_worker_common.build_eagle_verify_input(
        batch,
        SimpleNamespace(bonus_tokens=torch.zeros(requests, dtype=torch.int64)),
        torch.zeros(requests, N),
        torch.zeros(requests, N),
        torch.zeros(requests, N, dtype=torch.int64),
        None,
        target_worker=SimpleNamespace(model_runner=SimpleNamespace(attn_backend=backend)),
        topk=1,
        num_steps=N,
        num_draft_tokens=N + 1,
        tree_mask_mode=default_tree_mask_mode(),
        device="cpu",
    )
    return asked


def test_a_verify_gets_no_mask_over_the_context(make_runner, monkeypatch):
    asked = mask_asked_for(create_backend(make_runner(CONTEXT, 8, N, 64)), monkeypatch, requests=5)
    assert asked == {"lens_sum": 0, "mode": TreeMaskMode.QLEN_ONLY, "buffer": None, "fill": False}


def test_a_backend_that_names_no_form_gets_one_filled(monkeypatch):
    asked = mask_asked_for(SimpleNamespace(verify_mask=None, max_context_len=CONTEXT), monkeypatch, requests=5)
    assert asked["fill"]
    assert asked["mode"] == default_tree_mask_mode()
