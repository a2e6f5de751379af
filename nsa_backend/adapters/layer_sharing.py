"""Layers that attend with the selection of a layer before them: what a config says, against what SGLang makes of it.

A layer that shares has no indexer in the checkpoint. Where SGLang takes another layer for one that shares, it runs an indexer
without weights, or reuses a selection that the model never trained with.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import le
from typing import Any

FULL_LAYERS_AT_FIRST = 2
"""Where a config gives a period (index_topk_freq) alone: so many layers select before others share."""


def layers_that_share(hf_config: Any) -> list[bool]:
    """By layer of the target, whether its config has it share."""
    layers = range(hf_config.num_hidden_layers)
    if types := getattr(hf_config, "indexer_types", None):
        return [types[layer] == "shared" for layer in layers]
    if pattern := _pattern_of(hf_config):
        return pattern
    period = getattr(hf_config, "index_topk_freq", None) or 1
    first = getattr(hf_config, "index_skip_topk_offset", None) or FULL_LAYERS_AT_FIRST
    return [max(layer - first + 1, 0) % period != 0 for layer in layers]


def _pattern_of(hf_config: Any) -> list[bool] | None:
    pattern = getattr(hf_config, "index_topk_pattern", None)
    return pattern and [pattern[layer : layer + 1] == "S" for layer in range(hf_config.num_hidden_layers)]


def sharing_problem(hf_config: Any, shares_in_sglang: Callable[[Any, int], bool], release: str) -> str | None:
    """Why SGLang would run other layers' indexers than the model has, or None.

    A config may have types of its layers and a pattern that says otherwise: transformers' class gives every layer of GLM-5 a
    type when it is read, and --json-model-override-args brings the pattern after that. SGLang may go by the pattern where each
    layer that then selects has an indexer.

    Args:
        hf_config: of the target; a config that does not say how many layers there are says nothing about sharing.
        shares_in_sglang: of (config, layer), what the installed release does with a layer.
        release: its version, for the sentence.
    """
    if not hasattr(hf_config, "num_hidden_layers"):
        return None
    found = [shares_in_sglang(hf_config, layer) for layer in range(hf_config.num_hidden_layers)]
    shared = layers_that_share(hf_config)
    if found == shared or (found == _pattern_of(hf_config) and all(map(le, shared, found))):
        return None
    return (
        f"its layers share top-k in a pattern that SGLang {release} does not read: other layers would select than those that "
        "have an indexer; install a newer SGLang"
    )
