"""The writer of metadata: buffers and launches, with everything bound that stays the same for the life of a backend."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nsa_backend.adapters import sglang_types
from nsa_backend.config import BackendConfig
from nsa_backend.environment import switched_on
from nsa_backend.kernels.batch_inputs import BatchInputs
from nsa_backend.kernels.buffers import MetadataBuffers
from nsa_backend.kernels.metadata import write_metadata
from nsa_backend.kernels.plan import MetadataPlan, plan_decode
from nsa_backend.kernels.prefill import write_prefill
from nsa_backend.kernels.prefill_fields import PrefillFields
from nsa_backend.metadata.graph_memory import shared_rows
from nsa_backend.metadata.value_check import ValueCheck


class MetadataWriter:
    """Allocates buffers and launches into them, for eager forwards, captured ones and draft rounds alike."""

    def __init__(self, config: BackendConfig, req_to_token: torch.Tensor):
        """`req_to_token` is SGLang's request-to-token pool, int32 [pool, config.attention.table_width]."""
        self.config = config
        self.req_to_token = req_to_token
        self.value_check = ValueCheck(req_to_token, config.num_kv_slots) if switched_on("NSA_BACKEND_CHECK") else None

    def replay_buffers(self, plan: MetadataPlan, width: int | None = None) -> MetadataBuffers:
        """Buffers for captured graphs up to `plan`; graphs that run one after the other share their page tables.

        Of `width` tokens a request, where that is given, the table is their own.
        """
        if width is not None:
            return self._allocate(plan, width)
        return self._allocate(plan, self.config.attention.table_width, new_table=self._shared_table)

    def write_eager(self, plan: MetadataPlan, batch: sglang_types.ForwardBatch) -> MetadataBuffers:
        """Write `batch` into fresh buffers.

        Their tables are as wide as the longest request reaches where lengths are on the host. SGLang from 0.5.13 on leaves
        them off it in speculative forwards: then tables are as wide as a request can get, and nothing waits for the GPU, which
        a rank whose peers go on to a collective may not.

        Args:
            plan: what to write; must fit `batch`.
            batch: SGLang's, with tensors made for this forward.
        """
        width = self.config.attention.table_width
        if batch.seq_lens_cpu is not None:
            width = min(int(batch.seq_lens_cpu.max()) + plan.table_offset, width) if batch.batch_size else 1
        buffers = self._allocate(plan, width)
        extend_lens = _new_tokens(batch) if plan.ragged else None
        inputs = BatchInputs(batch.seq_lens, batch.req_pool_indices, extend_lens)
        self.check(plan, inputs)
        self.write(plan, buffers, inputs)
        return buffers

    def write_prefill(self, batch: sglang_types.ForwardBatch, *, num_rows: int, flattened: bool) -> PrefillFields:
        """One launch of `kernels.prefill.write_prefill` for `batch`, whose lengths are on the host too.

        Args:
            num_rows: new tokens of all requests.
            flattened: whether the slots of all tokens are wanted in ragged order.
        """
        inputs = BatchInputs(batch.seq_lens, batch.req_pool_indices, _new_tokens(batch))
        self.check(plan_decode(batch.batch_size), inputs)
        return write_prefill(
            inputs,
            req_to_token=self.req_to_token,
            index_topk=self.config.attention.index_topk,
            num_rows=num_rows,
            longest=int(batch.seq_lens_cpu.max()) if batch.batch_size else 0,
            flattened=int(batch.seq_lens_cpu.sum()) if flattened else 0,
        )

    def _shared_table(self, name: str, rows: int, columns: int) -> torch.Tensor:
        """Zeros, int32 [rows, columns], one memory for the captured graphs of all backends over this request pool.

        Two-batch overlap runs a graph's halves interleaved, each by a backend of its own, so none of these shares.
        """
        pool = self.req_to_token
        owner = id(self) if self.config.overlapped else None
        return shared_rows((name, pool.data_ptr(), owner), rows, columns, dtype=torch.int32, device=pool.device)

    def _allocate(self, plan: MetadataPlan, table_width: int, new_table: Callable | None = None) -> MetadataBuffers:
        config = self.config
        return MetadataBuffers.allocate(
            plan,
            table_width=table_width,
            num_sms=config.num_sms,
            device=config.attention.device,
            wide=config.wide_table,
            planned=config.topk_plan,
            new_table=new_table,
        )

    def check(self, plan: MetadataPlan, inputs: BatchInputs) -> None:
        """Under NSA_BACKEND_CHECK=1, raise ValueError where a value points outside its pool; never inside a capture."""
        if self.value_check is not None and plan.num_requests:
            self.value_check.check(plan, inputs)

    def write(self, plan: MetadataPlan, buffers: MetadataBuffers, inputs: BatchInputs) -> None:
        """One launch of `kernels.metadata.write_metadata`, which says what it refuses."""
        write_metadata(
            plan,
            buffers,
            inputs,
            req_to_token=self.req_to_token,
            index_topk=self.config.attention.index_topk,
            surplus_last=self.config.surplus_last,
        )


def _new_tokens(batch: sglang_types.ForwardBatch) -> torch.Tensor:
    """int32 [requests], of each request.

    SGLang's are int64 in a batch that it padded for a prefill of other ranks. Triton would compile the launch for that while
    those wait in a collective; this is one copy.
    """
    return batch.extend_seq_lens.int()
