"""The earlier generations of SGLang's metadata, which `bench metadata` drives on 0.5.12.post1, still call what it has."""

import inspect

from sglang.srt.layers.attention import nsa_backend as builtin

from nsa_backend.benchmarks.calls import builtin_replay


def test_the_earlier_generations_call_what_the_release_has():
    """SGLang's own loop, read in its source, makes the same two calls with the same arguments."""
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
