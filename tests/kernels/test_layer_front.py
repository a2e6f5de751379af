"""The front of a layer: both launches against their twins, bit for bit, on caches that are poison wherever nothing belongs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
from emulated import storing, turning
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nsa_backend.kernels import norm_rope_store as norms
from nsa_backend.kernels import rope_quantise as queries
from nsa_backend.kernels.cuda_source import compiled
from nsa_backend.kernels.layer_front_torch import norm_rope_store_torch, rope_quantise_torch
from nsa_backend.kernels.layer_front_torch import quantise as quantise_torch
from nsa_backend.kernels.layer_front_weights import GROUP, FrontWeights, Scales
from nsa_backend.kernels.norm_rope_store import INDEX_PAGE_BYTES
from nsa_backend.kernels.plan import PAGE_SIZE
from nsa_backend.kernels.projection_inputs import quantise
from nsa_backend.testing.interpreter import round_as_a_gpu_does

POISON = 0x5A
PAGES, POSITIONS, LATENT, ROPE = 4, 64, 512, 64


@pytest.fixture(scope="module", autouse=True)
def _rounding():
    round_as_a_gpu_does()


def values(kind: str, *shape: int, generator: torch.Generator) -> torch.Tensor:
    """bfloat16 of one kind: what activations look like, or what breaks scales."""
    x = torch.randn(*shape, generator=generator)
    if kind == "zeros":
        x = x * 0
    elif kind == "large":
        x = x.sign() * 1e17  # squares still fit float32
    elif kind == "outliers":
        x[..., ::GROUP] *= 1e4
    elif kind == "denormal":
        x = x * 1e-39
    return x.bfloat16()


INDEXERS = {"halves": (True, False), "neighbours": (False, False), "neighbours, fused by SGLang": (False, True)}


def layer(q_rank: int, indexer: str, generator: torch.Generator, *, neox: bool = False) -> FrontWeights:
    angles = torch.rand(2, POSITIONS, ROPE // 2, generator=generator) * 6.28
    tables = torch.cat((angles.cos(), angles.sin()), dim=-1)
    norms = [1 + 0.1 * torch.randn(width, generator=generator) for width in (q_rank, LATENT, GROUP, GROUP)]
    return FrontWeights(
        norms[0].bfloat16(), norms[1].bfloat16(), norms[2], norms[3] - 1, tables[0].contiguous(), tables[1].contiguous(),
        1e-6, 1e-6, 1e-6, neox, *INDEXERS[indexer],
    )  # fmt: skip


def caches(fp8: bool) -> tuple[torch.Tensor, torch.Tensor]:
    width = 656 if fp8 else 2 * (LATENT + ROPE)
    kv = torch.full((PAGES * PAGE_SIZE, 1, width), POISON, dtype=torch.uint8)
    return (kv if fp8 else kv.view(torch.bfloat16)), torch.full((PAGES, INDEX_PAGE_BYTES), POISON, dtype=torch.uint8)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(*(x.contiguous().flatten().view(torch.uint8) for x in (a, b)))


KINDS = st.sampled_from(["normal", "zeros", "large", "outliers", "denormal"])

FORMS = [
    (1536, Scales.EXACT, False, "halves", (1, 0), False), (1536, Scales.POWERS_OF_TWO, True, "halves", (2, 1), False),
    (2048, Scales.EXACT, False, "neighbours, fused by SGLang", (1, 0), False), (2048, Scales.EXACT, True, None, (1, 0), False),
    (256, None, True, "neighbours", (8, 0), True), (256, Scales.EXACT, False, "neighbours, fused by SGLang", (2, 1), True),
    (1536, None, False, None, (8, 0), True), (2048, Scales.POWERS_OF_TWO, True, "halves", (1, 0), True),
]  # fmt: skip
"""Of the launch that norms and writes, each of which is compiled: the query's latent and its scales, whether KV has 8 bits, the
indexer, which of how many ranks, and whether RoPE turns halves."""
TURNING = [(64, "halves", False), (32, "neighbours, fused by SGLang", False), (8, "neighbours", True), (8, "halves", True)]
"""Of the one that turns: index heads, the indexer, and whether MLA's RoPE turns halves."""


@given(
    rows=st.integers(0, 6),
    padding=st.integers(0, 3),
    kind=KINDS,
    form=st.sampled_from(FORMS),
    stride=st.sampled_from([1, 3]),
    seed=st.integers(0, 2**32 - 1),
)
@example(5, 2, "zeros", FORMS[1], 1, 0)
@example(5, 1, "denormal", FORMS[1], 3, 1)
@example(6, 0, "normal", FORMS[2], 1, 2)
@settings(deadline=None, max_examples=40)
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")  # a group of zeros, as on a GPU
def test_norms_and_writes(rows, padding, kind, form, stride, seed):
    q_rank, q_scales, fp8_cache, indexer, part, neox = form
    generator = torch.Generator().manual_seed(seed)
    weights = layer(q_rank, indexer or "halves", generator, neox=neox)
    if indexer is None:
        weights = replace(weights, key_norm=None, key_bias=None, index_cos_sin=None)
    assert weights.problem() is None
    qkv = values(kind, rows, q_rank + LATENT + ROPE, generator=generator)
    key = values(kind, rows, 2 * GROUP, generator=generator)[:, :GROUP]
    real = max(rows - padding, 0)
    slots = torch.zeros(rows, stride, dtype=torch.int64)
    slots[:real, 0] = PAGE_SIZE + torch.randperm((PAGES - 1) * PAGE_SIZE, generator=generator)[:real]
    slots = slots[:, 0]
    key[real:], qkv[real:] = key[real : real + 1], qkv[real : real + 1]  # rows of padding race for slot 0
    positions = torch.randint(POSITIONS, (rows,), generator=generator)
    positions[real:] = 0
    found = []
    ours = partial(norms.norm_rope_store, launch=storing(weights, q_scales, *part, seed, kv_fp8=fp8_cache))
    for write in (ours, norm_rope_store_torch):
        kv, index = caches(fp8_cache)
        keys, pages = (key, index) if indexer else (None, None)
        written = write(qkv, keys, weights, positions, slots, kv, pages, q_scales, ranks=part[0], rank=part[1])
        found.append((*written, kv, index))
    for ours, twins in zip(*found, strict=True):
        assert (ours is None and twins is None) or same_bits(ours, twins)
    _, scales, kv, index = found[0]
    if q_scales is not None and rows:
        assert scales.stride(0) == 1 or rows < 2
        assert scales.stride(1) % 4 == 0
    untouched = torch.ones(PAGES * PAGE_SIZE, dtype=torch.bool)
    own = slots[:real][slots[:real] % part[0] == part[1]] // part[0]
    untouched[own] = False
    assert len(own) == 0 or not (kv[own].view(torch.uint8) == POISON).all()
    assert (kv.view(torch.uint8)[untouched] == POISON).all()
    untouched[:] = True
    if indexer:
        untouched[slots] = False
    written = index[:, : PAGE_SIZE * GROUP].reshape(-1, GROUP), index[:, PAGE_SIZE * GROUP :].reshape(-1, 4)
    assert all((part[untouched] == POISON).all() for part in written)


@given(
    rows=st.integers(1, 9),
    groups=st.integers(2, 20),
    kind=KINDS,
    scales=st.sampled_from(list(Scales)),
    seed=st.integers(0, 2**32 - 1),
)
@settings(deadline=None, max_examples=20)
def test_inputs_of_projections(rows, groups, kind, scales, seed):
    x = values(kind, rows, groups * GROUP, generator=torch.Generator().manual_seed(seed))
    found, twins = quantise(x, scales), quantise_torch(x.float(), scales)
    for ours, twin in zip(found, twins, strict=True):
        assert ours.shape == twin.shape
        assert same_bits(ours, twin)
    assert found[1].stride(0) == 1 or rows < 2
    assert found[1].stride(1) % 4 == 0


@given(
    rows=st.integers(0, 3),
    heads=st.sampled_from([1, 8, 16, 20, 128]),
    kind=KINDS,
    form=st.sampled_from(TURNING),
    few=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@example(3, 8, "normal", TURNING[1], True, 0)
@settings(deadline=None, max_examples=30)
def test_queries_and_gates(rows, heads, kind, form, few, seed):
    index_heads, indexer, neox = form
    generator = torch.Generator().manual_seed(seed)
    weights = layer(256, indexer, generator, neox=neox)
    query = values(kind, rows, index_heads, GROUP, generator=generator)
    gates = torch.randn(rows, GROUP + index_heads, generator=generator)[:, GROUP:]
    gates = gates.bfloat16() if weights.index_fused else gates
    q_rope = values(kind, rows, heads, 128 + ROPE, generator=generator)[..., 128:]
    positions = torch.randint(POSITIONS, (rows,), generator=generator)
    with patch.object(queries, "FEW_ROWS", rows - (not few)):
        given = {"launch": turning(index_heads, weights, rows, seed)}
        ours = queries.rope_quantise(query, gates, q_rope, weights, positions, **given)
        alone = queries.rope_query(q_rope, weights, positions, launch=turning(0, weights, rows, seed))
    for found, twins in zip(ours, rope_quantise_torch(query, gates, q_rope, weights, positions), strict=True):
        assert found.shape == twins.shape
        assert same_bits(found, twins)
    assert same_bits(alone, ours[2])


@given(
    rows=st.integers(0, 6),
    step=st.sampled_from([1, 2]),
    kind=KINDS,
    form=st.sampled_from([form[:2] for form in TURNING if form[2] is False]),
    few=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@settings(deadline=None, max_examples=20)
def test_an_indexers_part_alone(rows, step, kind, form, few, seed):
    """Of every row, or of every other one's query: the bits of the launches that have the latents too."""
    index_heads, indexer = form
    generator = torch.Generator().manual_seed(seed)
    weights = layer(256, indexer, generator)
    query = values(kind, rows, index_heads, GROUP, generator=generator)
    gates, positions = torch.randn(rows * step, index_heads, generator=generator)[::step], torch.randint(POSITIONS, (rows,))
    gates = gates.bfloat16() if weights.index_fused else gates
    unturned = torch.zeros(rows, 1, ROPE, dtype=torch.bfloat16)
    twins = rope_quantise_torch(query, gates, unturned, weights, positions)
    with patch.object(queries, "FEW_ROWS", rows - (not few)):
        launch = turning(index_heads, weights, rows, seed)
        ours = queries.index_queries(query, gates, weights, positions, launch=launch)
    for found, twin in zip(ours, twins, strict=False):
        assert found.shape == twin.shape
        assert same_bits(found, twin)
    key, qkv = values(kind, rows, GROUP, generator=generator), torch.zeros(rows, 256 + LATENT + ROPE, dtype=torch.bfloat16)
    slots = PAGE_SIZE + torch.randperm((PAGES - 1) * PAGE_SIZE, generator=generator)[:rows]
    (kv, wanted), (_, index) = caches(False), caches(False)
    norm_rope_store_torch(qkv, key, weights, positions, slots, kv, wanted, None)
    norms.store_index_keys(key, weights, positions, slots, index, launch=storing(weights, None, seed=seed, kv_fp8=False))
    assert torch.equal(index, wanted)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("q_scales", [None, *Scales])
@pytest.mark.parametrize(("q_rank", "indexer"), [(1536, "halves"), (2048, "neighbours, fused by SGLang")])
def test_norms_and_writes_compile_for_hopper_with_all_in_registers(q_rank, indexer, q_scales, fp8):
    macros = norms.constants(layer(q_rank, indexer, torch.Generator()), q_scales, kv_fp8=fp8)
    cubin, said = compiled(norms.SOURCE, macros)
    assert cubin
    assert "0 bytes spill stores, 0 bytes spill loads" in said


@pytest.mark.parametrize("indexer", INDEXERS)
@pytest.mark.parametrize("rows", [1, 1024])
def test_queries_compile_for_hopper_with_all_in_registers(rows, indexer):
    cubin, said = compiled(
        queries.SOURCE, queries.constants(64, layer(256, indexer, torch.Generator()), queries.lanes_of(rows))
    )
    assert cubin
    assert "0 bytes spill stores, 0 bytes spill loads" in said


def test_an_indexers_part_that_it_would_misread():
    weights = layer(256, "halves", torch.Generator())
    query, gates, positions = torch.zeros(2, 8, GROUP).bfloat16(), torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="query must be of a multiple of 8 heads"):
        queries.index_queries(query[:, :4].contiguous(), gates[:, :4], weights, positions)
    with pytest.raises(ValueError, match=r"gates must be torch\.float32 \[2, 8\]"):
        queries.index_queries(query, gates.bfloat16(), weights, positions)
    with pytest.raises(ValueError, match=r"slots must be torch\.int64"):
        norms.store_index_keys(query[:, 0].contiguous(), weights, positions, positions.int(), caches(False)[1])


@pytest.mark.parametrize("name", ["qkv", "key", "positions", "slots", "kv_cache", "index_cache"])
@pytest.mark.parametrize("change", [lambda x: x.double(), lambda x: x[..., :-1]])
def test_refuses_what_it_would_misread(name, change):
    kv, index = caches(False)
    arguments = {
        "qkv": torch.zeros(2, 256 + LATENT + ROPE, dtype=torch.bfloat16),
        "key": torch.zeros(2, GROUP, dtype=torch.bfloat16),
        "weights": layer(256, "halves", torch.Generator()),
        "positions": torch.zeros(2, dtype=torch.int64),
        "slots": torch.ones(2, dtype=torch.int64),
        "kv_cache": kv,
        "index_cache": index,
        "q_scales": Scales.EXACT,
    }
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=f"{name} must be "):
        norms.norm_rope_store(**arguments)


@pytest.mark.parametrize("change", [lambda x: x.double(), lambda x: x[..., :-1], lambda x: x[..., :-1].contiguous()])
def test_refuses_an_input_that_it_would_misread(change):
    with pytest.raises(ValueError, match="x must be "):
        quantise(change(torch.zeros(2, 2 * GROUP, dtype=torch.bfloat16)), Scales.EXACT)


@pytest.mark.parametrize("change", [lambda x: x.double(), lambda x: x[..., :-1]])
def test_refuses_a_query_that_it_would_misread(change):
    q_rope, positions = torch.zeros(2, 8, ROPE, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="q_rope must be "):
        queries.rope_query(change(q_rope), layer(256, "halves", torch.Generator()), positions)


def test_gates_come_as_sglang_has_them():
    """Where SGLang fuses the indexer its gates are bfloat16, and elsewhere float32."""
    query, q_rope = torch.zeros(1, 8, GROUP, dtype=torch.bfloat16), torch.zeros(1, 8, ROPE, dtype=torch.bfloat16)
    for indexer, (_, fused) in INDEXERS.items():
        gates, weights = torch.zeros(1, 8), layer(256, indexer, torch.Generator())
        positions = torch.zeros(1, dtype=torch.int64)
        with pytest.raises(ValueError, match=r"gates must be torch\.\w+ \[1, 8\]"):
            queries.rope_quantise(query, gates if fused else gates.bfloat16(), q_rope, weights, positions)


def test_sglangs_fused_indexer_rotates_neighbours_alone():
    weights = replace(layer(256, "halves", torch.Generator()), index_fused=True)
    assert "rotate halves" in weights.problem()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 33, 130])
@pytest.mark.parametrize("indexer", INDEXERS)
@pytest.mark.parametrize("fp8_cache", [False, True])
def test_random_rows_on_a_gpu_are_the_twins_but_for_roundings(rows, indexer, fp8_cache):
    """Bits are compared with SGLang's own kernels' in tests/gpu; here checkers of memory can look on."""
    generator = torch.Generator().manual_seed(rows)
    weights = layer(1536, indexer, generator)
    on_gpu = replace(
        weights, **{name: value.cuda() for name, value in vars(weights).items() if isinstance(value, torch.Tensor)}
    )
    given = [
        torch.randn(rows, 1536 + LATENT + ROPE, generator=generator).bfloat16(),
        torch.randn(rows, GROUP, generator=generator).bfloat16(),
        torch.randn(rows, 64, GROUP, generator=generator).bfloat16(),
        torch.randn(rows, 16, 128 + ROPE, generator=generator).bfloat16(),
    ]
    gates = torch.randn(rows, 64, generator=generator)
    gates = gates.bfloat16() if weights.index_fused else gates
    positions = torch.randint(POSITIONS, (rows,), generator=generator)
    slots = PAGE_SIZE + torch.randperm((PAGES - 1) * PAGE_SIZE, generator=generator)[:rows]
    found = []
    for device, of_layer, write, turn in (
        ("cpu", weights, norm_rope_store_torch, rope_quantise_torch),
        ("cuda", on_gpu, norms.norm_rope_store, queries.rope_quantise),
    ):
        qkv, key, query, heads, gate, at, to = (x.to(device) for x in (*given, gates, positions, slots))
        kv, index = (cache.to(device) for cache in caches(fp8_cache))
        q, scales = write(qkv, key, of_layer, at, to, kv, index, Scales.EXACT)
        turned = turn(query, gate, heads[..., 128:], of_layer, at)
        kv = kv.view(torch.float8_e4m3fn)[..., :LATENT] if fp8_cache else kv
        keys = index[:, : PAGE_SIZE * GROUP].view(torch.float8_e4m3fn)
        found.append([x.float().cpu().nan_to_num() for x in (q, scales, kv, keys, *turned)])
    for twin, ours in zip(*found, strict=True):
        assert (ours - twin).norm() <= 0.01 * twin.norm()
