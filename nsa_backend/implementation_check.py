"""The implementations that a server names, against its model, KV cache and GPU: before weights are loaded."""

from __future__ import annotations

import torch

from nsa_backend.adapters import sglang
from nsa_backend.adapters.installed import adapter
from nsa_backend.attention.implementations import check_attention, decode_side, prefill_side
from nsa_backend.config import AttentionConfig, decode_name, prefill_name

KV_DTYPES = {"bfloat16": torch.bfloat16, "bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}


def check_implementations(server_args: sglang.ServerArgs) -> None:
    """Raise ValueError where decode or prefill cannot run as named; the backend that a rank builds checks again.

    Args:
        server_args: resolved by SGLang, in the main process. What it has left open, as a KV cache of dtype `auto` where a
            release decides later, is for the ranks to check.
    """
    args = adapter.resolved(server_args)
    kv_cache_dtype = KV_DTYPES.get(args.kv_cache_dtype)
    named = getattr(args, adapter.DECODE_ATTRIBUTE), getattr(args, adapter.PREFILL_ATTRIBUTE)
    if args.device != "cuda" or kv_cache_dtype is None or None in named:
        return
    names = decode_name(named[0]), prefill_name(named[1], kv_cache_dtype)
    attention = AttentionConfig.of_model(
        adapter.target_model(server_args),
        adapter.attention_tp_size_of(args),
        device_sm=adapter.device_sm("cuda"),
        kv_cache_dtype=kv_cache_dtype,
        device_name=torch.cuda.get_device_name() if "auto" in names else "",
        page_size=args.page_size,
        num_draft_tokens=args.speculative_num_draft_tokens or 0,
    )
    for side in (decode_side, prefill_side):
        check_attention(*side(attention, *names))
