"""One rank that divides the KV of requests with others, as a process: SGLang's own groups over gloo, and its own exchanges.

    python exchange_of_rank.py RANK RANKS FOLDER

Reads queries of all heads, KV, slots and lengths from FOLDER/case.pt, and writes what each exchange leaves it of its heads.
"""

from __future__ import annotations

import sys
from pathlib import Path

from nsa_backend.testing.process import start_process

start_process()

import torch  # noqa: E402
from sglang.srt.distributed.parallel_state import GroupCoordinator  # noqa: E402
from sglang.srt.layers.dcp.comm import (  # noqa: E402
    all_gather_q_for_mla_decode,
    cp_lse_ag_out_rs_mla,
    dcp_a2a_lse_reduce,
)
from sglang.srt.runtime_context import get_parallel  # noqa: E402

from nsa_backend.kernels.sparse_decode import sparse_decode  # noqa: E402


class Group(GroupCoordinator):
    """SGLang's, past the operators that it registers for CUDA alone."""

    reduce_scatter_tensor = GroupCoordinator._reduce_scatter_tensor
    all_to_all_single = GroupCoordinator._all_to_all_single


def main(rank: int, ranks: int, folder: Path) -> None:
    torch.distributed.destroy_process_group()  # of the process alone
    store = torch.distributed.FileStore(str(folder / "store"), ranks)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    gpus = dict.fromkeys(("use_pynccl", "use_mscclpp", "use_custom_allreduce", "use_torch_symm_mem_all_reduce"), False)
    others = {"use_hpu_communicator": False, "use_xpu_communicator": False}
    group = Group([list(range(ranks))], 0, "gloo", **gpus, **others, group_name="dcp")
    given = torch.load(folder / "case.pt")
    heads = given["q_nope"].shape[1] // ranks
    mine = slice(rank * heads, (rank + 1) * heads)
    with get_parallel().override(dcp_group=group, attn_dcp_size=ranks, attn_dcp_rank=rank):
        q_nope, q_rope = all_gather_q_for_mla_decode(given["q_nope"][:, mine], given["q_rope"][:, mine])
    lse = torch.empty(q_nope.shape[:2])
    out = sparse_decode(
        q_nope, q_rope, given["kv_cache"][rank::ranks].contiguous(), given["topk_slots"], given["nsa_cache_seqlens"],
        given["sm_scale"], num_sms=132, ranks=ranks, rank=rank, lse=lse,
    )  # fmt: skip
    left = {
        "ag_rs": cp_lse_ag_out_rs_mla(out, lse, group, is_lse_base_on_e=False).transpose(0, 1),
        "a2a": dcp_a2a_lse_reduce(out.contiguous(), lse.contiguous(), group, is_lse_base_on_e=False, comm_backend="a2a"),
    }
    torch.save({name: part.contiguous() for name, part in left.items()}, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
