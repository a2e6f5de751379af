"""`--warmups round_graphs`: rounds in one graph are captured before a server says that it is ready.

Without it greedy rounds are captured in SGLang's own warm-up request, where that has rounds enough, and those of other kinds
while their first requests run, which wait for it.
"""

from __future__ import annotations

import asyncio
import logging
from itertools import product
from typing import Any

from nsa_backend.adapters.dsa.rounds.kinds import Kind
from nsa_backend.adapters.dsa.rounds.release import dp_ranks_and_draft_tokens
from nsa_backend.adapters.dsa.rounds.rule import SWITCH
from nsa_backend.adapters.naive_eagle import is_marked
from nsa_backend.environment import switched_on
from nsa_backend.releases import ROUND_WARM_UP

logger = logging.getLogger(__name__)

PROMPT = [10, 11, 12, 13]
ROUNDS = 6
"""Of each request: drafts that share a selection have none in their first round, the next one of its kind compiles what SGLang
launches between its graphs, the third captures, and the others are one graph."""


def offer() -> None:
    """Put the warm-up among SGLang's, for servers that are started with its name."""
    from sglang.srt.entrypoints.warmup import warmup

    warmup(ROUND_WARM_UP)(capture_rounds)


async def capture_rounds(disaggregation_mode: str, tokenizer_manager: Any) -> None:
    """Let every rank of DP attention, or every replica, run rounds of a request of its own, all of them at once, of each kind.

    Args:
        disaggregation_mode: SGLang's: null, prefill or decode. The decode server of a pair is sent requests whose KV nobody
            computes, as SGLang's own warm-up sends; the prefill server has no rounds.
        tokenizer_manager: SGLang's.

    Raises:
        ValueError: the server refuses such a request, as where its context is shorter.
    """
    ranks, draft_tokens = dp_ranks_and_draft_tokens(tokenizer_manager)
    if disaggregation_mode == "prefill" or not draft_tokens:
        logger.info("nsa_backend: --warmups %s does nothing, because this server has no speculative rounds", ROUND_WARM_UP)
        return
    asked = switched_on(SWITCH) or is_marked(tokenizer_manager.server_args)
    logprobs = (False, True) if asked else (False,)
    for kind in (Kind(*both) for both in product((False, True), logprobs)):
        requests = (_request(rank, kind, draft_tokens, disaggregation_mode) for rank in range(ranks))
        await asyncio.gather(*(_answered(tokenizer_manager, request) for request in requests))


def _request(rank: int, kind: Kind, draft_tokens: int, disaggregation_mode: str) -> Any:
    """A request that has `ROUNDS` rounds even where every draft is accepted; its prefill gives the first token."""
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
    from sglang.srt.managers.io_struct import GenerateReqInput

    sampling = {"temperature": float(kind.sampled), "max_new_tokens": 1 + ROUNDS * draft_tokens, "ignore_eos": True}
    asks = {"sampling_params": sampling, "return_logprob": kind.logprobs}
    request = GenerateReqInput(input_ids=list(PROMPT), routed_dp_rank=rank, **asks)
    if disaggregation_mode != "null":
        request.bootstrap_host, request.bootstrap_room = FAKE_BOOTSTRAP_HOST, rank
    return request


async def _answered(tokenizer_manager: Any, request: Any) -> None:
    async for _ in tokenizer_manager.generate_request(request, None):
        pass
