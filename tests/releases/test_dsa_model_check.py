"""What only SGLang 0.5.17 to 0.5.23 know of in a checkpoint or in prefill graphs, refused before any weight is loaded."""

import inspect

import pytest
from server_words import OWN, SPECULATIVE

from nsa_backend.adapters.installed import adapter

PROBLEMS = {"llama_4_scaling": ({"beta": 0.1}, "scaled by position")}


@pytest.mark.parametrize("field", PROBLEMS)
@pytest.mark.parametrize("of_the_draft", [False, True])
def test_a_model_that_asks_for_more(resolve, checkpoint, field, of_the_draft):
    value, words = PROBLEMS[field]
    bad, good = checkpoint("bad", **{field: value}), checkpoint("good")
    target, draft = (good, bad) if of_the_draft else (bad, good)
    server_args = resolve("--model-path", target, *OWN, *SPECULATIVE, "--speculative-draft-model-path", draft)
    with pytest.raises(ValueError, match=rf"nsa_backend does not serve \w+: .*{words}.*NSA_BACKEND_DISABLE=1"):
        server_args.check_server_args()


@pytest.mark.parametrize("backend", ["full", "breakable", "disabled"])
def test_decode_in_a_graph_that_breaks(resolve, backend):
    """SGLang's indexer then has no metadata and reads it, in its own backend as in ours: see the next test."""
    server_args = resolve(*OWN, "--cuda-graph-backend-decode", backend)
    assert adapter.resolved(server_args).cuda_graph_config.decode.backend == backend
    if backend != "breakable":
        server_args.check_server_args()
        return
    with pytest.raises(ValueError, match=r"does not serve --cuda-graph-backend-decode breakable: .* pass .* full$"):
        server_args.check_server_args()


def test_sglangs_indexer_still_reads_metadata_that_it_does_not_ask_for():
    """Should a release mend it, the refusals of breakable decode graphs and of --debug-cuda-graph can go."""
    from sglang.srt.layers.attention.dsa import dsa_indexer

    source = inspect.getsource(dsa_indexer.Indexer.forward_cuda)
    asks, unasked = source.index("if not in_piecewise_or_breakable_cuda_graph:"), source.index("metadata = None")
    assert asks < source.index("get_indexer_metadata(layer_id, forward_batch)") < unasked < source.index("_get_topk_paged(")
    paged = inspect.getsource(dsa_indexer.Indexer._get_topk_paged)
    assert "metadata.get_page_table_64()" in paged
    assert "breakable" not in paged


@pytest.mark.parametrize("backend", ["full", "breakable", "disabled"])
def test_a_prefill_in_one_graph(resolve, backend):
    server_args = resolve(*OWN, "--cuda-graph-backend-prefill", backend)
    if adapter.resolved(server_args).cuda_graph_config.prefill.backend != "full":
        server_args.check_server_args()
        assert backend != "full"
        return
    with pytest.raises(ValueError, match=r"does not serve --cuda-graph-backend-prefill full: .* pass .* breakable"):
        server_args.check_server_args()
