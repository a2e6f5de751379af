"""The metadata launch with everything bound that stays the same for the life of a backend."""

from __future__ import annotations

import torch

from nsa_backend import host
from nsa_backend.buffers import MetadataBuffers
from nsa_backend.config import BackendConfig
from nsa_backend.kernels.metadata import write_metadata
from nsa_backend.plan import MetadataPlan
from nsa_backend.switches import switch
from nsa_backend.value_check import ValueCheck


class MetadataWriter:
    """Allocates buffers and launches into them, for eager forwards, captured ones and draft rounds alike."""

    def __init__(self, config: BackendConfig, req_to_token: torch.Tensor):
        """`req_to_token` is SGLang's request-to-token pool, int32 [pool, config.attention.table_width]."""
        self.config = config
        self.req_to_token = req_to_token
        self.value_check = ValueCheck(req_to_token, config.num_kv_slots) if switch("NSA_BACKEND_CHECK") else None

    def replay_buffers(self, plan: MetadataPlan) -> MetadataBuffers:
        """Buffers for captured graphs up to `plan`; all graphs over the pool share one page_table_1."""
        return MetadataBuffers.allocate(
            plan,
            table_width=self.config.attention.table_width,
            num_sms=self.config.num_sms,
            device=self.config.attention.device,
            share_table_of=self.req_to_token,
        )

    def write_eager(self, plan: MetadataPlan, batch: host.ForwardBatch, *, scheduled: bool = True) -> MetadataBuffers:
        """Write `batch` into fresh buffers, their tables as wide as its longest request reaches.

        Args:
            plan: what to write; must fit `batch`.
            batch: SGLang's, with tensors made for this forward.
            scheduled: whether DeepGEMM's paged-MQA schedule is wanted; prefill has no use for it.
        """
        # SGLang from 0.5.13 on leaves lengths off the host in speculative forwards; outside graphs, that costs one wait here.
        lengths = batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu
        longest = int(lengths.max()) if batch.batch_size else 1
        buffers = MetadataBuffers.allocate(
            plan,
            table_width=min(longest + plan.table_offset, self.config.attention.table_width),
            num_sms=self.config.num_sms if scheduled else 0,
            device=self.config.attention.device,
        )
        extend_lens = batch.extend_seq_lens if plan.ragged else None
        values = {"seq_lens": batch.seq_lens, "req_pool_indices": batch.req_pool_indices, "extend_lens": extend_lens}
        self.check(plan, **values)
        self.write(plan, buffers, **values)
        return buffers

    def check(self, plan: MetadataPlan, **values: torch.Tensor | None) -> None:
        """Under NSA_BACKEND_CHECK=1, raise ValueError where a value points outside its pool; never inside a capture.

        `values` are the tensors that `write` takes.
        """
        if self.value_check is not None and plan.num_requests:
            self.value_check.check(plan, **values)

    def write(
        self,
        plan: MetadataPlan,
        buffers: MetadataBuffers,
        *,
        seq_lens: torch.Tensor,
        req_pool_indices: torch.Tensor,
        extend_lens: torch.Tensor | None = None,
    ) -> None:
        """One launch of `kernels.metadata.write_metadata`, which says what the arguments are and what it refuses."""
        write_metadata(
            plan,
            buffers,
            seq_lens=seq_lens,
            req_pool_indices=req_pool_indices,
            req_to_token=self.req_to_token,
            index_topk=self.config.attention.index_topk,
            extend_lens=extend_lens,
            surplus_last=self.config.surplus_last,
        )
