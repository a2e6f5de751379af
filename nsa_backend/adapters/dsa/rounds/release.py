"""What SGLang's worker, scheduler and batches call the things that whole rounds touch, release by release."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from sglang.srt.runtime_context import get_parallel, get_spec

from nsa_backend.releases import ROUND_GRAPHS, installed


@dataclass(frozen=True)
class RoundNames:
    """Names of one release."""

    last_reader: str  # of a worker: the runner whose event the scheduler waits for before it writes what rounds read
    reads_done: str  # of a runner: that event, or None for the whole forward
    free: frozenset[str] = frozenset()  # options of `rule` that may have any value
    unseen: frozenset[str] = frozenset()  # the same of options that no GPU run has had: one graph where it is asked for
    lacks: frozenset[str] = frozenset()  # marks of a batch whose feature the release does not have
    counts_in_kv: bool = False  # whether a request's `kv` says how far its slots reach and are written, which `pages` reads
    samples_alike: bool = False  # whether sampled rounds were seen to sample alike on a GPU: they are one graph by default

    @property
    def has_ranks(self) -> bool:
        """Whether rounds of DP attention can be one graph."""
        return "attn_dp_size" in self.free

    def wait_for_all_after(self, runner: Any) -> None:
        """Let the scheduler wait for the whole forward of this runner, and for no event inside it."""
        setattr(runner, self.reads_done, None)

    def mark(self, holder: Any, name: str) -> Any:
        """An attribute by which a batch says what it asks for; None where no batch of the release can ask."""
        return None if name in self.lacks else getattr(holder, name)


NAMES = {
    "0.5.17": RoundNames(
        last_reader="war_fastpath_runner",
        reads_done="war_fastpath_read_done_event",
        lacks=frozenset({"has_watermark_candidates", "beam_tail", "cuda_graph_compatible"}),
    ),
    "0.5.23": RoundNames(
        last_reader="last_shared_read_runner",
        reads_done="shared_read_done_event",
        free=frozenset({"enable_dp_attention", "attn_dp_size", "disaggregation_mode"}),
        unseen=frozenset({"ep_size", "enable_tp_lm_head_all_to_all", "enable_memory_saver"}),
        counts_in_kv=True,
        samples_alike=True,
    ),
}
assert tuple(NAMES) == ROUND_GRAPHS


@cache
def names() -> RoundNames:
    """Those of the installed release; asked on releases of `ROUND_GRAPHS` alone."""
    return NAMES[installed()]


def graphs_of(worker: Any) -> tuple[Any, ...]:
    """SGLang's runners of target-verify, of draft steps and of draft-extend; None for one that it has not captured."""
    draft = worker.draft_worker
    verify = worker.target_worker.model_runner.decode_cuda_graph_runner
    return verify, draft.cuda_graph_runner, draft.cuda_graph_runner_for_draft_extend


def dp_ranks_and_draft_tokens(tokenizer_manager: Any) -> tuple[int, int]:
    """Ranks of DP attention or replicas that answer requests, 1 without; tokens a round verifies, 0 without drafts.

    In the process of SGLang's tokenizer manager, whose arguments were resolved in place until 0.5.17, and are published since.
    """
    args = tokenizer_manager.server_args
    if not hasattr(args, "resolve_once"):
        return args.dp_size, args.speculative_num_draft_tokens or 0
    return get_parallel().num_dp_ranks, get_spec().speculative_num_draft_tokens or 0
