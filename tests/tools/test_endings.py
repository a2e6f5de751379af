"""What an end-to-end run tells of an engine that ended: signals of its processes, last lines of its ranks, the machine."""

import os
import signal
import sys
import time

import pytest
from endings import Exit, cause, facts, first_error, last_lines
from engines import run_to_its_end

GIB = 2**30
RANK = "import os, signal, sys, time; time.sleep(float(sys.argv[2])); os.kill(os.getpid(), int(sys.argv[1]))"
ENGINE = """
import os, subprocess, sys, time
ranks = [subprocess.Popen([sys.executable, "-c", {rank!r}, *map(str, words)]) for words in {ranks}]
for rank in ranks:
    os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
time.sleep({seconds})
sys.exit(7)
"""
TITLED = ["bash", "-c", 'exec -a sglang::scheduler_TP1 "$@"', ""]
"""In front of a command: its process has a title of SGLang's."""


def run(tmp_path, ranks: list[tuple[int, float]], seconds: float = 1.5, limit: float = 60.0) -> tuple[int | None, list[Exit]]:
    """(exit code, ends) of an engine whose ranks get a signal after so many seconds each.

    It reaps none, and ends with 7 so many seconds behind the last.
    """
    exits: list[Exit] = []
    ranks = [(int(number), after) for number, after in ranks]
    command = [sys.executable, "-c", ENGINE.format(ranks=ranks, rank=RANK, seconds=seconds)]
    return run_to_its_end(command, tmp_path / "log", {}, limit, exits), exits


@pytest.mark.slow
def test_each_process_is_told_by_its_signal_in_the_order_in_which_they_ended(tmp_path):
    began = time.monotonic()
    code, exits = run(tmp_path, [(signal.SIGBUS, 5.0), (signal.SIGKILL, 1.5)])
    took = time.monotonic() - began
    assert code == 7
    assert [one.status for one in exits] == [-signal.SIGKILL, -signal.SIGBUS]
    assert [one.how() for one in exits] == ["SIGKILL", "SIGBUS"]
    assert 1.5 <= exits[0].seconds < exits[1].seconds < took  # a busy machine starts them late
    assert all(0 < one.rss_gib < 1 for one in exits)


@pytest.mark.slow
@pytest.mark.parametrize(("title", "told"), [([], []), (TITLED, [("sglang::scheduler_TP1", "SIGKILL")])])
def test_compilers_beneath_a_rank_are_nobodys_end(tmp_path, title, told):
    """Of what a rank starts, only what has SGLang's title is followed; on a busy machine three processes start for seconds."""
    started = [*title, sys.executable, "-c", RANK, str(int(signal.SIGKILL)), "2.5"]
    rank = f"import subprocess, time; subprocess.Popen({started}); time.sleep(60)"
    engine = f"import subprocess; subprocess.run({[sys.executable, '-c', rank]})"
    exits: list[Exit] = []
    assert run_to_its_end([sys.executable, "-c", engine], tmp_path / "log", dict(os.environ), 20.0, exits) is None
    assert [(one.name, one.how()) for one in exits] == told
    assert "without a result" in (tmp_path / "log").read_text()


def gone(status: int | None, logged: int = 0, pid: int = 5, name: str = "sglang::scheduler_DP0_TP0") -> Exit:
    return Exit(pid, name, status, 181.24, logged, 9.5)


FIRST_OF_ALL = "sglang::scheduler_DP0_TP0 ended first, after 181 s, with"
FULL = {"mem_available_gib": 0.4, "cgroup_gib": 511.9, "cgroup_limit_gib": 512.0, "oom_kills": 2}


@pytest.mark.parametrize(
    ("status", "found", "more"),
    [
        (
            -signal.SIGKILL,
            FULL,
            ": the kernel ended 2 processes for lack of memory meanwhile; at least 0.4 GiB of the machine were available, "
            "the container held up to 511.9 of 512.0 GiB",
        ),
        (-signal.SIGKILL, {"oom_kills": 0}, ", which the kernel does not count as one for lack of memory"),
        (-signal.SIGBUS, {"dev_shm_gib": 0.06, "dev_shm_size_gib": 0.06}, ": /dev/shm held up to 0.06 of 0.06 GiB"),
        (1, FULL, ""),
    ],
)
def test_a_signal_is_told_with_what_the_machine_says_about_it(status, found, more):
    """Of the first process that ended badly."""
    exits = [gone(0, pid=4), gone(status), gone(-signal.SIGKILL, pid=6, name="other")]
    assert cause(exits, -9, "", found, 190.0) == f"{FIRST_OF_ALL} {exits[1].how()}{more}"


def test_what_a_case_ended_itself_just_before_it_was_ended_as_late_is_no_cause():
    """One that had answered closes its servers; those that were gone long before say why nothing came."""
    exits = [gone(-signal.SIGKILL)]
    assert cause(exits, None, "", {}, 183.0) == "it was ended after 183 s without a result"
    assert cause(exits, None, "", {}, 300.0).startswith(FIRST_OF_ALL)


LOG = """loading
[2026-11-22 10:41:30 DP0 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 6362, in run_scheduler_process
    forward()
RuntimeError: num_splits must have shape (b+1)

[2026-11-22 10:41:37] kill_process_tree called
"""


def test_an_error_of_python_is_the_cause_where_it_was_logged_before_processes_ended():
    after = gone(-signal.SIGKILL, logged=len(LOG))
    assert cause([after], -9, LOG, FULL, 190.0) == (
        "an error of Python came first: RuntimeError: num_splits must have shape (b+1)"
    )
    before = gone(-signal.SIGKILL, logged=5)
    assert cause([before], -9, LOG, FULL, 190.0).startswith(FIRST_OF_ALL)
    assert cause([], -9, LOG, {}, 190.0) == cause([after], -9, LOG, FULL, 190.0)


def test_sglangs_own_word_for_a_process_counts(tmp_path):
    """It reaps its processes itself, and may do so before anybody looks."""
    log = "Subprocess scheduler_0 (pid=5) crashed with exit code -9. Triggering SIGQUIT for cleanup..."
    kept = facts([gone(None)], -9, log, FULL, 190.0)
    assert kept["ended"].startswith(f"{FIRST_OF_ALL} SIGKILL: the kernel ended 2 processes")
    assert kept["exits"] == ["sglang::scheduler_DP0_TP0 (5): SIGKILL after 181.2 s, 9.5 GiB"]
    assert (kept["exit_code"], kept["machine"]) == (-9, FULL)


def test_each_rank_keeps_its_last_lines():
    lines = ["before anybody has a name"]
    for number in range(100):
        lines += [f"[2026-11-22 10:41:37 DP0 TP0] {number}", "  more of it", f"[2026-11-22 10:41:37 DP1 TP1] {number}"]
    lines += ["[rank1]:[W1122 10:41:37] store", "frame #0: c10::Error", "x" * 1000, "[2026-11-22 10:41:38] the end"]
    found = last_lines("\n".join(lines))
    assert list(found) == ["main", "DP0 TP0", "DP1 TP1", "rank1"]
    assert found["main"] == ["before anybody has a name", "[2026-11-22 10:41:38] the end"]
    assert found["DP0 TP0"][0] == "[2026-11-22 10:41:37 DP0 TP0] 60"
    assert found["DP0 TP0"][-1] == "  more of it"
    assert len(found["DP0 TP0"]) == len(found["DP1 TP1"]) == 80
    assert found["rank1"] == ["[rank1]:[W1122 10:41:37] store", "x" * 300]


FIRST, SECOND, THIRD = (f"Traceback (most recent call last):\n  File {n}\n{n}Error: words of {n}\nmore of it\n" for n in "ABC")
HANDLING = "\nDuring handling of the above exception, another exception occurred:\n\n"
CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"


@pytest.mark.parametrize(
    ("log", "told"),
    [
        ("all went well\n", ""),
        (f"loading\n{FIRST}{SECOND}", "AError: words of A"),
        (f"{FIRST}{HANDLING}{SECOND}{CAUSE}{THIRD}noise\n{FIRST}", "CError: words of C"),
        (f"{FIRST}noise\n{SECOND}{HANDLING}{THIRD}", "AError: words of A"),
        ("[rank3]: Traceback (most recent call last):\n[rank3]:   File A\n[rank3]: AError: words", "[rank3]: AError: words"),
        ("Traceback (most recent call last):\n  File A\n", ""),
    ],
)
def test_the_first_error_of_a_log(log, told):
    """Where it is one of a chain, what came of it."""
    assert first_error(log) == told
