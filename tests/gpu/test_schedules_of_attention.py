"""What an implementation schedules once a forward: it must be what the kernel would have made for itself."""

from dataclasses import replace

import pytest
import torch
from test_attention import LATENT, ROPE, TOPK, config_of, sparse_case

from nsa_backend.adapters.installed import adapter
from nsa_backend.attention.fa3 import Fa3
from nsa_backend.attention.flashmla_sparse import FlashMlaSparse
from nsa_backend.attention.torch_reference import TorchSparseAttention
from nsa_backend.benchmarks.calls.timing import captured_graph
from nsa_backend.kernels.buffers import MetadataBuffers
from nsa_backend.kernels.plan import plan_decode
from nsa_backend.metadata.views import step_metadata
from nsa_backend.testing.process import start_sglang

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("rows", [1, 4, 33, 128])
def test_flashmla_tiles_depend_on_no_length(rows, heads):
    """What lets FlashMlaKv keep one schedule a row count."""
    schedule = adapter.flash_mla().get_mla_metadata
    padded = 64 if heads <= 64 else 128

    def tiles(lengths: torch.Tensor):
        return schedule(
            cache_seqlens=lengths, num_q_tokens_per_head_k=padded, num_heads_k=1, num_heads_q=padded, is_fp8_kvcache=True,
            topk=TOPK,
        )  # fmt: skip

    first = tiles(torch.full((rows,), TOPK, dtype=torch.int32, device="cuda"))
    for _ in range(20):
        other = tiles(torch.randint(0, TOPK + 1, (rows,), dtype=torch.int32, device="cuda"))
        assert torch.equal(first[1], other[1])
        # The last of a part's eight values is padding that nobody writes.
        assert torch.equal(first[0][:, :7], other[0][:, :7])


@pytest.fixture(scope="module")
def scheduled_ahead():
    """Skips releases whose FA3 schedules its tiles in every layer."""
    start_sglang()
    if adapter.fa3_scheduler() is None:
        pytest.skip("tiles are scheduled in every layer in this release")


@pytest.mark.usefixtures("scheduled_ahead")
@pytest.mark.parametrize("heads", [8, 16, 64, 128])
@pytest.mark.parametrize("rows", [1, 2, 7, 33, 66, 128, 500])
def test_fa3_with_its_schedule_made_once(rows, heads):
    """Bit for bit what FA3 computes when it schedules for itself, over replays of one graph with other lengths."""
    attention = Fa3(config_of(heads))
    slots = 1 << 13
    kv = torch.randn(slots, 1, LATENT + ROPE, device="cuda").bfloat16()
    case = replace(sparse_case(1, 1), kv_cache=kv)
    q = torch.randn(rows, heads, LATENT + ROPE, device="cuda").bfloat16()
    lens = torch.ones(rows, dtype=torch.int32, device="cuda")
    cu_k = torch.zeros(rows + 1, dtype=torch.int32, device="cuda")
    inputs = replace(
        case, q_nope=q[..., :LATENT].contiguous(), q_rope=q[..., LATENT:].contiguous(),
        topk_slots=torch.randint(0, slots, (rows, TOPK), dtype=torch.int32, device="cuda"), nsa_cache_seqlens=lens,
        nsa_cu_seqlens_q=torch.arange(rows + 1, dtype=torch.int32, device="cuda"), nsa_cu_seqlens_k=cu_k,
    )  # fmt: skip
    found = {}

    metadata_of_rows = decode_metadata(rows, lens, inputs.nsa_cu_seqlens_q)

    def forward() -> None:
        metadata = attention.prepare(metadata_of_rows)
        assert metadata.schedule is not None
        found["layers"] = [attention.forward(replace(inputs, schedule=metadata.schedule)) for _ in range(3)]

    graph = captured_graph(forward)
    for seed in range(12):
        generator = torch.Generator(device="cuda").manual_seed(seed)
        longest = (1, 64, 300, TOPK)[seed % 4]
        lens.copy_(torch.randint(1, longest + 1, (rows,), generator=generator, device="cuda"))
        cu_k[1:] = lens.cumsum(0)
        for out in found["layers"]:
            out.fill_(torch.nan)
        graph.replay()
        want = attention.forward(replace(inputs, schedule=None))
        for out in found["layers"]:
            assert torch.equal(out, want)


def decode_metadata(rows: int, lens: torch.Tensor, cu_seqlens_q: torch.Tensor):
    """Metadata of decode rows whose clipped lengths are `lens`, the tensor itself."""
    buffers = MetadataBuffers.allocate(plan_decode(rows), table_width=64, num_sms=0, device="cuda", wide=False, planned=False)
    metadata = step_metadata(plan_decode(rows), buffers)
    return replace(metadata, nsa_cache_seqlens_int32=lens, nsa_cu_seqlens_q=cu_seqlens_q)


@pytest.mark.parametrize("heads", [16, 64, 128])
def test_flashmla_sparse_skips_what_a_row_does_not_have(heads):
    """Rows of no token, of one, of a few and of all; the slots past a row's end are never read."""
    inputs = sparse_case(9, heads)
    lengths = torch.tensor([0, 1, 2, 63, 64, 65, 300, TOPK - 1, TOPK], dtype=torch.int32, device="cuda")
    chosen = inputs.topk_slots[-1].expand(9, -1)
    column = torch.arange(TOPK, device="cuda")
    inputs = replace(inputs, topk_slots=torch.where(column < lengths[:, None], chosen, -1), nsa_cache_seqlens=lengths)
    out = FlashMlaSparse(config_of(heads)).forward(inputs).float()
    want = TorchSparseAttention().forward(inputs).float()
    assert out.isfinite().all()
    assert ((out - want)[1:].norm(dim=(1, 2)) / want[1:].norm(dim=(1, 2))).max() < 5e-3
