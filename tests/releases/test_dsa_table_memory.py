"""Page tables of captured graphs at GLM-5.2's full context, from what both backends allocate on a device without memory."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from nsa_backend.backend import NativeSparseAttnBackend, plan_for
from nsa_backend.benchmarks.commands.memory import SETTINGS
from nsa_backend.kernels.batch_inputs import BatchInputs
from nsa_backend.kernels.plan import PAGE_SIZE
from nsa_backend.multi_step import NativeSparseAttnMultiStepBackend
from nsa_backend.testing.calls import calls
from nsa_backend.testing.captured import DRAFT_EXTEND, MODES
from nsa_backend.testing.runner import make_runner
from nsa_backend.testing.shape import QK_DIM, AttentionShape

GLM = next(one for one in SETTINGS if one.model == "GLM-5.2")
REQUESTS = max(GLM.sizes)
TOLD = 10.7e9
"""Bytes a GPU that SGLang's pull request 30474 counts: 6.4 GB of the target and four times 1.07 GB of draft steps."""


def runner(implementations: dict[str, str]) -> SimpleNamespace:
    slots = torch.zeros(REQUESTS + 1, GLM.context + 4 + GLM.draft_tokens, dtype=torch.int32, device="meta")
    kv_pool = SimpleNamespace(
        dtype=torch.bfloat16, page_size=PAGE_SIZE, size=2**20 - PAGE_SIZE, kv_cache_dim=QK_DIM, start_layer=0,
        nsa_kv_cache_store_fp8=False, dsa_kv_cache_store_fp8=False,
    )  # fmt: skip
    return make_runner(
        AttentionShape(8), SimpleNamespace(req_to_token=slots, size=REQUESTS), kv_pool, num_steps=GLM.steps,
        num_draft_tokens=GLM.draft_tokens, is_draft_worker=True, context=GLM.context, device="meta", **implementations,
    )  # fmt: skip


def tensors(found: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """Every tensor that is reached from `found` through backends, their parts and containers."""
    if id(found) in seen:
        return
    seen.add(id(found))
    if isinstance(found, torch.Tensor):
        yield found
        return
    of_backend = type(found).__module__.startswith(("nsa_backend", "sglang.srt.layers.attention"))
    inner = found.values() if isinstance(found, dict) else found if isinstance(found, list | tuple) else ()
    for one in [*inner, *(vars(found).values() if of_backend and hasattr(found, "__dict__") else ())]:
        yield from tensors(one, seen)


def allocated(backends: list, of_runner: SimpleNamespace) -> int:
    """Bytes of all storages but the request table's, which is the server's."""
    seen = {id(of_runner.req_to_token_pool.req_to_token)}
    storages = {s._cdata: s.nbytes() for t in tensors(backends, seen) for s in (t.untyped_storage(),)}
    return sum(storages.values())


def test_our_tables_take_a_hundredth_of_the_built_ins(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    rows = REQUESTS * GLM.draft_tokens
    backend, multi_step = calls.builtin()
    on = runner({"decode": "fa3", "prefill": "flashmla_sparse"})
    theirs = [backend(on), multi_step(on, 1, GLM.steps)]
    for one, tokens in zip(theirs, (rows, REQUESTS), strict=True):
        one.init_cuda_graph_state(REQUESTS, tokens)
    builtin = allocated(theirs, on)
    assert builtin == pytest.approx(TOLD, rel=0.01)

    on = runner({"decode": "torch", "prefill": "torch"})
    target, extend, draft = (
        NativeSparseAttnBackend(on),
        NativeSparseAttnBackend(on),
        NativeSparseAttnMultiStepBackend(on, 1, GLM.steps),
    )
    batch = [torch.zeros(REQUESTS, dtype=dtype, device="meta") for dtype in (torch.int32, torch.int64)]
    inputs = BatchInputs(seq_lens=batch[0], req_pool_indices=batch[1])
    for one, mode in ((target, MODES["target_verify"]), (extend, DRAFT_EXTEND)):
        one.init_cuda_graph_state(REQUESTS, rows)
        one.captured.capture(mode, plan := plan_for(mode, REQUESTS, rows), plan, inputs)
    draft.init_cuda_graph_state(REQUESTS, REQUESTS)
    draft.captured.capture(None, draft.plan(REQUESTS), draft.plan(REQUESTS), inputs)
    ours = allocated([target, extend, draft], on)
    assert 0 < ours < 0.01 * builtin
