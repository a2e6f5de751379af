"""Whole rounds on the decode server of a pair: requests come from SGLang's own transfer into the FutureMap between rounds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from properties import tried
from round_sides import Side, of_a_pair, same
from round_stand_in import HIDDEN, POOL, SELECTED, VOCABULARY, decode_batch
from sglang.srt.speculative import eagle_disaggregation

from nsa_backend.refusals import refusals

ARRIVALS = st.lists(
    st.tuples(
        st.lists(st.integers(1, POOL - 1), max_size=3, unique=True),  # rows whose request the prefill server has finished
        st.lists(st.integers(1, POOL - 1), min_size=1, max_size=6, unique=True),  # rows that decode then, as far as they came
    ),
    min_size=2,
    max_size=10,
)


@pytest.fixture(scope="module", autouse=True)
def sglang():
    with pytest.MonkeyPatch.context() as patch:
        of_a_pair(patch)
        yield


def arrive(side: Side, rows: list[int], seed: int, shared: bool) -> None:
    """What the decode server's scheduler does with requests that the prefill server has finished."""
    drawn = torch.Generator().manual_seed(seed)
    reqs = [
        SimpleNamespace(
            output_topk_p=[1.0],
            output_topk_index=torch.randint(0, VOCABULARY, (1,), generator=drawn).tolist(),
            hidden_states_tensor=torch.randint(0, 50, (HIDDEN,), generator=drawn).float(),
            output_dsa_topk_indices=torch.randint(0, 99, (SELECTED,), generator=drawn, dtype=torch.int32) if shared else None,
        )
        for _ in rows
    ]
    batch = SimpleNamespace(
        reqs=reqs,
        device="cpu",
        enable_overlap=True,
        req_pool_indices=torch.tensor(rows),
        seq_lens=torch.randint(1, 5000, (len(rows),), generator=drawn),
        model_config=SimpleNamespace(hf_config=None),
    )
    last = torch.randint(0, VOCABULARY, (len(rows),), generator=drawn)
    eagle_disaggregation.build_eagle_disagg_draft_input(batch, last, side.future_map)


@pytest.mark.parametrize("shared", [False, True])
@given(rounds=ARRIVALS)
@tried(30)
def test_requests_that_arrive_between_rounds(shared, rounds):
    """Some of them in rows that others have just left; the same tokens, and the same left for the next round."""
    sides = Side(with_graphs=False), Side(with_graphs=True)
    for side in sides:
        side.worker.draft_worker.seed_dsa_topk_from_draft_extend = shared
    there: set[int] = set()
    decoded = 0
    for seed, (rows, wanted) in enumerate(rounds):
        if rows:
            for side in sides:
                arrive(side, rows, seed, shared)
            there |= set(rows)
        slots = [row for row in wanted if row in there]
        if not slots:
            continue
        theirs, ours = (side.run(decode_batch(slots, shared=shared)()) for side in sides)
        same(ours, theirs, len(slots))
        decoded += 1
        kept = sorted(there)
        for name in ("output_tokens_buf", "topk_p_buf", "topk_index_buf", "hidden_states_buf", "new_seq_lens_buf"):
            assert torch.equal(*(getattr(side.future_map, name)[kept] for side in sides)), name
    assert sides[1].replays == decoded


def test_a_prefill_server_has_no_rounds_and_is_not_refused_for_them(arguments, monkeypatch, caplog):
    """Both servers of a pair are often started with one environment."""
    from nsa_backend.adapters.dsa.rounds.served import has_rounds
    from nsa_backend.adapters.installed import adapter

    caplog.set_level("INFO")
    monkeypatch.delenv("NSA_BACKEND_CHECK", raising=False)
    prefill, decode = (arguments(speculative_algorithm="EAGLE", disaggregation_mode=mode) for mode in ("prefill", "decode"))
    prefill.enable_lora = True
    assert has_rounds(decode, ("dsa", "dsa"), adapter.BACKEND_NAMES)
    assert not has_rounds(prefill, ("dsa", "dsa"), adapter.BACKEND_NAMES)
    assert not caplog.messages
    monkeypatch.setenv("NSA_BACKEND_ROUND_GRAPH", "1")
    assert refusals(decode) == refusals(prefill) == []
