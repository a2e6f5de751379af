"""Every host method that we implement or call, bound against the installed SGLang."""

import inspect
from dataclasses import fields

import pytest
import torch

from nsa_backend import host
from nsa_backend.backend import NativeSparseAttnBackend
from nsa_backend.indexer import IndexerMetadata
from nsa_backend.multi_step import NativeSparseAttnMultiStepBackend
from nsa_backend.refusals import RULES

X = object()


def builtin():
    from sglang.srt.layers.attention import nsa_backend

    return nsa_backend


@pytest.mark.parametrize(
    "method",
    [
        "init_forward_metadata",
        "init_cuda_graph_state",
        "init_forward_metadata_capture_cuda_graph",
        "init_forward_metadata_replay_cuda_graph",
        "get_cuda_graph_seq_len_fill_value",
        "get_indexer_metadata",
    ],
)
def test_backend_takes_what_the_builtin_takes(method):
    ours = inspect.signature(getattr(NativeSparseAttnBackend, method)).parameters
    theirs = inspect.signature(getattr(builtin().NativeSparseAttnBackend, method)).parameters
    assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in theirs.values()]


@pytest.mark.parametrize(
    "method",
    [
        "__init__",
        "init_forward_metadata",
        "init_cuda_graph_state",
        "init_forward_metadata_capture_cuda_graph",
        "init_forward_metadata_replay_cuda_graph",
    ],
)
def test_multi_step_takes_what_the_builtin_takes(method):
    ours = inspect.signature(getattr(NativeSparseAttnMultiStepBackend, method)).parameters
    theirs = inspect.signature(getattr(builtin().NativeSparseAttnMultiStepBackend, method)).parameters
    assert list(ours) == list(theirs)


@pytest.mark.parametrize("method", ["forward_decode", "forward_extend"])
def test_forward_takes_every_argument_of_the_builtin(method):
    theirs = inspect.signature(getattr(builtin().NativeSparseAttnBackend, method)).parameters
    inspect.signature(getattr(NativeSparseAttnBackend, method)).bind(**dict.fromkeys(theirs, X))


def test_every_method_of_the_base_class_keeps_its_parameters():
    for name, theirs in inspect.getmembers(host.AttentionBackend, inspect.isfunction):
        ours = getattr(NativeSparseAttnBackend, name)
        if name.startswith("_") or ours is theirs:
            continue
        wanted = [p for p in inspect.signature(theirs).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        inspect.signature(ours).bind(**{p.name: X for p in wanted})


def test_indexer_metadata_is_complete():
    assert not IndexerMetadata.__abstractmethods__
    ours = inspect.signature(IndexerMetadata.topk_transform).parameters
    assert list(ours) == list(inspect.signature(builtin().NSAIndexerMetadata.topk_transform).parameters)
    for name, _ in inspect.getmembers(host.BaseIndexerMetadata, inspect.isfunction):
        assert name in vars(IndexerMetadata), name


def test_indexer_reads_only_fields_that_exist():
    """SGLang's indexer reaches through `attn_metadata` for one field when it cuts a prefill into chunks."""
    from sglang.srt.layers.attention.nsa import nsa_indexer

    from nsa_backend.metadata import NSAMetadata

    source = inspect.getsource(nsa_indexer)
    read = {part.split(maxsplit=1)[0].strip("().,:[]") for part in source.split("attn_metadata.")[1:]}
    assert {name.split("\n")[0] for name in read} <= {f.name for f in fields(NSAMetadata)}


def test_pool_and_runner_calls():
    from sglang.srt.mem_cache.memory_pool import NSATokenToKVPool
    from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import EAGLEDraftExtendCudaGraphRunner

    inspect.signature(NSATokenToKVPool.set_mla_kv_buffer).bind(X, X, X, X, X)
    inspect.signature(NSATokenToKVPool.get_key_buffer).bind(X, 0)
    inspect.signature(EAGLEDraftExtendCudaGraphRunner.__init__).bind(X, X)
    inspect.signature(host.dequantize_k_cache_paged).bind(X, X)
    inspect.signature(host.mla_quantize_and_rope_for_fp8).bind(*[X] * 9)
    inspect.signature(host.ForwardBatch.get_max_chunk_capacity).bind(X)


def test_hooked_methods_have_the_signatures_that_the_hooks_expect():
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative import eagle_worker, eagle_worker_v2

    for worker in (eagle_worker_v2.EagleDraftWorker, eagle_worker.EAGLEWorker):
        assert list(inspect.signature(worker.draft_forward).parameters) == ["self", "forward_batch"]
        assert list(inspect.signature(worker.init_cuda_graphs).parameters) == ["self"]
    assert list(inspect.signature(ServerArgs.check_server_args).parameters) == ["self"]
    for method in ("_create_nsa_decode_backend", "_create_nsa_prefill_backend"):
        assert list(inspect.signature(getattr(host.DraftBackendFactory, method)).parameters) == ["self"]


def test_server_args_have_every_attribute_that_is_read():
    from sglang.srt.server_args import ServerArgs

    names = {f.name for f in fields(ServerArgs)}
    read = {rule.attribute for rule in RULES} | {"speculative_num_draft_tokens"}
    assert read <= names
    assert callable(ServerArgs.get_attention_backends)


def test_deep_gemm_header_still_has_the_rule_that_the_schedule_follows():
    """The rule lives in a header of the installed package; the GPU test compares with its result bit for bit."""
    from importlib.util import find_spec
    from pathlib import Path

    root = Path(find_spec("deep_gemm").submodule_search_locations[0])
    rule = (root / "include/deep_gemm/scheduler/paged_mqa_logits.cuh").read_text()
    for line in ("sm_idx * q + min(sm_idx, r)", "math::ceil_div(context_len, SPLIT_KV)", "<= seg_starts"):
        assert line in rule


def test_forward_batch_fields():
    names = {f.name for f in fields(host.ForwardBatch)}
    read = {
        "batch_size", "forward_mode", "seq_lens", "seq_lens_cpu", "req_pool_indices", "extend_seq_lens", "extend_seq_lens_cpu",
        "out_cache_loc", "token_to_kv_pool", "attn_backend", "spec_info",
    }  # fmt: skip
    assert read <= names
    assert torch.is_tensor(host.ForwardBatch(
        forward_mode=host.ForwardMode.DECODE, batch_size=1, input_ids=None, req_pool_indices=None,
        seq_lens=torch.ones(1), out_cache_loc=None, seq_lens_sum=1,
    ).seq_lens)  # fmt: skip
