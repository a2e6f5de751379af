"""What SGLang asks of a backend: methods with their parameters, and attributes that it reads."""

import inspect

import pytest
from installed_source import attributes_read, trees

from nsa_backend.adapters import sglang_types
from nsa_backend.adapters.installed import adapter
from nsa_backend.backend import NativeSparseAttnBackend
from nsa_backend.indexer.metadata import IndexerMetadata
from nsa_backend.metadata.views import NSAMetadata
from nsa_backend.multi_step import NativeSparseAttnMultiStepBackend
from nsa_backend.registration import create_backend
from nsa_backend.testing.calls import calls

X = object()
OWN_NAME = adapter.BACKEND_NAMES[0]  # of the generation: the built-in backend's modules and methods are named after it


def builtin():
    """The module of SGLang's own backend; its import has been found to need no GPU in any release so far."""
    from importlib import import_module

    return import_module(f"sglang.srt.layers.attention.{OWN_NAME}_backend")


def builtin_class(kind: str) -> type:
    return getattr(builtin(), f"{'DeepseekSparse' if OWN_NAME == 'dsa' else 'NativeSparse'}Attn{kind}")


def takes(ours, theirs, by_position: int | None = None) -> None:
    """`ours` can be called as `theirs` is, by position and by keyword, with and without what has a default.

    Args:
        by_position: how many arguments SGLang passes by position, where it passes the rest by keyword.
    """
    wanted = [p for p in inspect.signature(theirs).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    inspect.signature(ours).bind(*[X for _ in wanted[:by_position]])
    inspect.signature(ours).bind(**{p.name: X for p in wanted})
    inspect.signature(ours).bind(*[X for p in wanted if p.default is p.empty])


METHODS = [
    name
    for name, theirs in inspect.getmembers(sglang_types.AttentionBackend, inspect.isfunction)
    if not name.startswith("_") and getattr(NativeSparseAttnBackend, name) is not theirs
]


@pytest.mark.parametrize("method", METHODS)
def test_a_method_takes_what_the_base_class_takes(method):
    theirs = getattr(sglang_types.AttentionBackend, method)
    ours = getattr(NativeSparseAttnBackend, method)
    if method.startswith("forward_"):  # the base class leaves MLA's arguments, after these seven, to `kwargs`
        takes(ours, getattr(builtin_class("Backend"), method), by_position=7)
    else:
        takes(ours, theirs)


@pytest.mark.parametrize("method", ["forward_decode", "forward_extend"])
def test_every_argument_of_mla_is_known(method):
    """`forward_decode` and `forward_extend` pass on what they are given: an unknown argument would stop the first forward."""
    _, *arguments = list(inspect.signature(getattr(builtin_class("Backend"), method)).parameters)[6:]
    assert set(arguments) <= set(inspect.signature(NativeSparseAttnBackend._forward_sparse).parameters)


def test_the_methods_that_a_backend_cannot_do_without_are_ours():
    base = {"init_forward_metadata", "init_cuda_graph_state", "get_cuda_graph_seq_len_fill_value", "get_indexer_metadata"}
    base |= {"forward_decode", "forward_extend", "update_verify_buffers_to_fill_after_draft"}
    around_a_graph = {
        name for name in dir(sglang_types.AttentionBackend) if name.startswith("init_forward_metadata_") and "graph" in name
    }
    served = {name for name in around_a_graph if "cpu" not in name and "breakable" not in name}
    assert len(served) == 2  # before a graph and inside it, or before a capture and before a replay
    assert base | served <= set(METHODS)


MULTI_STEP_METHODS = [
    name
    for name, _ in inspect.getmembers(builtin_class("MultiStepBackend"), inspect.isfunction)
    if name.startswith("init_") or name == "__init__"
]


@pytest.mark.parametrize("method", MULTI_STEP_METHODS)
def test_the_multi_step_backend_takes_what_the_builtin_takes(method):
    theirs = getattr(builtin_class("MultiStepBackend"), method)
    ours = getattr(NativeSparseAttnMultiStepBackend, method)
    if method == "__init__":  # called by ours alone: SGLang's factory is told what to build
        inspect.signature(ours).bind(X, X, 1, 3)
    else:
        takes(ours, theirs)


def test_the_indexer_metadata_is_complete():
    assert not IndexerMetadata.__abstractmethods__
    takes(IndexerMetadata.topk_transform, getattr(builtin(), f"{OWN_NAME.upper()}IndexerMetadata").topk_transform)
    for name, theirs in inspect.getmembers(adapter.BaseIndexerMetadata, inspect.isfunction):
        takes(getattr(IndexerMetadata, name), theirs)
    inherited = {
        n for n, _ in inspect.getmembers(adapter.BaseIndexerMetadata, inspect.isfunction) if n not in vars(IndexerMetadata)
    }
    assert inherited <= {"get_logical_page_table"}  # the page table itself, unless pages are virtual


def test_the_base_class_has_the_extend_lengths_that_the_indexer_asks_for():
    assert f"get_{OWN_NAME}_extend_len_cpu" in vars(adapter.BaseIndexerMetadata)
    assert f"get_{OWN_NAME}_extend_len_cpu" in vars(IndexerMetadata)


INDEXER = f"layers/attention/{OWN_NAME}/{OWN_NAME}_indexer.py"
OTHER_DEVICES = {"block_tables", "seq_lens", "seq_lens_cpu_int", "actual_seq_lengths_q"}
CONTEXT_PARALLEL = ("actual_seq_q_", "kv_len_", "actual_seq_lengths_kv")


def test_the_indexer_reads_what_exists():
    """Of the metadata, and through `attn_metadata` of ours where it cuts a prefill into chunks."""
    ((_, tree),) = trees(INDEXER)
    backend = set(dir(IndexerMetadata)) | set(IndexerMetadata.__dataclass_fields__)
    read = attributes_read(tree, {"metadata"}) - OTHER_DEVICES
    assert {name for name in read if not name.startswith(CONTEXT_PARALLEL)} <= backend
    assert "topk_transform" in read
    assert attributes_read(tree, {"attn_metadata"}) <= set(NSAMetadata.__dataclass_fields__)


READERS = (
    "layers/radix_attention.py",
    "layers/attention/nsa/nsa_indexer.py",
    "layers/attention/dsa/dsa_indexer.py",
    "layers/attention/dsa/dsa_prefill_cuda_graph.py",
    "layers/attention/index_topk_share.py",
    "layers/cp/*.py",
    "managers/*.py",
    "model_executor/*.py",
    "model_executor/model_runner_components/*.py",
    "model_executor/runner/*.py",
    "models/deepseek_v2.py",
    "models/deepseek_common/attention_backend_handler.py",
    "models/deepseek_common/attention_forward_methods/forward_mha.py",
    "models/deepseek_common/attention_forward_methods/forward_mla.py",
    "speculative/draft_utils.py",
    "speculative/eagle_*.py",
)
"""Files of SGLang through which our backend's forwards, captures and replays go."""

HOLDERS = {"attn_backend", "draft_attn_backend", "draft_extend_attn_backend", "target_attn_backend", "get_attn_backend"}

OF_OTHERS = {
    "children",  # two-batch overlap, which is refused
    "data_type",  # trtllm_mla
    "enable_early_verify_metadata",  # DeepSeek-V4's, with the glue graph, which is refused
    "get_cpu_graph_seq_len_fill_value",
    "init_cpu_graph_state",
    "init_forward_metadata_capture_cpu_graph",
    "speculative_num_draft_tokens",  # Ascend
    "tail_forward_metadata",  # encoders with sliding windows
    "update_mamba_state_after_mtp_verify",
}
"""What those files read from backends of other models and devices."""


def test_every_attribute_that_sglang_reads_from_a_backend_exists(make_runner):
    ours = create_backend(make_runner())
    multi_step = calls.draft_factory(make_runner(), 3).create_decode_backend()
    backends = (ours, multi_step, *multi_step.attn_backends)
    missing = {}
    for path, tree in trees(*READERS):
        for name in attributes_read(tree, HOLDERS) - OF_OTHERS:
            if not any(hasattr(backend, name) for backend in backends):
                missing.setdefault(name, []).append(path)
    assert not missing


@pytest.mark.parametrize("name", ["token_to_kv_pool", "req_to_token_pool", "kv_cache_dtype", "max_context_len", "use_mha"])
def test_what_models_read_through_the_forward_context(make_runner, name):
    """Per-step backends too: each is the backend of a forward of its own."""
    runner = make_runner()
    multi_step = calls.draft_factory(runner, 3).create_decode_backend()
    for backend in (create_backend(runner), *multi_step.attn_backends):
        assert getattr(backend, name) is not None
    assert create_backend(runner).token_to_kv_pool is runner.token_to_kv_pool


def test_sglang_leaves_lengths_off_the_host_where_all_backends_allow_it(make_runner):
    if "needs_cpu_seq_lens" in vars(sglang_types.AttentionBackend):
        multi_step = calls.draft_factory(make_runner(), 3).create_decode_backend()
        assert not any(b.needs_cpu_seq_lens for b in (create_backend(make_runner()), multi_step, *multi_step.attn_backends))


@pytest.mark.parametrize("name", ["primary", "full_attn_backend", "prefill_backend", "q8kv8_born_fp8_q_eligible"])
def test_nothing_of_ours_has_a_name_that_sglang_takes_for_a_wrapper(make_runner, name):
    """SGLang unwraps hybrid backends by such attributes, and switches kernels on by the last one."""
    assert not hasattr(create_backend(make_runner()), name)
