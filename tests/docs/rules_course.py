"""What the text must say of the time per token as a generation goes on, without a profiler, and of a forward under it."""

import statistics
from collections.abc import Iterator

from quoted import one, rule
from rules_today import total

SIDES = ("ours", "builtin")
BATCHES = (1, 8, 32)


def average(row: dict, side: str) -> float:
    """Milliseconds per token, over the stretches, which are equally long but the last."""
    return statistics.fmean(row[side]["ms_per_token"])


def longer(row: dict) -> list[float]:
    """Microseconds that a token of ours takes more than the built-in's, by stretch."""
    return [1e3 * (a - b) for a, b in zip(*(row[side]["ms_per_token"] for side in SIDES), strict=True)]


def apart(row: dict) -> tuple[int, int]:
    """Stretches in which every sample of ours is longer than every one of the built-in's, and shorter."""
    pairs = list(zip(*(row[side]["min_max"] for side in SIDES), strict=True))
    return sum(a[0] > b[1] for a, b in pairs), sum(a[1] < b[0] for a, b in pairs)


@rule("profile_course_0_5_23")
def every_course(report: dict) -> Iterator[str]:
    assert report["not_measured"] == []
    assert {(row["checkpoint"], row["steps"], row["length"]) for row in report["course"]} == {("wide", 0, 4096)}
    for batch in BATCHES:
        for forced in (False, True):
            row = one(report["course"], batch=batch, forced=forced)
            more = longer(row)
            assert len(more) == 8
            assert (row["equal_tokens"] == 1) is forced
            cells = ["one, forced" if forced else f"each side's own, {100 * row['equal_tokens']:.0f} % alike"]
            cells += [" / ".join(f"{average(row, side):.3f}" for side in SIDES)]
            cells += [f"{statistics.fmean(more):+.0f}", f"{min(more):+.0f} to {max(more):+.0f}"]
            yield f"| {batch} x 4096 | {' | '.join(cells)} | {' / '.join(map(str, apart(row)))} |"


@rule("profile_course_0_5_23")
def forced_tokens(report: dict) -> Iterator[str]:
    """Where ours takes longer still, although tokens are alike."""
    rows = [one(report["course"], batch=batch, forced=True) for batch in (8, 32)]
    shares = [100 * (average(row, "ours") / average(row, "builtin") - 1) for row in rows]
    yield "{:.1f} and {:.1f} % of a token".format(*shares)
    assert [apart(row) for row in rows] == [(0, 0), (3, 0)]
    assert [sum(more > 0 for more in longer(row)) for row in rows] == [7, 7]
    alone = one(report["course"], batch=1, forced=True)
    stretches = alone["builtin"]["ms_per_token"]
    yield "its first stretches took {:.2f} and {:.2f} ms a token".format(*stretches)
    yield f"and the quickest {min(stretches):.2f}"


@rule("profile_course_0_5_23")
def under_the_profiler(report: dict) -> Iterator[str]:
    """Spans of a forward, and the one gap in it that is about what the span is longer than a token without the profiler."""
    decode = [one(report["rows"], batch=batch, mode="decode") for batch in BATCHES]
    form = " / ".join(["{:.2f}"] * len(BATCHES))
    spans = [form.format(*(row[side]["span_us"] / 1e3 for row in decode)) for side in SIDES]
    yield f"a forward spans {spans[0]} ms, the built-in's {spans[1]}"
    gaps = []
    for row in decode:
        names = list(row["ours"]["path"])
        assert names[:2] == ["metadata_kernel", "prepare_varlen_num_blocks_kernel"]
        gaps.append(row["ours"]["path"][names[2]][1])
        assert gaps[-1] == max(gap for _, gap in row["ours"]["path"].values())
    yield "{:.0f} / {:.0f} / {:.0f} us between the metadata launches and the model's first kernel".format(*gaps)
    tokens = [average(one(report["course"], batch=batch, forced=False), "ours") for batch in BATCHES]
    excess = [row["ours"]["span_us"] - 1e3 * token for row, token in zip(decode, tokens, strict=True)]
    yield "{:.0f} / {:.0f} / {:.0f} us less than the span".format(*excess)
    assert all(abs(more - gap) < 20 for more, gap in zip(excess, gaps, strict=True))
    rest = [sum(gap for _, gap in row["ours"]["path"].values()) - big for row, big in zip(decode, gaps, strict=True)]
    theirs = [sum(gap for _, gap in row["builtin"]["path"].values()) for row in decode]
    own = [form.format(*(sum(us for us, _ in row[side]["path"].values()) / 1e3 for row in decode)) for side in SIDES]
    yield "the other gaps add up to {:.0f} / {:.0f} / {:.0f} us".format(*rest)
    yield "all of the built-in's to {:.0f} / {:.0f} / {:.0f}".format(*theirs)
    yield f"what kernels add to the span is {own[0]} ms, the built-in's {own[1]}"
    periods = [row[side]["period_us"] / 1e3 for side in SIDES for row in decode]
    yield f"From one forward to the next are {form.format(*periods[:3])} ms, the built-in's {form.format(*periods[3:])}"


@rule("profile_course_0_5_23")
def beside_decode(report: dict) -> Iterator[str]:
    prefill = [one(report["rows"], batch=batch, mode="prefill") for batch in BATCHES]
    sums = [[total(row[side]["forward"]) / 1e3 for row in prefill] for side in SIDES]
    yield "{:.1f} / {:.1f} / {:.1f} ms of kernels, built-in {:.1f} / {:.1f} / {:.1f}".format(*sums[0], *sums[1])
    spans = [row[side]["span_us"] / 1e3 for side in SIDES for row in prefill]
    yield "in {:.1f} / {:.1f} / {:.1f} ms, built-in {:.1f} / {:.1f} / {:.1f}".format(*spans)
    between = [one(report["rows"], batch=batch, mode="between") for batch in BATCHES]
    outside = [total(row[side]["kernels"]) for side in SIDES for row in between]
    yield "{:.1f} / {:.1f} / {:.1f} us of kernels outside the graph, built-in {:.1f} / {:.1f} / {:.1f}".format(*outside)


@rule("course_servers_0_5_23")
def several_servers(report: dict) -> Iterator[str]:
    """Three servers of each side: what the sides differ by, and what servers of one side do."""
    assert {(row["batch"], row["length"], row["steps"]) for row in report["course"]} == {(32, 4096, 0)}
    for row in report["course"]:
        sides = row["sides"]
        of = {s: sorted(us for name, us in sides["us_per_token"].items() if name.startswith(s)) for s in SIDES}
        assert all(len(of[s]) == 3 for s in SIDES)
        assert sides["ranges_overlap"] is row["forced"] is (of["ours"][0] < of["builtin"][-1])
        assert (row["equal_tokens"] == 1) is row["forced"]
        cells = ["one, forced" if row["forced"] else f"each side's own, {100 * row['equal_tokens']:.0f} % alike"]
        cells += [", ".join(f"{us:.0f}" for us in of[s]) for s in SIDES]
        cells += [f"{sides['difference']:+.0f}", " / ".join(f"{sides['spread'][s]:.0f}" for s in SIDES)]
        yield f"| {' | '.join(cells)} |"
    own, forced = (one(report["course"], forced=f)["sides"] for f in (False, True))
    yield f"{own['difference']:.0f} us more, {100 * own['difference'] / own['mean']['builtin']:.1f} % of a token"
    yield f"Two servers of ours differ by up to {forced['spread']['ours']:.0f} us there"


@rule("course_servers_0_5_23", "profile_course_0_5_23")
def one_pair_and_three(three: dict, pair: dict) -> Iterator[str]:
    """With one token forced, what one pair lost is less than servers of one side differ by."""
    difference = 1e3 * (average(row := one(pair["course"], batch=32, forced=True), "ours") - average(row, "builtin"))
    assert 0 < difference < one(three["course"], forced=True)["sides"]["spread"]["ours"]
    yield f"the {difference:.0f} us that the pair above lost with one token"
