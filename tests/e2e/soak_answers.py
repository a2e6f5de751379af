"""What the answers of a soak run are worth."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ties import TIE, first_difference


@dataclass(frozen=True)
class Template:
    index: int
    prompt: tuple[int, ...]
    new_tokens: int


@dataclass(frozen=True)
class Record:
    """One request of the load."""

    template: int
    start: float  # time.monotonic()
    end: float
    wanted: str  # what the client had in mind: a key of soak_traffic.SHARES
    kind: str  # what came of it: one of these, or "failed"
    tokens: int = 0
    parted: tuple[int, int] | None = None  # where the output leaves the reference's: (position, token)
    histogram: tuple[int, ...] = ()  # rounds by correct drafts; empty where prefill gave the only token
    retractions: int = 0
    message: str = ""
    first: float | None = None  # seconds to the first token, of a request that finished


def judge_answer(new_tokens: int, reference: list[int] | None, answer: dict | None, wanted: str = "finished") -> dict:
    """The fields of a Record that an answer decides; no answer means that the client closed the stream."""
    if answer is None:
        return {"kind": "closed"}
    if "error" in answer:  # how a stream says what would be a status of 400
        return {"kind": "failed", "message": str(answer["error"])}
    meta, ids = answer["meta_info"], answer["output_ids"]
    reason = meta.get("finish_reason") or {}
    if reason.get("type") == "abort" and wanted == "aborted":
        return {"kind": "aborted"}
    if reason.get("type") != "length" or len(ids) != new_tokens:
        return {"kind": "failed", "message": f"{len(ids)} of {new_tokens} tokens, finish reason {reason}"}
    at = None if reference is None else first_difference(reference, ids)
    return {
        "kind": "finished",
        "tokens": len(ids),
        "parted": None if at is None else (at, ids[at]),
        "histogram": tuple(meta.get("spec_correct_drafts_histogram") or ()),
        "retractions": meta.get("num_retractions", 0),
    }


def group_differences(records: list[Record], templates: list[Template], references: dict[int, list[int]]) -> list[dict]:
    """One entry for each way in which a template's output left its reference, the most frequent first."""
    ways = Counter((r.template, *r.parted) for r in records if r.parted)
    return [
        {"template": index, "prompt_tokens": len(templates[index].prompt), "position": at, "requests": count,
         "reference": references[index][at], "other": token, "below_best": None, "tie": None}
        for (index, at, token), count in ways.most_common()
    ]  # fmt: skip


def judge_tie(difference: dict, best: list[list]) -> None:
    """Add how far both tokens are from the best of `best`, [log-probability, token, ...] each; near ones are a tie."""
    values = {token: value for value, token, *_ in best}
    gaps = {s: best[0][0] - values[difference[s]] if difference[s] in values else None for s in ("reference", "other")}
    difference |= {"below_best": gaps, "tie": all(gap is not None and gap < TIE for gap in gaps.values())}
