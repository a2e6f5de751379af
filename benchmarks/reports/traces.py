"""A trace of SGLang's profiler as forwards: which kernels each replayed graph runs, what runs outside, what one layer is.

Pure functions over the events of a trace. A graph's kernels carry the correlation of the call that launched it, so the replays
of one graph are the launches that ran the same kernels as often.
"""

from __future__ import annotations

import gzip
import json
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from nsa_backend.benchmarks.reports.cells import LostCellError

TAIL = 80
"""Characters of a trace that ends early which are told: what the profiler came to."""
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
WRAPPERS = re.compile(r"(device_kernel|elementwise_kernel\w*|reduce_kernel|enable_sm\w+|gpu_kernel_impl\w*|kernel_wrapper\w*)$")
"""Kernels whose first template argument that is a name says what they do."""


FIRST_RANK = re.compile(r"-TP-0(?!\d)")
"""In the name of a trace: a process of rank 0 of tensor parallel."""

INDEXER = re.compile(r"mqa_logits(?!_metadata)")
"""What every captured layer runs and no graph of metadata does."""


@dataclass(frozen=True)
class Op:
    """One kernel, copy or fill on the GPU, times in microseconds."""

    name: str
    begin: float
    us: float
    launch: int | None  # correlation of the graph launch that it belongs to; None outside graphs


Replay = list[Op]
"""The ops of one graph launch, in the order in which they began."""

Kernels = dict[str, tuple[float, float]]
"""By name, in the order of a forward: (launches, microseconds of all of them)."""

Sums = dict[str, list[float]]
"""Two numbers by kernel, of one forward."""


def read_events(folder: Path) -> list[dict]:
    """The events of the one trace in `folder`, or of several the first rank's: SGLang writes a trace a rank.

    Raises:
        RuntimeError: there is no such trace, or several.
        LostCellError: it ends early.
    """
    found = list(folder.glob("*.trace.json.gz"))
    if len(found) > 1:
        found = [path for path in found if FIRST_RANK.search(path.name)]
    if len(found) != 1:
        raise RuntimeError(f"SGLang's profiler left {len(found)} traces of a first rank in {folder} where one was asked for")
    text = ""
    try:
        with gzip.open(found[0], "rt", encoding="utf-8") as stream:
            text = stream.read()
        return json.loads(text)["traceEvents"]
    except (json.JSONDecodeError, EOFError) as error:
        where = f"{found[0]}: {error}, behind {text[-TAIL:]!r}"
        raise LostCellError(f"SGLang's profiler left a trace that ends early ({where}): look whether a disk is full") from error


def host_calls(events: Iterable[dict]) -> list[dict]:
    """The calls of CUDA on the host."""
    return [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]


def graph_launches(calls: Iterable[dict]) -> dict[int, dict]:
    """Of these, the launches of graphs, by the correlation that their ops carry."""
    return {e["args"]["correlation"]: e for e in calls if "GraphLaunch" in e["name"]}


def ops(events: Iterable[dict]) -> list[Op]:
    """What ran on the GPU, by begin."""
    events = list(events)
    launches = graph_launches(host_calls(events))
    found = []
    for e in events:
        if e.get("cat") in ON_DEVICE:
            correlation = e["args"].get("correlation")
            found.append(Op(short(e["name"]), e["ts"], e["dur"], correlation if correlation in launches else None))
    return sorted(found, key=lambda op: op.begin)


def round_marks(events: list[dict]) -> list[dict]:
    """Those of `round_launches` but for the first round's."""
    return round_launches(events)[1:]


def round_launches(events: list[dict]) -> list[dict]:
    """The host's call that launches the largest graph of each round, in their order.

    The largest graph has the most ops among large ones that are launched most often, so that no prefill's counts. SGLang
    captures a prefill in pieces of a layer, and a prompt in many chunks launches more of them than there are rounds.
    """
    by_correlation = graph_launches(host_calls(events))
    graphs = [found for found in replays(ops(events)).values() if len(found) > 2]
    most = max((len(found[0]) for found in graphs), default=0)
    large = [found for found in graphs if 2 * len(found[0]) > most]
    often = [found for found in large if 2 * len(found) > max(map(len, large))]
    largest = max(often, key=lambda found: len(found[0]), default=[])
    return sorted((by_correlation[replay[0].launch] for replay in largest), key=lambda e: e["ts"])


def calls_a_round(events: Iterable[dict]) -> dict[str, float]:
    """CUDA calls on the host by name, a round, once rounds follow each other: neither a prefill's nor the first round's.

    Counted is what the launching thread calls between the second and the last of `round_marks`. Empty with fewer than four
    rounds."""
    events = list(events)
    marks = round_marks(events)
    if len(marks) < 3:
        return {}
    begin, end, thread = marks[0]["ts"], marks[-1]["ts"], marks[0].get("tid")
    counted = Counter(e["name"] for e in host_calls(events) if begin <= e["ts"] < end and e.get("tid") == thread)
    return {name: round(count / (len(marks) - 1), 2) for name, count in sorted(counted.items())}


@cache
def short(name: str) -> str:
    """A kernel's name without namespaces, template arguments and parameters; a wrapper's with what it wraps."""
    name = re.sub(r"\(anonymous namespace\)|\{lambda[^}]*\}", "_", name.removeprefix("void ")).strip()
    head, _, rest = re.match(r"([^<(]*)(<?)(.*)", name, re.DOTALL).groups()
    base = head.strip().rsplit("::", 1)[-1]
    inner = re.search(r"(?<![\w:])[A-Za-z_][\w:]*[<(,>: ]?.*", rest, re.DOTALL) if WRAPPERS.search(base) else None
    return f"{base}<{short(inner.group())}>"[:90] if inner else base[:70]


def replays(found: Iterable[Op]) -> dict[frozenset, list[Replay]]:
    """The replays of each graph, in the order of first appearance, by its kernels and how often each runs."""
    launches: dict[int, Replay] = defaultdict(list)
    for op in found:
        if op.launch is not None:
            launches[op.launch].append(op)
    by_graph: dict[frozenset, list[Replay]] = defaultdict(list)
    for replay in launches.values():
        by_graph[frozenset(Counter(op.name for op in replay).items())].append(replay)
    return dict(by_graph)


def captured_forwards(long: list[Op], one_token: list[Op], rounds: int) -> list[list[Replay]]:
    """Replays of the graphs that every round of a generation launches, in the order in which a round launches them.

    Args:
        long: ops of a generation of many tokens.
        one_token: those of a generation of one token from the same prompts, whose prefill graphs are the same.
        rounds: of the generation of many tokens.

    Returns:
        N = 0: decode. Otherwise draft (where N > 1), verify, draft-extend. Graphs without a layer are left to `between`.
    """
    in_prefill = replays(one_token)
    often = [r for graph, r in replays(long).items() if len(r) - len(in_prefill.get(graph, [])) >= 0.3 * rounds]
    return [r for r in often if any(INDEXER.search(op.name) for op in r[0])]


def outside(found: list[Op], forwards: list[list[Replay]]) -> list[Op]:
    """Ops that are in none of the graphs that ran `forwards`."""
    graphs = {frozenset(Counter(op.name for op in r[0]).items()) for r in forwards}
    inside = {replay[0].launch for graph, r in replays(found).items() if graph in graphs for replay in r}
    return [op for op in found if op.launch is None or op.launch not in inside]


def between(long: list[Op], one_token: list[Op], rounds: int) -> Kernels:
    """What a round runs outside its graphs: what `long` has beyond the prefill of `one_token`, both from `outside`."""
    more = kernels([long])
    for name, (launches, us) in kernels([one_token]).items():
        if name in more:
            more[name] = (more[name][0] - launches, more[name][1] - us)
    return {name: (n / rounds, max(us, 0.0) / rounds) for name, (n, us) in more.items() if n >= 0.1 * rounds}


def kernels(forwards: list[Replay]) -> Kernels:
    """Launches and time by kernel, the median over `forwards` of the same kind."""
    each = []
    for replay in forwards:
        sums: Sums = defaultdict(lambda: [0, 0.0])
        for op in replay:
            sums[op.name][0] += 1
            sums[op.name][1] += op.us
        each.append(sums)
    return {name: pair for name, pair in medians(each).items() if pair[0]}


def medians(each: list[Sums]) -> Kernels:
    """The median of both numbers by kernel, in the order of first appearance; 0 where a forward has none of it."""
    order = dict.fromkeys(name for sums in each for name in sums)
    return {
        name: tuple(statistics.median(sums[name][i] if name in sums else 0 for sums in each) for i in (0, 1)) for name in order
    }


def span_us(forwards: list[Replay]) -> float:
    """Median time from the begin of the first to the end of the last op."""
    return statistics.median(max(op.begin + op.us for op in r) - r[0].begin for r in forwards)


def period_us(forwards: list[Replay]) -> float | None:
    """Median time from one replay's begin to the next one's; None of fewer than two. What it has beyond the span is between."""
    begins = sorted(replay[0].begin for replay in forwards)
    return statistics.median(after - before for before, after in pairwise(begins)) if len(begins) > 1 else None


def path(forwards: list[Replay]) -> dict[str, tuple[float, float]]:
    """Where the time of a forward goes, by kernel: (own, gap) microseconds, medians over `forwards` of the same kind.

    A kernel that is launched before those ahead of it end (by programmatic dependent launch, or on a second stream) waits for
    them in its own time, so that the times of `kernels` add up to more than the span. Here own is how much later an op ends
    than all that began before it, and gap how long nothing had run when it began: of one replay they add up to its span.
    """
    each = []
    for replay in forwards:
        sums: Sums = defaultdict(lambda: [0.0, 0.0])
        for op, own, gap in along(replay):
            sums[op.name][0] += own
            sums[op.name][1] += gap
        each.append(sums)
    return medians(each)


def along(replay: Replay) -> Iterator[tuple[Op, float, float]]:
    """Every op with its own and gap microseconds, as `path` has them."""
    reached = replay[0].begin
    for op in replay:
        yield op, max(0.0, op.begin + op.us - max(op.begin, reached)), max(0.0, op.begin - reached)
        reached = max(reached, op.begin + op.us)


def one_layer(forwards: list[Replay], layers: int, which: int) -> list[Replay]:
    """Of each forward, the ops of one layer: one period of the kernel that runs once a layer and takes longest.

    Args:
        forwards: of the same kind.
        layers: in a forward; with several models or chunks, all of them.
        which: the layer, from 0 on; there is another one after it.

    Returns:
        Empty where fewer than two layers, or no kernel that runs once a layer, show no period.
    """
    found = []
    for replay in forwards:
        begins: dict[str, list[int]] = defaultdict(list)
        for place, op in enumerate(replay):
            begins[op.name].append(place)
        once = {name: places for name, places in begins.items() if len(places) == layers}
        if layers < 2 or not once:
            return []
        places = max(once.values(), key=lambda places: sum(replay[p].us for p in places))
        found.append(replay[places[which] : places[which + 1]])
    return found
