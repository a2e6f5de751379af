"""One lazy table of sparse-attention implementations; a name is used or refused with a reason, never replaced."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from types import ModuleType

from nsa_backend import environment
from nsa_backend.adapters.installed import adapter
from nsa_backend.adapters.options import OWN_DECODE_VALUES, OWN_PREFILL_VALUES
from nsa_backend.attention.interface import SparseAttention
from nsa_backend.config import AttentionConfig, BackendConfig

IMPLEMENTATIONS = {
    "fa3": "nsa_backend.attention.fa3",
    "flashmla_sparse": "nsa_backend.attention.flashmla_sparse",
    "flashmla_kv": "nsa_backend.attention.flashmla_kv",
    "sparse_decode": "nsa_backend.attention.sparse_decode",
    "sparse_verify": "nsa_backend.attention.sparse_verify",
    "sparse_prefill": "nsa_backend.attention.sparse_prefill",
    "trtllm": "nsa_backend.attention.trtllm",
    "torch": "nsa_backend.attention.torch_reference",
    "auto": "nsa_backend.attention.auto",
}
"""Name to module, which has `problems(config) -> [reason]`, empty where it can run, and `build(config) -> SparseAttention`."""

_NO_OPTIONS = ("torch", "auto")
DECODE_VALUES = tuple(name for name in IMPLEMENTATIONS if name not in (*_NO_OPTIONS, *OWN_PREFILL_VALUES))
"""What --nsa-decode-backend may name."""
PREFILL_VALUES = (*(n for n in IMPLEMENTATIONS if n not in (*_NO_OPTIONS, *OWN_DECODE_VALUES)), "flashmla_auto")
"""What --nsa-prefill-backend may name."""


AUTO_SWITCH = "NSA_BACKEND_AUTO_DECODE"
SGLANGS_CHOICES = {False: ("fa3", "flashmla_sparse"), True: ("flashmla_kv", "flashmla_kv")}
"""What SGLang decodes and prefills with on Hopper where nobody names an implementation, by whether the KV cache is FP8."""


def implementation(name: str) -> ModuleType:
    """The module of `name`, a key of `IMPLEMENTATIONS`; imported when it is asked for."""
    return import_module(IMPLEMENTATIONS[name])


def check_attention(name: str, asked: str, config: AttentionConfig) -> None:
    """Raise ValueError where the implementation that the user chose cannot run; gives all reasons, and which ones can.

    Args:
        name: a key of `IMPLEMENTATIONS`, or a name that there is not.
        asked: how the user asked for it, such as "--nsa-decode-backend fa3", for the message.
        config: what the model, the KV pool and the GPU are.
    """
    found = implementation(name).problems(config) if name in IMPLEMENTATIONS else ["nsa_backend has no such implementation"]
    if not found:
        return
    usable = [other for other, why_not in reasons(config).items() if why_not is None and other != "auto"]
    raise ValueError(
        f"{asked} cannot run here: {'; '.join(found)}. Choose one of: {', '.join(usable) or 'none on this machine'}; "
        f"or {adapter.WAY_BACK}"
    )


def build_attention(name: str, asked: str, config: AttentionConfig) -> SparseAttention:
    """Build what `check_attention` has no objection to; raises its ValueError."""
    check_attention(name, asked, config)
    return implementation(name).build(config)


def may_be_auto(by_user: bool) -> bool:
    """Whether the switch asks for auto, or says nothing where the user names no implementation."""
    switch = environment.asked(AUTO_SWITCH)
    return not by_user if switch is None else switch


def decode_for(named: str, by_user: bool, attention: AttentionConfig) -> str:
    """What decode runs on: `named` by options, unless NSA_BACKEND_AUTO_DECODE says otherwise.

    Where that says nothing and `named` is what SGLang takes when the user names nothing, auto serves instead if it can.
    """
    if not may_be_auto(by_user):
        return named
    able = named == SGLANGS_CHOICES[attention.fp8][0] and not implementation("auto").problems(attention)
    return "auto" if environment.switched_on(AUTO_SWITCH) or able else named


def prefill_for(named: str, by_user: bool, attention: AttentionConfig) -> str:
    """What sparse prefill runs on: `named`, or auto where it is only what SGLang takes when the user names nothing."""
    of_prefill = replace(attention, prefill=True)
    able = not by_user and named == SGLANGS_CHOICES[attention.fp8][1] and not implementation("auto").problems(of_prefill)
    return "auto" if able else named


def with_choices(config: BackendConfig) -> BackendConfig:
    """The same, with what decode and prefill run on. Ranks that may divide the rows of a prefill have what is named."""
    prefill_by_user = config.prefill_by_user or config.split_prefill
    return replace(
        config,
        decode_impl=decode_for(config.decode_impl, config.decode_by_user, config.attention),
        prefill_impl=prefill_for(config.prefill_impl, prefill_by_user, config.attention),
    )


def decode_side(attention: AttentionConfig, decode: str, prefill: str) -> tuple[str, str, AttentionConfig]:
    """`check_attention`'s arguments of what runs in decode, target_verify and draft_extend, beside `prefill`."""
    asked = f"{AUTO_SWITCH}=1" if decode == "auto" else f"{adapter.DECODE_OPTION} {decode}"
    return decode, asked, replace(attention, partner=prefill)


def prefill_side(attention: AttentionConfig, decode: str, prefill: str) -> tuple[str, str, AttentionConfig]:
    """The same of what runs in sparse prefill."""
    return prefill, f"{adapter.PREFILL_OPTION} {prefill}", replace(attention, partner=decode, prefill=True)


def build_decode(config: BackendConfig) -> SparseAttention:
    """Decode's; raises ValueError where it cannot run here."""
    return build_attention(*decode_side(config.attention, config.decode_impl, config.prefill_impl))


def build_prefill(config: BackendConfig) -> SparseAttention:
    """Prefill's; raises ValueError where it cannot run here."""
    return build_attention(*prefill_side(config.attention, config.decode_impl, config.prefill_impl))


def reasons(config: AttentionConfig) -> dict[str, str | None]:
    """All reasons why each implementation cannot run under `config`; None where it can."""
    return {name: "; ".join(implementation(name).problems(config)) or None for name in IMPLEMENTATIONS}
