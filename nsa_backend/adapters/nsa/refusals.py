"""What backends of SGLang 0.5.12 and 0.5.12.post1 are asked for and this one does not do."""

from __future__ import annotations

from typing import Any

REFUSED_OPTIONS = {
    "enable_nsa_prefill_context_parallel": "--enable-nsa-prefill-context-parallel",
    "enforce_piecewise_cuda_graph": "--enforce-piecewise-cuda-graph",
}
"""Attributes of ServerArgs to options that this generation alone has and that must be off."""

REFUSED_VALUES: dict[str, tuple[str, tuple]] = {}
"""Attributes to the option and the values that are served; nothing more in this generation."""


def model_problem(hf_config: Any, speculative: bool) -> str | None:
    """What a sparse model asks of its backend that this one does not do; nothing in these releases."""
    return None


def environment_problems() -> list[str]:
    """SGLang's environment variables with values that are not served; none in these releases."""
    return []
