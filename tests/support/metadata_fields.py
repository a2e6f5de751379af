"""One step of a backend's metadata against plain Python, field by field; what all releases of SGLang have in common."""

from __future__ import annotations

import numpy as np
from metadata_reference import Batch, expected_buffers

FIELDS = {
    "cache_seqlens_int32": "cache_seqlens",
    "cu_seqlens_k": "cu_seqlens_k",
    "nsa_cache_seqlens_int32": "nsa_cache_seqlens",
    "nsa_cu_seqlens_k": "nsa_cu_seqlens_k",
    "nsa_seqlens_expanded": "seqlens_expanded",
}
"""Field of `NSAMetadata` to storage of `metadata_reference.expected_buffers`."""


def check_fields(metadata, batch: Batch, step: int = 0) -> None:
    """Every field of one step; table columns only as far as a request reaches, which is all that may be read."""
    rows, requests = len(metadata.nsa_seqlens_expanded), len(batch.seq_lens)
    shapes = {
        "cache_seqlens": (9, requests), "cu_seqlens_k": (9, requests + 1), "seqlens_expanded": (9, rows),
        "nsa_cache_seqlens": (9, rows), "nsa_cu_seqlens_k": (9, rows + 1),
        "real_page_table": (rows, 20),
        "token_to_batch_idx": (rows,), "cu_seqlens_q": (requests + 1,),
    }  # fmt: skip
    if metadata.page_table_1 is not None:
        shapes["page_table_1"] = (requests, batch.req_to_token.shape[1])
    want = expected_buffers(batch, shapes)
    together = ("target_verify", "draft_extend_v2")
    assert metadata.rows_per_request == (batch.num_draft_tokens if batch.mode in together else 1)
    for ours, reference in FIELDS.items():
        np.testing.assert_array_equal(getattr(metadata, ours).numpy(), want[reference][step], err_msg=ours)
    for name in shapes.keys() & {"page_table_1", "real_page_table"}:
        table = getattr(metadata, name).numpy()
        width = min(table.shape[1], want[name].shape[1])
        valid = want[name][:, :width] != -7777
        assert valid.any(axis=1).all()
        np.testing.assert_array_equal(table[:, :width][valid], want[name][:, :width][valid], err_msg=name)
