"""SGLang 0.5.12 and 0.5.12.post1: parameters are the built-in backend's to the name, and what only they have is there."""

import inspect
from dataclasses import fields

import pytest
from sglang.srt.layers.attention import nsa_backend as builtin
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative import eagle_worker, eagle_worker_v2

from nsa_backend.adapters import sglang_types
from nsa_backend.backend import NativeSparseAttnBackend
from nsa_backend.benchmarks.calls import builtin_replay
from nsa_backend.multi_step import NativeSparseAttnMultiStepBackend

X = object()


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
    theirs = inspect.signature(getattr(builtin.NativeSparseAttnBackend, method)).parameters
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
    theirs = inspect.signature(getattr(builtin.NativeSparseAttnMultiStepBackend, method)).parameters
    # what only we pass is by keyword, and need not be given
    added = [p for p in ours.values() if p.kind is inspect.Parameter.KEYWORD_ONLY and p.name not in theirs]
    assert all(p.default is not inspect.Parameter.empty for p in added)
    assert [name for name in ours if name not in {p.name for p in added}] == list(theirs)


@pytest.mark.parametrize("method", ["forward_decode", "forward_extend"])
def test_forward_takes_every_argument_of_the_builtin(method):
    theirs = inspect.signature(getattr(builtin.NativeSparseAttnBackend, method)).parameters
    inspect.signature(getattr(NativeSparseAttnBackend, method)).bind(**dict.fromkeys(theirs, X))


def test_hooked_methods_have_the_signatures_that_the_hooks_expect():
    for worker in (eagle_worker_v2.EagleDraftWorker, eagle_worker.EAGLEWorker):
        assert list(inspect.signature(worker.draft_forward).parameters) == ["self", "forward_batch"]
        assert list(inspect.signature(worker.init_cuda_graphs).parameters) == ["self"]


def test_server_args_say_which_backends_serve():
    assert list(inspect.signature(ServerArgs.get_attention_backends).parameters) == ["self"]


def test_a_batch_knows_its_pool_and_its_backend():
    assert {"token_to_kv_pool", "attn_backend"} <= {f.name for f in fields(sglang_types.ForwardBatch)}


def test_the_earlier_generations_call_what_the_release_has():
    """`bench metadata` makes the two calls of SGLang's own loop, with the same arguments."""
    loop = inspect.getsource(builtin.NativeSparseAttnMultiStepBackend.init_forward_metadata_replay_cuda_graph)
    ours = inspect.getsource(builtin_replay.precompute)
    for method in ("_precompute_replay_metadata", "init_forward_metadata_replay_cuda_graph_from_precomputed"):
        parameters = set(inspect.signature(getattr(builtin.NativeSparseAttnBackend, method)).parameters) - {"self"}
        assert method in loop
        assert method in ours
        for name in parameters:
            assert f"{name}=" in ours, name
    assert "SGLANG_NSA_ENABLE_MTP_PRECOMPUTE_METADATA" in loop
    assert builtin._USE_FUSED_METADATA_COPY in (True, False)
