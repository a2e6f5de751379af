"""Everything that may stop a start, in the order in which it is asked: the one door of the plugin, `doctor` and readers.

`CHECKS` lists all of it. What the main process asks of a server's options is called here, before any GPU work or weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from nsa_backend.adapters import sglang_types
from nsa_backend.adapters.installed import adapter
from nsa_backend.attention.implementations import (
    check_attention,
    decode_for,
    decode_side,
    may_be_auto,
    prefill_for,
    prefill_side,
)
from nsa_backend.config import AttentionConfig, prefill_name
from nsa_backend.environment import switched_on
from nsa_backend.model_check import check_models
from nsa_backend.refusals import asks_for_warm_up, refuse_unsupported
from nsa_backend.required import check_names

KV_DTYPES = {"bfloat16": torch.bfloat16, "bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}
PLUGIN, PARSED, OPTIONS = "the plugin is loaded", "the command line is parsed", "options are resolved, before weights"
RANKS, BACKENDS = "ranks meet, before weights", "a rank builds its backends"


@dataclass(frozen=True)
class Check:
    """One of them."""

    when: str
    stops: str
    asked_by: str  # the function, by its dotted name


CHECKS = (
    Check(PLUGIN, "a variable of this package that is neither 0 nor 1", "nsa_backend.environment.check_switches"),
    Check(PLUGIN, "NSA_BACKEND_REQUIRED=1 where the plugin cannot serve", "nsa_backend.plugin.register"),
    Check(PLUGIN, "an entry point of SGLang that took no hook", "nsa_backend.adapters.shared.hook"),
    Check(PARSED, "NAIVE_EAGLE with other settings than its own", "nsa_backend.adapters.naive_eagle.from_arguments"),
    Check(OPTIONS, "NSA_BACKEND_REQUIRED=1 and another backend by name", "nsa_backend.required.check_names"),
    Check(OPTIONS, "a model that is not served", "nsa_backend.model_check.check_models"),
    Check(OPTIONS, "options, and environment variables of SGLang", "nsa_backend.refusals.refuse_unsupported"),
    Check(OPTIONS, "an implementation that cannot run with them", "nsa_backend.start_checks.check_implementations"),
    Check(RANKS, "ranks with different NSA_BACKEND_* values", "nsa_backend.adapters.alike_ranks.check_alike"),
    Check(BACKENDS, "what options leave open: the KV cache, packages, lengths", "nsa_backend.config.BackendConfig.from_runner"),
    Check(BACKENDS, "the implementation, on what the rank has found", "nsa_backend.attention.implementations.check_attention"),
    Check(BACKENDS, "a DeepGEMM with another schedule rule", "nsa_backend.indexer.schedule_check.check_schedule"),
    Check(BACKENDS, "a draft side that is ours beside a target that is not", "nsa_backend.registration.prepare_draft_side"),
    Check(BACKENDS, "NSA_BACKEND_REQUIRED=1 and another backend built", "nsa_backend.required.check_built"),
)


def check_options(server_args: sglang_types.ServerArgs, create_backend: Callable) -> None:
    """Stop the server in its main process for what the plugin does not serve.

    Args:
        server_args: resolved by SGLang.
        create_backend: what ours are built by.

    Raises:
        ValueError: one sentence, or one a line, that say what to change.
    """
    names = backend_names(server_args)
    if switched_on("NSA_BACKEND_REQUIRED"):
        asked = {part: name for part, name in names.items() if part != "drafts" or not adapter.drafts_are_dense(server_args)}
        check_names(asked, create_backend)
    if not set(adapter.BACKEND_NAMES).isdisjoint((names["prefill"], names["decode"])):
        check_models(server_args, names)  # first: SGLang fills other defaults in for a model that is not sparse
        refuse_unsupported(server_args)
        check_implementations(server_args)
        if asks_for_warm_up(adapter.resolved(server_args)):
            adapter.offer_warm_up()


def backend_names(server_args: sglang_types.ServerArgs) -> dict[str, str | None]:
    """By part of the server, the attention backend that options name; drafts only where there are some."""
    args = adapter.resolved(server_args)
    names = dict(zip(("prefill", "decode"), adapter.served_backends(server_args), strict=True))
    if args.speculative_algorithm:
        names["drafts"] = args.speculative_draft_attention_backend or names["decode"]
    return names


def check_implementations(server_args: sglang_types.ServerArgs) -> None:
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
    decode_by_user, prefill_by_user = adapter.named_by_user(server_args)
    attention = AttentionConfig.of_model(
        adapter.target_model(server_args),
        adapter.attention_tp_size_of(args),
        context_ranks=adapter.context_ranks_of(args),
        device_sm=adapter.device_sm("cuda"),
        kv_cache_dtype=kv_cache_dtype,
        device_name=torch.cuda.get_device_name() if may_be_auto(decode_by_user) or not prefill_by_user else "",
        page_size=args.page_size,
        num_draft_tokens=args.speculative_num_draft_tokens or 0,
    )
    names = (
        decode_for(named[0], decode_by_user, attention),
        prefill_for(prefill_name(named[1], kv_cache_dtype), prefill_by_user, attention),
    )
    for side in (decode_side, prefill_side):
        check_attention(*side(attention, *names))
