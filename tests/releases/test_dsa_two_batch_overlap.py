"""Two-batch overlap: SGLang's own wrapper and splitters around three backends of ours, each of which keeps what it wrote."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from batches import check, fill, forward_batch, random_batch, static_batch
from metadata_reference import Batch
from sglang.srt.batch_overlap import two_batch_overlap
from sglang.srt.batch_overlap.two_batch_overlap import TboForwardBatchPreparer, compute_split_seq_index
from sglang.srt.layers.attention.tbo_backend import TboAttnBackend
from sglang.srt.speculative.eagle_info import EagleVerifyInput

from nsa_backend.adapters.installed import adapter
from nsa_backend.adapters.sglang_types import ForwardMode
from nsa_backend.backend import NativeSparseAttnBackend
from nsa_backend.multi_step import NativeSparseAttnMultiStepBackend
from nsa_backend.registration import create_backend
from nsa_backend.required import check_built
from nsa_backend.testing.calls import calls

D = 4
SIZES = (8, 7, 3, 2, 1)
"""Captured batch sizes: the second halves of 8 and of 7 have as many requests, at other addresses."""


@pytest.fixture
def overlapped(make_runner):
    """Returns (runner, SGLang's wrapper) of a server with --enable-two-batch-overlap."""
    runner = make_runner(num_steps=D - 1)
    calls.publish(D - 1, D, enable_two_batch_overlap=True)
    yield runner, TboAttnBackend.init_new(lambda: create_backend(runner))
    calls.publish(D - 1, D)


def verify_input() -> EagleVerifyInput:
    """What the graph runner captures a verify with."""
    names = ("draft_token", "custom_mask", "positions", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling")
    nothing = dict.fromkeys((*names, "retrieve_cum_len", "seq_lens_sum", "seq_lens_cpu", "capture_hidden_mode"))
    return EagleVerifyInput(**nothing, spec_steps=D - 1, topk=1, draft_token_num=D)


def split(wrapper, batch) -> None:
    """SGLang's split of a batch, without the part that counts tokens on the GPU."""
    per_request = two_batch_overlap.get_token_num_per_seq(batch.forward_mode, batch.spec_info)
    batch.tbo_split_seq_index = compute_split_seq_index(
        batch.forward_mode, batch.input_ids.shape[0], batch.extend_seq_lens_cpu, per_request
    )
    with calls.running(wrapper):
        TboForwardBatchPreparer.prepare_raw(batch, tbo_children_num_token_non_padded=torch.zeros(2, dtype=torch.int32))


def captured_batch(static, requests: int, rows: int):
    """Views of the runner's buffers for one captured size."""
    views = {name: getattr(static, name)[:requests] for name in ("seq_lens", "seq_lens_cpu", "req_pool_indices")}
    tokens = {name: torch.zeros(requests * rows, dtype=torch.int64) for name in ("input_ids", "positions", "out_cache_loc")}
    spec_info = verify_input() if rows > 1 else None
    return replace(static, batch_size=requests, spec_info=spec_info, seq_lens_sum=requests, **views, **tokens)


@pytest.mark.parametrize("mode", ["decode", "target_verify"])
def test_a_captured_batch_and_its_halves(overlapped, mode):
    """All three launches are made before any layer reads: none may write over what another one wrote."""
    runner, wrapper = overlapped
    rows = 1 if mode == "decode" else D
    backends = (wrapper.primary, *wrapper.children)
    static = static_batch(max(SIZES), max(SIZES) * rows, {"decode": ForwardMode.DECODE}.get(mode, ForwardMode.TARGET_VERIFY))
    static.seq_lens_cpu = static.seq_lens.clone()  # SGLang splits a batch on the host
    wrapper.init_cuda_graph_state(max(SIZES), max(SIZES) * rows)
    launches = {}
    for size in SIZES:
        batch = captured_batch(static, size, rows)
        split(wrapper, batch)
        for backend in backends:
            backend.captured.leave()
        wrapper.init_forward_metadata_out_graph(batch, in_capture=True)
        wrapper.init_forward_metadata_in_graph(batch)
        launches[size] = [backend.captured.current for backend in backends]
    for size in reversed(SIZES):
        wanted = random_batch(runner, mode, size, seed=size, num_steps=D - 1)
        whole = captured_batch(static, size, rows)
        fill(whole, wanted)
        whole.seq_lens_cpu.copy_(whole.seq_lens)
        view = SimpleNamespace(**vars(whole) | {"max_seq_len_override": None})
        wrapper.init_forward_metadata_out_graph(view)
        for launch in filter(None, launches[size]):
            wrapper.primary.writer.write(launch.plan, launch.buffers, launch.inputs)
        half = size // 2
        parts = (slice(None), slice(None, half), slice(half, None))
        for backend, launch, part in zip(backends, launches[size], parts, strict=True):
            assert (launch is None) == (not wanted.seq_lens[part])
            if launch is not None:
                check(backend.forward_metadata, replace(wanted, seq_lens=wanted.seq_lens[part], slots=wanted.slots[part]))


@pytest.mark.parametrize("new", [[300], [40, 300, 8], [30, 30, 31]])
def test_the_halves_of_a_prefill_are_its_rows(overlapped, monkeypatch, new):
    """Also where SGLang cuts one prompt in two, whose second half attends to the first."""
    monkeypatch.setattr(two_batch_overlap, "get_device", lambda: SimpleNamespace(device="cpu"))
    runner, wrapper = overlapped
    prefix = [70, 0, 5][: len(new)]
    lengths = [a + b for a, b in zip(prefix, new, strict=True)]
    table = runner.req_to_token_pool.req_to_token
    batch = forward_batch(Batch("decode", lengths, [5, 9, 2][: len(new)], table.numpy(), 64, 0), ForwardMode.EXTEND)
    batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu, batch.extend_num_tokens = new, prefix, sum(new)
    batch.extend_seq_lens, batch.extend_prefix_lens = torch.tensor(new), torch.tensor(prefix)
    batch.extend_start_loc = torch.tensor([sum(new[:i]) for i in range(len(new))])
    batch.input_ids = batch.positions = batch.out_cache_loc = torch.zeros(sum(new), dtype=torch.int64)
    split(wrapper, batch)
    wrapper.init_forward_metadata(batch)

    def rows(backend) -> list[tuple[int, list[int]]]:
        """(length, the pages that it reaches) of every row."""
        m = backend.forward_metadata
        pages = m.real_page_table[m.token_to_batch_idx.long()]
        return [(n, row[: -(-n // 64)].tolist()) for n, row in zip(m.nsa_seqlens_expanded.tolist(), pages, strict=True)]

    halves = [rows(child) for child in wrapper.children]
    assert all(halves)
    assert halves[0] + halves[1] == rows(wrapper.primary)


def test_what_serves_is_ours_and_the_option_is_read(overlapped, make_runner):
    runner, wrapper = overlapped
    assert adapter.settings(runner).overlaps_batches
    check_built("target model", wrapper, (NativeSparseAttnBackend, NativeSparseAttnMultiStepBackend))
    with pytest.raises(ValueError, match="NativeSparseAttnBackend serves the target model"):
        check_built("target model", wrapper, (NativeSparseAttnMultiStepBackend,))
    runner.is_draft_worker = True  # SGLang splits none of its batches, so its graphs share as ever
    assert not create_backend(runner).config.overlapped
