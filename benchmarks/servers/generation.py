"""One batched generation of a server, in the units of a serving engineer: what draft and serve have in common."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from nsa_backend.benchmarks.checkpoints import faithful
from nsa_backend.benchmarks.servers.pairs import Pair
from nsa_backend.benchmarks.servers.server import BACKENDS, VARIANTS, Server

WARM_TOKENS = 1 << 17  # prompt tokens of a warm-up at most: kernels compile for shapes, not for how often they come


@dataclass(frozen=True)
class Sample:
    """One generation of a batch."""

    seconds: float  # from sending the request to the last answer
    first_seconds: float  # from sending the request to the first token of the prompt that gets it last
    tokens: int  # new tokens a request
    batch: int
    rounds: float  # most rounds of a request, or of a pair's their median; tokens - 1 without speculation
    accept: float  # mean tokens a round; 1 without speculation
    own_seconds: float | None = field(default=None, kw_only=True)  # of a pair: from a request's first token to its last, median

    @property
    def decoding_seconds(self) -> float:
        """What those rounds take: from the last first token on, or of a pair, where some decode before it, `own_seconds`."""
        return self.seconds - self.first_seconds if self.own_seconds is None else self.own_seconds

    @property
    def round_ms(self) -> float:
        return 1e3 * self.decoding_seconds / self.rounds

    @property
    def tpot_ms(self) -> float:
        """Time per output token after the first, of one request."""
        return 1e3 * self.decoding_seconds / (self.tokens - 1)

    @property
    def ttft_ms(self) -> float:
        """Time to first token, of the request that gets it last: HTTP, scheduling and the prefill of the whole batch."""
        return 1e3 * self.first_seconds

    @property
    def tokens_per_s(self) -> float:
        return self.batch * self.tokens / self.seconds


def prompts(batch: int, length: int, number: int = 0) -> list[list[int]]:
    """`batch` different prompts of `length` tokens, and others for another `number` of less than a hundred."""
    return [[2 + (7 * i + 13 * r + 17 * number) % (faithful.VOCAB - 48) for i in range(length)] for r in range(batch)]


def turns(batch: int, length: int, cached: int, number: int) -> list[list[int]]:
    """The same prompts of `cached` tokens each, and behind them `length` others for every `number`: turns of chats.

    With nothing cached there is no chat, and every number has the same prompts.
    """
    if not cached:
        return prompts(batch, length)
    return [before + new for before, new in zip(prompts(batch, cached), prompts(batch, length, number), strict=True)]


def accept_length(histogram: list[int]) -> float:
    """Mean tokens a round (accepted drafts and the bonus), from SGLang's count of rounds by correct drafts."""
    rounds = sum(histogram)
    return sum((drafts + 1) * count for drafts, count in enumerate(histogram)) / rounds if rounds else 0.0


def counted(answers: list[dict], tokens: int) -> tuple[int, float]:
    """(most rounds of a request, mean accept length) from SGLang's histograms of correct drafts a round."""
    histograms = [a["meta_info"].get("spec_correct_drafts_histogram") or [] for a in answers]
    if not any(histograms):
        return tokens - 1, 1.0
    return max(map(sum, histograms)), accept_length([sum(counts) for counts in zip_longest(*histograms, fillvalue=0)])


def sample_of(server: Server | Pair, asked: list[list[int]], tokens: int, **sampling: float) -> Sample:
    """One streamed generation, greedy unless `sampling` says otherwise.

    SGLang prefills what waits before it decodes: decoding begins with the last first token. A pair decodes what has come.
    """
    found = server.streamed(asked, tokens, **sampling)
    rounds, accept = counted(found.answers, tokens)
    own_seconds = None
    if isinstance(server, Pair):
        rounds = statistics.median(counted([answer], tokens)[0] for answer in found.answers)
        own_seconds = statistics.median(events[-1][1] - events[0][1] for events in found.progress)
    return Sample(found.seconds, max(found.first_seconds), tokens, len(asked), rounds, accept, own_seconds=own_seconds)


def sampling_of(options: argparse.Namespace) -> dict[str, float]:
    """What --temperature and --top-p ask of every request, by SGLang's names; empty for greedy ones."""
    asked = {name: getattr(options, name) for name in ("temperature", "top_p")}
    return {name: value for name, value in asked.items() if value is not None}


def in_turns(
    servers: dict[str, Server | Pair],
    batch: int,
    length: int,
    tokens: int,
    repeats: int,
    *,
    cached: int = 0,
    keeps: bool = False,
    **sampling: float,
) -> dict[str, list[Sample]]:
    """`repeats` samples of each server, one after the other; a batch of at most WARM_TOKENS warms each up.

    With `cached` each sample is another turn of the same chats, of so many tokens before it, whose KV the server has kept.
    With nothing cached a server that `keeps` what it has read forgets it before every sample.
    """
    warm = max(1, min(batch, WARM_TOKENS // length))
    for server in servers.values():
        if cached:
            server.generate(prompts(batch, cached), 1)
        sample_of(server, turns(warm, length, cached, repeats), tokens, **sampling)
    return of_turns(servers, batch, length, tokens, range(repeats), cached=cached, keeps=keeps, **sampling)


def of_turns(
    servers: dict[str, Server | Pair],
    batch: int,
    length: int,
    tokens: int,
    numbers: Iterable[int],
    *,
    cached: int = 0,
    keeps: bool = False,
    **sampling: float,
) -> dict[str, list[Sample]]:
    """Samples of turns `numbers`, of each server one after the other; see `in_turns`, which warms them up."""
    found: dict[str, list[Sample]] = {side: [] for side in servers}
    for number in numbers:
        for side, server in servers.items():
            if keeps and not cached:
                server.forget()
            found[side].append(sample_of(server, turns(batch, length, cached, number), tokens, **sampling))
    return found


def spread(values: list[float], digits: int = 3) -> dict:
    """Median, and least and most."""
    return {
        "median": round(statistics.median(values), digits),
        "min_max": [round(v, digits) for v in (min(values), max(values))],
    }


def summary(found: list[Sample], firsts: Sequence[Sample] = ()) -> dict:
    """One side of a cell: median, least and most of each quantity; of first tokens over `firsts` too."""
    return {
        "tokens_per_s": spread([one.tokens_per_s for one in found], 1),
        "ttft_ms": spread([one.ttft_ms for one in (*found, *firsts)]),
        "tpot_ms": spread([one.tpot_ms for one in found]),
        "round_ms": spread([one.round_ms for one in found]),
        "accept": spread([one.accept for one in found])["median"],
    }


def compared(found: dict[str, list[Sample]]) -> dict:
    """Ours over the built-in's: `speedup` of tokens per second, above 1 where ours is faster; times below 1 where it is.

    With a side of VARIANTS beside ours, `three_graphs_over_ours`, for one, is the same of that side over ours.
    """
    compared_with_builtin = ratios(found["ours"], found["builtin"]) if set(BACKENDS) <= set(found) else {}
    variants = [side for side in VARIANTS if {side, "ours"} <= set(found)]
    return compared_with_builtin | {f"{side}_over_ours": ratios(found[side], found["ours"]) for side in variants}


def ratios(one: list[Sample], other: list[Sample]) -> dict:
    """Medians of one side over those of another."""
    sides = [summary(found) for found in (one, other)]
    ratio = {name: round(sides[0][name]["median"] / sides[1][name]["median"], 3) for name in sides[0] if name != "accept"}
    return {"speedup": ratio.pop("tokens_per_s"), "ratio": ratio}
