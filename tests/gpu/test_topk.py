"""Top-k through 64-token pages: the plan is SGLang's own, and slots are those of the best scores, in every shape."""

import pytest
import torch

from nsa_backend.adapters.installed import adapter
from nsa_backend.indexer.topk import choose_topk
from nsa_backend.kernels import plan as plans
from nsa_backend.kernels.batch_inputs import BatchInputs
from nsa_backend.kernels.buffers import MetadataBuffers
from nsa_backend.kernels.metadata import metadata_kernel, write_metadata
from nsa_backend.metadata.views import step_metadata
from nsa_backend.testing.process import start_sglang

pytestmark = pytest.mark.gpu

TOPK, PAGE = 2048, 64


@pytest.fixture(scope="module")
def selector():
    return choose_topk(torch.device("cuda"))


def launched(lens: torch.Tensor, longest: int, tables: torch.Tensor | None = None):
    """Metadata of decode rows of these lengths, `tables` their rows of the request table."""
    rows = lens.shape[0]
    plan = plans.plan_decode(rows)
    buffers = MetadataBuffers.allocate(
        plan, table_width=longest, num_sms=132, device="cuda",
        wide=adapter.TOPK_READS_PAGE_TABLE_1, planned=adapter.topk_v2() is not None,
    )  # fmt: skip
    pool = torch.zeros(1, longest, dtype=torch.int32, device="cuda") if tables is None else tables
    slots = torch.arange(rows, device="cuda") % pool.shape[0]
    write_metadata(plan, buffers, BatchInputs(lens, slots), req_to_token=pool, index_topk=TOPK)
    return step_metadata(plan, buffers)


def random_lens(rows: int, longest: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    lens = torch.randint(1, longest + 1, (rows,), generator=generator, device="cuda")
    return torch.where(torch.rand(rows, generator=generator, device="cuda") < 0.3, 1, lens) if seed % 3 == 0 else lens


@pytest.fixture(scope="module")
def both_forms():
    """Skips releases whose top-k v2 has one form alone: the rule of the plan is that of the others."""
    start_sglang()
    if adapter.topk_v2() is None or adapter.topk_v2()[1] is None:
        pytest.skip("the rule is that of releases with both forms")


@pytest.mark.usefixtures("both_forms")
@pytest.mark.parametrize("longest", [60_000, 70_000, 140_000, 400_000])
@pytest.mark.parametrize("rows", [31, 45, 46, 64, 128, 256, 512])
def test_plan_equals_sglangs(rows, longest):
    from sglang.kernels.ops.attention.dsv4.topk import plan_topk_v2, topk_v2_plan_is_written

    for seed in range(10):
        lens = random_lens(rows, longest, seed).int()
        got = launched(lens, longest).topk_plan
        if not topk_v2_plan_is_written(lens):
            continue
        want = plan_topk_v2(lens)
        listed = int(want[0, 1])
        assert torch.equal(got[0], want[0])
        # Which thread of SGLang's kernel appends its row first is left to chance.
        assert torch.equal(got[1 : 1 + listed], want[1 : 1 + listed][want[1 : 1 + listed, 0].argsort()])


@pytest.mark.parametrize("longest", [300, 3000, 9000, 20_000, 70_000, 163_840])
@pytest.mark.parametrize("rows", [1, 4, 31, 64, 140, 520])
def test_slots_are_those_of_the_best(selector, rows, longest):
    """Scores outside a row are NaN and entries of the page table beyond it do not exist."""
    if rows * longest > 2**25:
        rows = max(1, 2**25 // longest)
    lens = random_lens(rows, longest, rows).int()
    lens[-1] = longest
    pages = torch.stack([torch.randperm(8192, device="cuda")[: -(-longest // PAGE)] for _ in range(min(rows, 16))])
    tables = (PAGE * pages[..., None] + torch.arange(PAGE, device="cuda")).flatten(1).int().contiguous()
    metadata = launched(lens, tables.shape[1], tables)
    width = PAGE * metadata.real_page_table.shape[1]
    scores = torch.randn(rows, width, device="cuda")
    inside = torch.arange(width, device="cuda") < lens[:, None]
    logits = torch.where(inside, scores, torch.nan)
    out = selector.slots(logits, metadata.nsa_seqlens_expanded, TOPK, metadata)
    best = torch.where(inside, scores, -torch.inf).topk(min(TOPK, width), dim=1)
    for row in range(rows):
        kept = min(int(lens[row]), TOPK)
        chosen = out[row][out[row] >= 0]
        want = tables[row % len(tables)][best.indices[row, :kept]]
        assert torch.equal(chosen.sort().values, want.sort().values), f"row {row} of length {int(lens[row])}"
        assert (out[row] >= -1).all()


@pytest.mark.parametrize("requests", [[(0, 3000)], [(5, 700), (4000, 900), (0, 1), (9000, 333)]])
def test_prefill_positions_and_keys(selector, requests):
    """Rows count within their windows of the ragged logits; what lies outside belongs to others."""
    starts, lens, begin = [], [], 0
    for prefix, new in requests:
        starts += [begin] * new
        lens += [prefix + j + 1 for j in range(new)]
        begin += prefix + new
    ks, lengths = (torch.tensor(values, dtype=torch.int32, device="cuda") for values in (starts, lens))
    columns = torch.arange(-(-begin // 4) * 4, device="cuda")
    scores = torch.randn(len(starts), len(columns), device="cuda")
    inside = (columns >= ks[:, None]) & (columns < (ks + lengths)[:, None])
    masked = torch.where(inside, scores, -torch.inf)
    want = torch.zeros_like(inside).scatter_(1, masked.topk(min(TOPK, len(columns)), dim=1).indices, value=True) & inside
    positions = selector.positions(scores.clone(), lengths, TOPK, ks)
    keys = selector.positions(scores.clone(), lengths, TOPK, ks, ks)
    for got, base in ((positions, ks), (keys, torch.zeros_like(ks))):
        column = torch.where(got < 0, len(columns), got + base[:, None]).long()
        chosen = torch.zeros(len(starts), len(columns) + 1, dtype=torch.bool, device="cuda").scatter_(1, column, value=True)
        assert torch.equal(chosen[:, :-1], want)


def test_eager_launches_of_a_mode_share_one_variant():
    """A stride, a length or a number of rows may not compile the kernel again while requests wait."""

    def variants() -> int:
        return sum(len(caches[0]) for caches in metadata_kernel.device_caches.values())

    pool = torch.zeros(1, 8192, dtype=torch.int32, device="cuda")  # a server has one, of one stride
    launched(random_lens(3, 500, 1), 500, pool)
    before = variants()
    for rows, longest in ((1, 64), (2, 100), (16, 1024), (17, 1000), (33, 4096), (64, 8191), (500, 333)):
        launched(random_lens(rows, longest, rows), longest, pool)
    assert variants() == before
