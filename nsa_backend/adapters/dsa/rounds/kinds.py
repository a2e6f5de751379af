"""Kinds of rounds, which have graphs of their own each."""

from __future__ import annotations

from typing import Any, NamedTuple

from nsa_backend.adapters.dsa.rounds.rule import is_sampled


class Kind(NamedTuple):
    """What the batches of a kind ask of their rounds."""

    sampled: bool = False  # some of their requests sample
    logprobs: bool = False  # some of them want the log-probabilities of their tokens

    @classmethod
    def of(cls, batch: Any) -> Kind:
        """That of SGLang's ScheduleBatch."""
        return cls(is_sampled(batch), batch.return_logprob)

    def __str__(self) -> str:
        """Of their requests, for the log."""
        return f"{'sampled' if self.sampled else 'greedy'} requests{' with log-probabilities' * self.logprobs}"
