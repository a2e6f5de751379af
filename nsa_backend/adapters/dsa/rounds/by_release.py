"""Release by release: by what names SGLang calls the things that rounds touch, and which rounds are one graph by default."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cache
from typing import Any

from nsa_backend.environment import asked
from nsa_backend.releases import ROUND_GRAPHS, installed


class OneGraph(Enum):
    """When rounds beside an option, or of some batches, are one graph: those that ran on a GPU are without being asked."""

    BY_DEFAULT = auto()
    WHERE_ASKED = auto()

    def served(self, switch: str) -> bool:
        """Whether they are under what the environment variable `switch` says."""
        said = asked(switch)
        return self is OneGraph.BY_DEFAULT if said is None else said


@dataclass(frozen=True)
class Release:
    """Names and defaults of one release."""

    last_reader: str  # of a worker: the runner whose event the scheduler waits for before it writes what rounds read
    reads_done: str  # of a runner: that event, or None for the whole forward
    sampled: OneGraph  # rounds of which a request samples
    beside: dict[str, OneGraph] = field(default_factory=dict)  # by option of `served`; beside those not here, rounds are three
    apart: tuple[tuple[str, str], ...] = ()  # of those by default, a first that did not run beside a second: where asked
    lacks: frozenset[str] = frozenset()  # marks of a batch whose feature the release does not have
    counts_in_kv: bool = False  # whether a request's `kv` says how far its slots reach and are written, which `pages` reads
    logprobs: OneGraph = OneGraph.WHERE_ASKED  # rounds that tell the log-probabilities of their tokens
    sampled_of_ranks: OneGraph = OneGraph.WHERE_ASKED  # sampled rounds under DP attention

    @property
    def has_ranks(self) -> bool:
        """Whether rounds of DP attention can be one graph."""
        return "attn_dp_size" in self.beside

    def wait_for_all_after(self, runner: Any) -> None:
        """Let the scheduler wait for the whole forward of this runner, and for no event inside it."""
        setattr(runner, self.reads_done, None)

    def mark(self, holder: Any, name: str) -> Any:
        """An attribute by which a batch says what it asks for; None where no batch of the release can ask."""
        return None if name in self.lacks else getattr(holder, name)


RELEASES = {
    "0.5.17": Release(
        last_reader="war_fastpath_runner",
        reads_done="war_fastpath_read_done_event",
        sampled=OneGraph.WHERE_ASKED,
        lacks=frozenset({"has_watermark_candidates", "beam_tail", "cuda_graph_compatible"}),
    ),
    "0.5.23": Release(
        last_reader="last_shared_read_runner",
        reads_done="shared_read_done_event",
        sampled=OneGraph.BY_DEFAULT,
        beside={
            "enable_dp_attention": OneGraph.BY_DEFAULT,
            "attn_dp_size": OneGraph.BY_DEFAULT,
            "disaggregation_mode": OneGraph.BY_DEFAULT,
            "dcp_size": OneGraph.BY_DEFAULT,
            "enable_tp_lm_head_all_to_all": OneGraph.BY_DEFAULT,
            "ep_size": OneGraph.BY_DEFAULT,
            "enable_memory_saver": OneGraph.BY_DEFAULT,
        },
        apart=(("dcp_size", "attn_dp_size"),),
        counts_in_kv=True,
    ),
}
assert tuple(RELEASES) == ROUND_GRAPHS


@cache
def release() -> Release:
    """The installed one; asked on releases of `ROUND_GRAPHS` alone."""
    return RELEASES[installed()]


def graphs_of(worker: Any) -> tuple[Any, ...]:
    """SGLang's runners of target-verify, of draft steps and of draft-extend; None for one that it has not captured."""
    draft = worker.draft_worker
    verify = worker.target_worker.model_runner.decode_cuda_graph_runner
    return verify, draft.cuda_graph_runner, draft.cuda_graph_runner_for_draft_extend
