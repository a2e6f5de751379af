"""The draft workers of SGLang 0.5.17 to 0.5.23, and what they need around them."""

from __future__ import annotations

import contextlib

from nsa_backend.adapters.shared import Takeover, batch_sizes_chosen_with, count_draft_extend_in_tokens


def take_draft_side(ours: Takeover) -> None:
    """Count the draft-extend runner's sizes in tokens, and pass SGLang's isinstance checks of its own backend.

    The draft worker captures draft-extend for the backends that it names by class. Being a virtual subclass opens that check
    and every other one alike. Not done when the plugin loads: the class's module imports sgl_kernel, which needs libcuda.
    """
    from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend

    count_draft_extend_in_tokens(ours, draft_extend_sizes_in_tokens)
    DeepseekSparseAttnBackend.register(ours.backend_class)


def draft_extend_sizes_in_tokens(tokens_per_request: int) -> contextlib.AbstractContextManager[None]:
    """While a draft-extend graph runner is built, its batch sizes count tokens."""
    return batch_sizes_chosen_with(captured_req_width=tokens_per_request)
