"""How an engine ended: which of its processes was first, by what signal or error, and what each rank said last."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

POLL_SECONDS, TREE_SECONDS = 0.1, 1.0  # between two looks at the known processes; between two looks for new ones
LAST_LINES, LINE_LENGTH, MOST_EXITS = 80, 300, 12
CLOSING = 10.0
"""Seconds that a case may take to end its own servers; what ended so shortly before it was ended as late is no cause."""
OF_MAIN, TITLE = "main", "sglang::"

CRASHED = re.compile(r"Subprocess \S+ \(pid=(\d+)\) crashed with exit code (-?\d+)")
"""SGLang's own words for a child that ended, which it reaps itself."""
RANK = re.compile(r"^\[\d{4}-\d\d-\d\d [\d:]+((?: [A-Z]+\d+)*)\]|^\[(rank\d+)\]:")
RAISED = re.compile(r"hit an exception: Traceback \(most recent call last\)")
"""What SGLang writes of an error that ends a process of its."""
TRACEBACK = re.compile(r"Traceback \(most recent call last\)")
CHAINED = re.compile(r"(?:During handling of the|The) above exception.*:\n\nTraceback \(most recent call last\)")
ERROR = re.compile(r"^(?:\[rank\d+\]: )?(?:[\w.]*\.)?\w*(?:Error|Exception|Interrupt)(?:: .*)?$", re.MULTILINE)
FRAME = re.compile(r"^frame #\d+: ")
"""A line of C++, of which an error brings a dozen."""


@dataclass(frozen=True)
class Exit:
    """One process that is gone."""

    pid: int
    name: str  # as SGLang titles it
    status: int | None  # its exit code, less than 0 for a signal; None where nobody saw it
    seconds: float  # after the engine's start
    logged: int  # bytes of the log that were there when it was missed
    rss_gib: float  # resident memory when it was last seen

    def how(self) -> str:
        return how_ended(self.status)


def how_ended(status: int | None) -> str:
    """Words for an exit code, which is less than 0 for a signal and None where nobody saw it."""
    if status is None:
        return "ended unseen"
    if status < 0:
        return signal.Signals(-status).name
    return f"exit code {status}"


class Followed:
    """The processes of an engine, followed within the `with` block; `exits` has those that ended, the first one first.

    A process that has ended keeps its status in /proc until its parent asks for it, which SGLang does once a second. Then there
    is no status, unless SGLang has written it into its log.
    """

    def __init__(self, pid: int, log: Path, exits: list[Exit] | None = None):
        """`pid` is that of the first process; what it starts is found. `exits` is the list to take them up in."""
        self.exits: list[Exit] = [] if exits is None else exits
        self._pid, self._log, self._began = pid, log, time.monotonic()
        self._alive: dict[int, tuple[str, float]] = {}  # name and resident GiB
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Followed:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _follow(self) -> None:
        looked = 0.0
        while not self._stop.is_set():
            if time.monotonic() - looked > TREE_SECONDS:
                looked = time.monotonic()
                self._find()
            for pid in list(self._alive):
                self._look_at(pid)
            self._stop.wait(POLL_SECONDS)

    def _find(self) -> None:
        """Look for children of the first process, and for what has a title of SGLang's; compilers come and go beneath."""
        with suppress(psutil.Error):
            for process in psutil.Process(self._pid).children(recursive=True):
                with suppress(psutil.Error):
                    name = name_of(process)
                    its_own = process.ppid() == self._pid or name.startswith(TITLE)
                    gone = any(one.pid == process.pid for one in self.exits)
                    if its_own and not gone and process.status() != psutil.STATUS_ZOMBIE:
                        self._alive[process.pid] = name, process.memory_info().rss / 2**30

    def _look_at(self, pid: int) -> None:
        state, status = state_of(pid)
        if state in ("Z", "X", ""):
            name, rss = self._alive.pop(pid)
            seconds, logged = time.monotonic() - self._began, self._log.stat().st_size
            self.exits.append(Exit(pid, name, status, seconds, logged, rss))


def name_of(process: psutil.Process) -> str:
    """As SGLang titles it, or what it runs."""
    return Path((process.cmdline() or [process.name()])[0]).name


def titles_beneath(pid: int) -> set[str]:
    """SGLang's titles of what lives beneath a process."""
    found = set()
    with suppress(psutil.Error):
        for process in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.add(name_of(process))
    return {name for name in found if name.startswith(TITLE)}


def state_of(pid: int) -> tuple[str, int | None]:
    """(the kernel's letter for a process, "" without one; the exit code of one that has ended, less than 0 for a signal)."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return "", None
    state, waited = words[0], int(words[-1])
    return state, (os.waitstatus_to_exitcode(waited) if state == "Z" else None)


def with_logged_codes(exits: list[Exit], log: str) -> list[Exit]:
    """`exits` with the codes that SGLang, their parent, has written into the log."""
    logged = {int(pid): int(code) for pid, code in CRASHED.findall(log)}
    return [replace(one, status=logged.get(one.pid, one.status)) for one in exits]


def cause(exits: list[Exit], code: int | None, log: str, machine: dict, seconds: float) -> str:
    """One sentence: why an engine ended, as far as these facts tell.

    Args:
        exits: of its processes, in their order.
        code: the exit code of its first process; None where it was ended as late.
        machine: `machine.extremes` over its life.
        seconds: that it lived.
    """
    first = next((one for one in exits if one.status), None)
    raised = RAISED.search(log)
    # An error of Python is logged before SGLang ends all processes; one that follows a signal is another rank's.
    if raised and (first is None or raised.start() < first.logged):
        return f"an error of Python came first: {_error(log, raised.start())}"
    if code is None and (first is None or seconds - first.seconds < CLOSING):
        return f"it was ended after {seconds:.0f} s without a result"
    if first is None:
        if last := list(TRACEBACK.finditer(log)):
            return f"its first process ended with {code}, after {_error(log, last[-1].start())}"
        return f"nothing tells: its first process ended with {code}, no other was seen to end badly, and the log has no error"
    who = f"{first.name} ended first, after {first.seconds:.0f} s, with {first.how()}"
    return f"{who}{_of_signal(first, machine)}"


def _of_signal(first: Exit, machine: dict) -> str:
    """What the machine says about a signal, behind the sentence that names it."""
    if first.status == -signal.SIGBUS and "dev_shm_gib" in machine:
        return f": /dev/shm held up to {machine['dev_shm_gib']} of {machine['dev_shm_size_gib']} GiB"
    if first.status == -signal.SIGKILL:
        if machine.get("oom_kills"):
            return f": the kernel ended {machine['oom_kills']} processes for lack of memory meanwhile{_memory(machine)}"
        return f", which the kernel does not count as one for lack of memory{_memory(machine)}"
    return ""


def _memory(machine: dict) -> str:
    told = []
    if "mem_available_gib" in machine:
        told.append(f"at least {machine['mem_available_gib']} GiB of the machine were available")
    if "cgroup_gib" in machine:
        limit = f" of {machine['cgroup_limit_gib']}" if "cgroup_limit_gib" in machine else ""
        told.append(f"the container held up to {machine['cgroup_gib']}{limit} GiB")
    return f"; {', '.join(told)}" if told else ""


def _error(log: str, start: int) -> str:
    """The line that ends the traceback which begins there; the first line of what it says."""
    found = ERROR.search(log, start)
    return (found[0] if found else log[start:].partition("\n")[0])[:LINE_LENGTH]


def first_error(log: str) -> str:
    """The line that ends the first traceback of a log, or of a chain of them the last; empty where it has none."""
    found = TRACEBACK.search(log)
    while found and (chained := CHAINED.search(log, found.end())):
        if len(TRACEBACK.findall(log, found.end(), chained.end())) > 1:
            break  # a chain of its own, further on
        found = chained
    error = ERROR.search(log, found.end()) if found else None
    return error[0][:LINE_LENGTH] if error else ""


def last_lines(log: str, most: int = LAST_LINES) -> dict[str, list[str]]:
    """The last lines of each rank, by what SGLang calls it in the log; lines without a name belong to those before them."""
    found: dict[str, list[str]] = {}
    who = OF_MAIN
    for line in log.splitlines():
        if FRAME.match(line):
            continue
        if prefix := RANK.match(line):
            who = (prefix[1] or prefix[2] or OF_MAIN).strip()
        found.setdefault(who, []).append(line[:LINE_LENGTH])
    return {name: lines[-most:] for name, lines in found.items()}


def facts(exits: list[Exit], code: int | None, log: str, machine: dict, seconds: float) -> dict:
    """All that is kept of an engine that gave no result, beside the sentence of `cause`."""
    exits = with_logged_codes(exits, log)
    rows = [f"{one.name} ({one.pid}): {one.how()} after {one.seconds:.1f} s, {one.rss_gib:.1f} GiB" for one in exits]
    return {
        "ended": cause(exits, code, log, machine, seconds),
        "exit_code": code,
        "exits": rows[:MOST_EXITS],
        "machine": machine,
        "last_lines": last_lines(log),
    }
