"""Torch stand-ins for the CUDA kernels by which SGLang verifies sampled drafts, and where each release finds them.

They check dtypes and layouts as the CUDA ones do, and their filters keep what flashinfer's keep: ties of the last token too,
and all tokens for a top-k of at least the vocabulary and a top-p of 1.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative import eagle_utils


def checked(tensor: torch.Tensor, dtype: torch.dtype, *shape: int) -> None:
    assert tensor.dtype == dtype
    assert tensor.shape == shape
    assert tensor.is_contiguous()


def top_k_renorm(probs: torch.Tensor, top_ks: torch.Tensor) -> torch.Tensor:
    """The `top_ks` largest of each row, with their ties, normalised: float32 [rows, vocabulary]."""
    checked(probs, torch.float32, *probs.shape)
    checked(top_ks, torch.int32, len(probs))
    ordered = probs.sort(dim=-1, descending=True).values
    last = ordered.gather(1, (top_ks.long() - 1).clamp(max=probs.shape[1] - 1)[:, None])
    return _normalised(torch.where(probs >= last, probs, 0.0))


def top_p_renorm(probs: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """Of each row the largest whose sum reaches `top_ps`, with their ties, normalised: float32 [rows, vocabulary]."""
    checked(probs, torch.float32, *probs.shape)
    checked(top_ps, torch.float32, len(probs))
    ordered = probs.sort(dim=-1, descending=True).values
    before = ordered.cumsum(-1) - ordered
    taken = (before < top_ps[:, None]).sum(-1, keepdim=True)
    last = ordered.gather(1, (taken - 1).clamp(min=0))
    last = torch.where(top_ps[:, None] >= 1, torch.zeros_like(last), last)
    return _normalised(torch.where(probs >= last, probs, 0.0))


def _normalised(probs: torch.Tensor) -> torch.Tensor:
    return probs / probs.sum(-1, keepdim=True)


def check_sampling(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    **options: Any,
) -> None:
    """What `tree_speculative_sampling_target_only` demands of its arguments; writes nothing."""
    requests, width = candidates.shape
    for tree in (candidates, retrive_index, retrive_next_token, retrive_next_sibling):
        checked(tree, torch.int64, requests, width)
    checked(predicts, torch.int32, requests * width)
    checked(accept_index, torch.int32, requests, accept_index.shape[1])
    checked(accept_token_num, torch.int32, requests)
    checked(uniform_samples, torch.float32, requests, width)
    checked(uniform_samples_for_final_sampling, torch.float32, requests)
    for probs in (target_probs, draft_probs):
        checked(probs, torch.float32, requests, width, target_probs.shape[2])
    assert set(options) == {"threshold_single", "threshold_acc", "deterministic"}


def sample_chains(**tensors: Any) -> None:
    """`tree_speculative_sampling_target_only` for one chain of drafts a request, in CUDA's own order of operations."""
    check_sampling(**tensors)
    given = SimpleNamespace(**tensors)
    requests, width = given.candidates.shape
    for r in range(requests):
        accepted, coin = 0, float(given.uniform_samples[r, 0])
        given.accept_index[r, 0] = r * width
        rejected = None
        while accepted + 1 < given.accept_index.shape[1]:
            token = int(given.candidates[r, accepted + 1])
            chance = float(given.target_probs[r, accepted, token])
            if not (chance > 0 and (coin < chance / max(given.threshold_acc, 1e-9) or chance >= given.threshold_single)):
                rejected = token
                break
            given.predicts[r * width + accepted] = token
            accepted += 1
            given.accept_index[r, accepted] = r * width + accepted
            coin = float(given.uniform_samples[r, accepted])
        given.accept_token_num[r] = accepted
        left = given.target_probs[r, accepted].clone()
        if rejected is not None:
            left[rejected] = 0
        sums = left.cumsum(0)
        final = float(given.uniform_samples_for_final_sampling[r]) * float(sums[-1])
        given.predicts[r * width + accepted] = int((sums <= final).sum().clamp(max=len(left) - 1))


@contextlib.contextmanager
def sampling_kernels(sample: Any = sample_chains, ranks: int = 1) -> Iterator[mock.Mock]:
    """SGLang's `eagle_sample` finds these; yields what stands for the group of `ranks` tensor-parallel ranks."""
    found = {
        "top_k_renorm_prob": top_k_renorm,
        "top_p_renorm_prob": top_p_renorm,
        "tree_speculative_sampling_target_only": sample,
    }
    group = mock.Mock(world_size=ranks)
    with contextlib.ExitStack() as stack:
        put = stack.enter_context
        put(mock.patch("sglang.srt.distributed.parallel_state._TP", group))  # 0.5.17's
        widths = {"tp_size": ranks, "attn_tp_size": ranks, "moe_tp_size": ranks}
        put(get_parallel().override(tp_group=group, attn_tp_group=group, **widths))  # 0.5.23's
        if hasattr(eagle_utils, "top_k_renorm_prob"):
            for name, kernel in found.items():
                put(mock.patch.object(eagle_utils, name, kernel))
        else:  # 0.5.17 imports them when it samples
            package = sys.modules.get("sgl_kernel") or put(_package())
            for name, kernel in found.items():
                put(mock.patch.object(package, name, kernel, create=True))
        yield group


@contextlib.contextmanager
def _package() -> Iterator[ModuleType]:
    package = ModuleType("sgl_kernel")
    with mock.patch.dict(sys.modules, {"sgl_kernel": package}):
        yield package
