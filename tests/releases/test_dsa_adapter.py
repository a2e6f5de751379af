"""What only SGLang 0.5.17 to 0.5.23 ask for or offer: classes, models, switches, and batches that know no backend."""

from types import SimpleNamespace

import pytest
import torch
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


def static(requests: int) -> SimpleNamespace:
    """A draft-extend runner's buffers, larger than the captured batch."""
    return SimpleNamespace(
        seq_lens=torch.ones(8, dtype=torch.int64), req_pool_indices=torch.zeros(8, dtype=torch.int64), requests=requests
    )


def test_a_draft_extend_replay_brings_whole_buffers(make_runner):
    """SGLang slices them for a capture and not for a replay; they begin at the same address."""
    backend, buffers, d = create_backend(make_runner()), static(3), 4
    backend.init_cuda_graph_state(8, 8 * d)
    view = SimpleNamespace(
        batch_size=3,
        forward_mode=ForwardMode.DRAFT_EXTEND_V2,
        seq_lens=buffers.seq_lens[:3],
        req_pool_indices=buffers.req_pool_indices[:3],
        positions=torch.zeros(3 * d),
    )
    backend.init_forward_metadata_out_graph(view, in_capture=True)
    whole = SimpleNamespace(**vars(view) | {"seq_lens": buffers.seq_lens, "req_pool_indices": buffers.req_pool_indices})
    backend.init_forward_metadata_out_graph(whole)
    assert len(backend.forward_metadata.cache_seqlens_int32) == 3


@pytest.mark.parametrize("of_a_round", [False, True])
def test_every_run_of_the_captured_function_launches(make_runner, of_a_round):
    """Two warm-ups and the capture, and nothing before the first of them: the launch must be in the graph."""
    runner, lengths = make_runner(), torch.tensor([7, 9])
    backend = calls.draft_factory(runner, 3).create_decode_backend() if of_a_round else create_backend(runner)
    backend.init_cuda_graph_state(2, 2)
    view = SimpleNamespace(
        batch_size=2,
        forward_mode=ForwardMode.DECODE,
        seq_lens=torch.ones(2, dtype=torch.int64),
        req_pool_indices=torch.tensor([1, 2]),
        positions=torch.zeros(2),
    )
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
    for buffers in (static(2), static(2)):
        view = SimpleNamespace(
            batch_size=2,
            forward_mode=ForwardMode.DECODE,
            seq_lens=buffers.seq_lens[:2],
            req_pool_indices=buffers.req_pool_indices[:2],
            positions=torch.zeros(2),
        )
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
