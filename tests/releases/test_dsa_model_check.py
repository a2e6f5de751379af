"""What only SGLang 0.5.17 to 0.5.23 know of in a checkpoint or in prefill graphs, refused before any weight is loaded."""

import pytest

from nsa_backend.adapters.installed import adapter

SPECULATIVE = [
    *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
]
OWN = ("--attention-backend", adapter.BACKEND_NAMES[0])


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
def test_a_prefill_in_one_graph(resolve, backend):
    server_args = resolve(*OWN, "--cuda-graph-backend-prefill", backend)
    if adapter.resolved(server_args).cuda_graph_config.prefill.backend != "full":
        server_args.check_server_args()
        assert backend != "full"
        return
    with pytest.raises(ValueError, match=r"does not serve --cuda-graph-backend-prefill full: pass .* breakable"):
        server_args.check_server_args()
