"""Refusals of what backends of SGLang 0.5.12 and 0.5.12.post1 are asked for and this one does not do."""

from __future__ import annotations

from typing import Any

from nsa_backend.adapters.layer_sharing import sharing_problem
from nsa_backend.adapters.option_rules import Rule
from nsa_backend.releases import divided_indexer_problem, installed, layer_front_problem, round_graph_problem

REFUSED = (
    Rule(
        "enable_two_batch_overlap",
        "--enable-two-batch-overlap",
        "the two halves of a batch run interleaved, and captured graphs here share one page table",
    ),
    Rule(
        "enable_nsa_prefill_context_parallel",
        "--enable-nsa-prefill-context-parallel",
        "each rank then computes some rows of a prefill, and the metadata here is of all rows",
        everywhere=False,
    ),
    Rule(
        "enforce_piecewise_cuda_graph",
        "--enforce-piecewise-cuda-graph",
        "the indexer would be captured with the metadata of the captured batch",
        everywhere=False,
    ),
)
"""Options that this generation alone has, or alone may not be started with; a release need not have all."""


def model_problem(hf_config: Any, speculative: bool, dequantised_prefill: bool, disaggregated: bool = False) -> str | None:
    """What SGLang does not do for a sparse model, or None.

    Args:
        speculative: whether draft steps are asked for.
        dequantised_prefill: makes no difference in these releases.
        disaggregated: neither does this.
    """
    if speculative and getattr(hf_config, "index_share_for_mtp_iteration", False):
        return (
            "its draft steps attend with one selection (index_share_for_mtp_iteration), which SGLang has from 0.5.17 on; "
            "install a newer SGLang, or drop --speculative-algorithm"
        )
    return sharing_problem(hf_config, _shares, installed())


def _shares(hf_config: Any, layer: int) -> bool:
    """Whether these releases have a layer reuse a selection; they read neither indexer_types nor index_skip_topk_offset."""
    pattern = getattr(hf_config, "index_topk_pattern", None)
    if pattern is not None:
        return pattern[layer] == "S"
    return max(layer - 1, 0) % getattr(hf_config, "index_topk_freq", 1) != 0


def environment_problems() -> list[str]:
    """SGLang's environment variables with values that are not served; none in these releases."""
    return []


def combination_problems(args: Any) -> list[str]:
    """Options that are not served beside others; none in these releases."""
    return []


def round_problems(args: Any) -> list[str]:
    """Why a server can have no graphs of whole rounds: the workers of these releases wait for the GPU in every one."""
    return [round_graph_problem()]


def front_problems(args: Any) -> list[str]:
    """Why a server can have no layer's front in two launches: the layers of these releases are others."""
    return [layer_front_problem()]


def divided_problems(args: Any) -> list[str]:
    """Why ranks cannot divide the indexer's work: the indexers of these releases are others."""
    return [divided_indexer_problem()]
