"""What SGLang's indexer asks the attention backend for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nsa_backend import host
from nsa_backend.kernels.topk_slots import topk_slots
from nsa_backend.metadata import NSAMetadata
from nsa_backend.topk import TopK


@dataclass(frozen=True)
class IndexerMetadata(host.BaseIndexerMetadata):
    """Metadata of one forward behind the interface of SGLang's `Indexer`, and its top-k transform."""

    attn_metadata: NSAMetadata
    selector: TopK
    fuse_topk: bool

    paged_mqa_ctx_lens_2d: None = None  # SGLang's indexer then makes the [rows, 1] view itself
    force_unfused_topk: bool = False  # of ROCm

    @property
    def paged_mqa_schedule_metadata(self) -> torch.Tensor | None:
        return self.attn_metadata.paged_mqa_schedule_metadata

    def get_seqlens_int32(self) -> torch.Tensor:
        return self.attn_metadata.cache_seqlens_int32

    def get_page_table_64(self) -> torch.Tensor:
        return self.attn_metadata.real_page_table

    def get_page_table_1(self) -> torch.Tensor:
        return self.attn_metadata.page_table_1

    def get_seqlens_expanded(self) -> torch.Tensor:
        return self.attn_metadata.nsa_seqlens_expanded

    def get_indexer_kvcache_range(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        return self.attn_metadata.indexer_k_start_end

    def get_indexer_seq_len(self) -> torch.Tensor | None:
        return self.attn_metadata.indexer_seq_lens

    def get_indexer_seq_len_cpu(self) -> torch.Tensor | None:
        return self.attn_metadata.indexer_seq_lens_cpu

    def get_nsa_extend_len_cpu(self) -> list[int]:
        return self.attn_metadata.nsa_extend_seq_lens_list

    get_dsa_extend_len_cpu = get_nsa_extend_len_cpu  # its name from SGLang 0.5.13 on

    def get_token_to_batch_idx(self) -> torch.Tensor:
        return self.attn_metadata.token_to_batch_idx

    def topk_transform(
        self,
        logits: torch.Tensor,
        topk: int,
        ks: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        ke_offset: torch.Tensor | None = None,
        batch_idx_list: torch.Tensor | None = None,
        topk_indices_offset_override: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Best tokens of each row: KV slots where the transform is fused, positions where it is not.

        Args:
            logits: float32 [rows, width].
            topk: tokens to keep.
            ks: int32 [rows], first column of each row (prefill).
            cu_seqlens_q: not used: it describes rows by `batch_idx_list` in another way.
            ke_offset: int32 [rows], row lengths of a chunk of a prefill; the whole batch's where None.
            batch_idx_list: [rows], requests of the rows of that chunk.
            topk_indices_offset_override: belongs to ragged top-k, which a bfloat16 KV cache never uses.

        Returns:
            int32 [rows, topk], -1 past the end of a short row.
        """
        if topk_indices_offset_override is not None:
            raise ValueError("ragged top-k was asked for, which belongs to an fp8 KV cache: slots would be meaningless")
        metadata = self.attn_metadata
        lengths = metadata.nsa_seqlens_expanded if ke_offset is None else ke_offset
        if not self.fuse_topk:
            return self.selector.positions(logits, lengths, topk, ks)
        if batch_idx_list is not None:
            # A chunk of a prefill. One table row a token would have to be gathered for the fused kernel.
            positions = self.selector.positions(logits, lengths, topk, ks)
            return topk_slots(positions, metadata.page_table_1, batch_idx_list)
        return self.selector.slots(logits, lengths, topk, ks, metadata)
