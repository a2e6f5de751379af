"""Refusals of what SGLang's built-in backend can do and this one cannot yet: made at server start, one sentence an option."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nsa_backend.adapters import sglang
from nsa_backend.adapters.installed import adapter
from nsa_backend.attention.implementations import OPTION_VALUES
from nsa_backend.environment import switched_on

PREFILL_VALUES = (*OPTION_VALUES, "flashmla_auto")


@dataclass(frozen=True)
class Rule:
    """One option; `accepts` tells whether its value is served, `advice` what to change."""

    attribute: str
    option: str
    accepts: Callable[[Any], bool]
    advice: str
    everywhere: bool = True  # whether every release of the generation has the option

    def refusal(self, server_args: sglang.ServerArgs) -> str | None:
        value = getattr(server_args, self.attribute) if self.everywhere else _nested(server_args, self.attribute)
        if self.accepts(value):
            return None
        shown = self.option if value is True else f"{self.option} {value}"
        return f"nsa_backend does not serve {shown}: {self.advice}, or {adapter.WAY_BACK}"


def _nested(server_args: sglang.ServerArgs, path: str) -> Any:
    """What a dotted path leads to; None where a release has no such attribute."""
    for name in path.split("."):
        server_args = getattr(server_args, name, None)
    return server_args


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


def _off(value: Any) -> bool:
    return not value


RULES = (
    Rule("device", "--device", _one_of("cuda"), "use an NVIDIA GPU"),
    Rule(
        "kv_cache_dtype",
        "--kv-cache-dtype",
        _one_of("auto", "bfloat16", "bf16", "fp8_e4m3"),
        "pass --kv-cache-dtype bfloat16 or fp8_e4m3",
    ),
    Rule("page_size", "--page-size", _one_of(64), "pass --page-size 64"),
    Rule(
        adapter.DECODE_ATTRIBUTE,
        adapter.DECODE_OPTION,
        _one_of(None, *OPTION_VALUES),
        f"choose one of {', '.join(OPTION_VALUES)}",
    ),
    Rule(
        adapter.PREFILL_ATTRIBUTE,
        adapter.PREFILL_OPTION,
        _one_of(None, *PREFILL_VALUES),
        f"choose one of {', '.join(PREFILL_VALUES)}",
    ),
    Rule("enable_hisparse", "--enable-hisparse", _off, "drop the option"),
    Rule("enable_two_batch_overlap", "--enable-two-batch-overlap", _off, "drop the option"),
    Rule("enable_pdmux", "--enable-pdmux", _off, "drop the option"),
    Rule("enable_multi_layer_eagle", "--enable-multi-layer-eagle", _off, "drop the option"),
    Rule(
        "enable_deterministic_inference",
        "--enable-deterministic-inference",
        _off,
        "the top-k kernel returns slots in an order that changes from run to run, and sums follow it; drop the option",
    ),
    Rule(
        "speculative_algorithm",
        "--speculative-algorithm",
        _one_of(None, "EAGLE", "EAGLE3", "NEXTN"),
        "choose EAGLE, which runs the model's MTP layer",
    ),
    Rule("speculative_eagle_topk", "--speculative-eagle-topk", _one_of(None, 1), "pass --speculative-eagle-topk 1"),
    *(Rule(name, option, _off, "drop the option", everywhere=False) for name, option in adapter.REFUSED_OPTIONS.items()),
    *(
        Rule(name, option, _one_of(*served), f"pass {option} {served[-1]}", everywhere=False)
        for name, (option, served) in adapter.REFUSED_VALUES.items()
    ),
)


def refusals(server_args: sglang.ServerArgs) -> list[str]:
    """One sentence for each option that is set to something this backend does not serve."""
    args = adapter.resolved(server_args)
    found = [rule.refusal(args) for rule in RULES]
    found += adapter.environment_problems()
    if switched_on("NSA_BACKEND_ROUND_GRAPH"):
        found += adapter.round_problems(args)
    if adapter.is_rocm():
        found.append("nsa_backend does not serve ROCm: use an NVIDIA GPU, or " + adapter.WAY_BACK)
    return [sentence for sentence in found if sentence]


def refuse_unsupported(server_args: sglang.ServerArgs) -> None:
    """Raise ValueError with every refusal, one a line."""
    found = refusals(server_args)
    if found:
        raise ValueError("\n".join(found))
