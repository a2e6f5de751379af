"""What only SGLang 0.5.17 to 0.5.23 ask for or offer: classes, models, switches, and batches that know no backend."""

from dataclasses import replace

import pytest
import torch
from batches import static_batch
from sglang.srt.configs import model_config
from sglang.srt.environ import envs
from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend

from nsa_backend.adapters import sglang_types
from nsa_backend.adapters.dsa import refusals as dsa_refusals
from nsa_backend.adapters.installed import adapter
from nsa_backend.adapters.sglang_types import ForwardMode
from nsa_backend.backend import NativeSparseAttnBackend
from nsa_backend.registration import create_backend
from nsa_backend.testing.calls import calls


@pytest.mark.parametrize("name", adapter.BACKEND_NAMES)
def test_ours_passes_checks_of_the_builtin_class(make_runner, name):
    """Draft-extend is captured for the classes that SGLang names; ours is a virtual subclass once a draft backend is built."""
    calls.draft_factory(make_runner(), 3).create_draft_extend_backend()
    assert isinstance(sglang_types.ATTENTION_BACKENDS[name](make_runner()), DeepseekSparseAttnBackend)
    assert not issubclass(DeepseekSparseAttnBackend, NativeSparseAttnBackend)


def test_nothing_of_the_builtin_class_is_inherited():
    """A virtual subclass passes checks; behaviour that it does not know would come with a real one."""
    assert DeepseekSparseAttnBackend not in NativeSparseAttnBackend.__mro__


PROBLEMS = {
    "qk_rope_head_dim": (0, "no RoPE part"),
    "llama_4_scaling": ({"beta": 0.1}, "scaled by position"),
}
if hasattr(model_config, "get_dsa_index_kpool"):
    PROBLEMS["index_kpool"] = (4, "pools keys")


@pytest.mark.parametrize("field", PROBLEMS)
def test_a_model_that_asks_for_more(make_runner, field):
    value, words = PROBLEMS[field]
    runner = make_runner()
    setattr(runner.model_config.hf_config, field, value)
    with pytest.raises(ValueError, match=rf"does not serve DeepseekV32ForCausalLM: .*{words}.*NSA_BACKEND_DISABLE=1"):
        create_backend(runner)


@pytest.mark.parametrize("name", [name for name in dsa_refusals.REFUSED_ENVIRONMENT if hasattr(envs, name)])
def test_a_switch_of_sglang_that_must_be_off(monkeypatch, resolve, name):
    monkeypatch.setenv(name, "1")
    (sentence,) = adapter.environment_problems()
    assert sentence.startswith(f"nsa_backend does not serve {name}=1: ")
    server_args = resolve("--attention-backend", "dsa")
    with pytest.raises(ValueError, match=f"{name}=1"):
        server_args.check_server_args()


def test_some_switch_is_found():
    assert [name for name in dsa_refusals.REFUSED_ENVIRONMENT if hasattr(envs, name)]


def test_a_draft_extend_replay_brings_whole_buffers(make_runner):
    """SGLang slices them for a capture and not for a replay; they begin at the same address."""
    backend, buffers, d = create_backend(make_runner()), static_batch(8, 32, ForwardMode.DRAFT_EXTEND_V2), 4
    backend.init_cuda_graph_state(8, 8 * d)
    of_three = {name: getattr(buffers, name)[:3] for name in ("seq_lens", "req_pool_indices")}
    backend.init_forward_metadata_out_graph(
        replace(buffers, batch_size=3, positions=buffers.positions[: 3 * d], **of_three), in_capture=True
    )
    backend.init_forward_metadata_out_graph(replace(buffers, batch_size=3, positions=buffers.positions[: 3 * d]))
    assert len(backend.forward_metadata.cache_seqlens_int32) == 3


@pytest.mark.parametrize("of_a_round", [False, True])
def test_every_run_of_the_captured_function_launches(make_runner, of_a_round):
    """Two warm-ups and the capture, and nothing before the first of them: the launch must be in the graph."""
    runner, lengths = make_runner(), torch.tensor([7, 9])
    backend = calls.draft_factory(runner, 3).create_decode_backend() if of_a_round else create_backend(runner)
    backend.init_cuda_graph_state(2, 2)
    view = static_batch(2, 2, ForwardMode.DECODE)
    backend.init_forward_metadata_out_graph(view, in_capture=True)
    written = backend.attn_backends[0] if of_a_round else backend
    for run in range(3):
        view.seq_lens.copy_(lengths + run)
        backend.init_forward_metadata_in_graph(view)
        assert written.forward_metadata.cache_seqlens_int32.tolist() == (lengths + run + of_a_round).tolist()


def test_a_batch_size_may_be_captured_again(make_runner):
    """As SGLang does for an elastic group of experts: the last capture counts."""
    backend = create_backend(make_runner())
    backend.init_cuda_graph_state(8, 8)
    for view in (static_batch(2, 2, ForwardMode.DECODE), static_batch(2, 2, ForwardMode.DECODE)):
        backend.init_forward_metadata_out_graph(view, in_capture=True)
        backend.init_forward_metadata_in_graph(view)
        backend.init_forward_metadata_out_graph(view)


@pytest.mark.parametrize("module", ["breakable_cuda_graph.context", "tc_piecewise_cuda_graph"])
def test_prefill_graphs_are_recognised(monkeypatch, module):
    """Their model forward was captured with sparse attention: dense prefill inside one would compute something else."""
    from importlib import import_module

    name = "is_in_breakable_cuda_graph" if module.startswith("breakable") else "is_in_tc_piecewise_cuda_graph"
    monkeypatch.setattr(import_module(f"sglang.srt.model_executor.runner_backend_utils.{module}"), name, lambda: True)
    assert adapter.in_prefill_graph() is True


def test_the_topk_of_pages_is_offered_unless_it_is_switched_off():
    with envs.SGLANG_OPT_USE_TOPK_V2.override(True):
        paged, windowed = adapter.topk_v2()
        assert callable(paged)
        assert windowed is None or callable(windowed)
    with envs.SGLANG_OPT_USE_TOPK_V2.override(False):
        assert adapter.topk_v2() is None


def test_tiles_are_not_scheduled_ahead_where_fa3_is_not_sgl_kernels():
    with envs.SGLANG_USE_SGL_FA3_KERNEL.override(False):
        assert adapter.fa3_scheduler() is None
