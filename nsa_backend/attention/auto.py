"""The implementation by the number of query rows, of decode or of prefill, from a table measured on the same GPU type.

A captured graph has a fixed number of rows, so the choice is made once a graph. `auto_table.json` is written by
`benchmarks/reports/auto_table.py` from committed result files, which it names.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nsa_backend.attention.context_part import ContextPart
from nsa_backend.attention.implementations import implementation
from nsa_backend.attention.interface import NothingToPrepare, SparseAttention
from nsa_backend.attention.sparse_inputs import SparseInputs
from nsa_backend.config import AttentionConfig
from nsa_backend.kernels.sparse_verify import MOST_SLOTS
from nsa_backend.metadata.views import NSAMetadata

TABLE = Path(__file__).with_name("auto_table.json")

CANDIDATES = {"bf16": ("fa3", "flashmla_sparse", "sparse_decode"), "fp8": ("flashmla_kv", "sparse_decode")}
"""What serves either KV cache."""

TOGETHER = "sparse_verify"
"""What may serve rows of one request together."""

PREFILL = {"bf16": ("flashmla_sparse", "sparse_prefill"), "fp8": ("flashmla_kv", "sparse_prefill")}
"""What serves prefill on either: of few rows, and of many."""


@functools.cache
def measured() -> dict[str, Any]:
    """The table, by GPU name."""
    return json.loads(TABLE.read_text())


def problems(config: AttentionConfig) -> list[str]:
    """Why auto cannot choose here."""
    known = measured()
    if config.device_name not in known:
        return [
            f"it was measured on {', '.join(known)} and this device is {config.device_name or 'no GPU'}: unset it and name "
            "the implementation, or measure (python -m nsa_backend bench attention, then benchmarks/reports/auto_table.py)"
        ]
    if config.prefill and config.context_ranks > 1:
        return ["rows of a prefill whose KV ranks divide were not measured together"]
    if config.prefill and _least_in_prefill(config) is None:
        return [f"rows of {config.num_heads} heads on {_kv(config)} KV gain nothing together, or were not measured"]
    names = (PREFILL if config.prefill else CANDIDATES)[_kv(config)]
    return [f"{name}: {problem}" for name in names for problem in implementation(name).problems(config)]


def build(config: AttentionConfig) -> SparseAttention:
    """An implementation that chooses per call."""
    if config.prefill:
        return AutoPrefill(config, _least_in_prefill(config))
    least = least_together(config.device_name, _kv(config), config.num_heads)
    # Where ranks divide the KV rows are asked for one by one (`Auto.forward_part`), so nothing is compiled for them together.
    if config.num_draft_tokens < 2 or config.context_ranks > 1 or implementation(TOGETHER).problems(config):
        least = {}
    return Auto(config, intervals(config.device_name, _kv(config), config.num_heads), least)


def _kv(config: AttentionConfig) -> str:
    return "bf16" if config.kv_cache_dtype == torch.bfloat16 else "fp8"


def intervals(device_name: str, kv: str, num_heads: int) -> list[tuple[int, str]]:
    """[(most rows, implementation)] in ascending order; the last one also serves what lies above.

    Head counts between the measured ones follow the next larger one, as FlashMLA pads them; the largest follows itself.
    """
    by_heads = measured()[device_name][kv]
    heads = _measured_heads(by_heads, num_heads) or max(by_heads, key=int)
    return [(most, name) for most, name in by_heads[heads]]


def _measured_heads(by_heads: Mapping[str, Any], num_heads: int) -> str | None:
    """Of the head counts that there are, the least that is no smaller."""
    return min((heads for heads in by_heads if int(heads) >= num_heads), key=int, default=None)


def least_together(device_name: str, kv: str, num_heads: int) -> dict[int, int]:
    """By rows of a request, the least rows of a call that sparse_verify serves faster; of as many heads as in `intervals`."""
    by_heads = measured()[device_name]["together"][kv]
    return {int(rows): least for rows, least in by_heads.get(_measured_heads(by_heads, num_heads), {}).items()}


def least_in_prefill(device_name: str, kv: str, num_heads: int) -> int | None:
    """The least rows of a prefill that sparse_prefill serves faster, of as many heads as in `intervals`; None if never."""
    by_heads = measured()[device_name]["prefill"][kv]
    return by_heads.get(_measured_heads(by_heads, num_heads))


def _least_in_prefill(config: AttentionConfig) -> int | None:
    return least_in_prefill(config.device_name, _kv(config), config.num_heads)


def choose(table: list[tuple[int, str]], rows: int) -> str:
    """The implementation for `rows` query rows."""
    return next((name for most, name in table if rows <= most), table[-1][1])


class Auto:
    """Hands every call to the implementation that was fastest at its number of rows."""

    def __init__(self, config: AttentionConfig, table: list[tuple[int, str]], least: Mapping[int, int]):
        self._table, self._least = table, least
        names = dict.fromkeys([name for _, name in table] + [TOGETHER] * bool(least))
        self._built = {name: implementation(name).build(config) for name in names}

    def reserve(self, max_rows: int) -> None:
        for attention in self._built.values():
            attention.reserve(max_rows)

    def prepare(self, metadata: NSAMetadata) -> NSAMetadata:
        """Prepare for the implementation that these rows will meet."""
        return self._for(metadata.nsa_cache_seqlens_int32.shape[0], metadata.rows_per_request).prepare(metadata)

    def forward(self, inputs: SparseInputs) -> torch.Tensor:
        return self._for(inputs.q_nope.shape[0], inputs.rows_per_request).forward(inputs)

    def forward_part(self, inputs: SparseInputs, part: ContextPart) -> tuple[torch.Tensor, torch.Tensor]:
        return self._for(inputs.q_nope.shape[0], 1).forward_part(inputs, part)

    def _for(self, rows: int, rows_per_request: int) -> SparseAttention:
        together = rows >= self._least.get(rows_per_request, rows + 1)
        return self._built[TOGETHER if together else choose(self._table, rows)]


class AutoPrefill(NothingToPrepare):
    """Hands a prefill of many rows to sparse_prefill, which prepares nothing, and one of few to FlashMLA."""

    def __init__(self, config: AttentionConfig, least: int):
        self._least = least
        self._few, self._many = (implementation(name).build(config) for name in PREFILL[_kv(config)])

    def reserve(self, max_rows: int) -> None:
        self._few.reserve(max_rows)

    def prepare(self, metadata: NSAMetadata) -> NSAMetadata:
        """Prepare for FlashMLA where it may meet these rows."""
        return self._few.prepare(metadata) if metadata.nsa_cache_seqlens_int32.shape[0] < self._least else metadata

    def forward(self, inputs: SparseInputs) -> torch.Tensor:
        many = inputs.q_nope.shape[0] >= self._least and len(inputs.kv_cache) <= MOST_SLOTS
        return (self._many if many else self._few).forward(inputs)
