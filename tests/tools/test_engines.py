"""What end-to-end runs say of engines that fail, and of ports that others have."""

import socket
import sys

import pytest
import reports
import run_all
from engines import refuse_taken_ports
from ports import ports_of_run
from workloads import CASES


def test_a_failure_is_told_by_its_first_error_and_the_end():
    """What follows a crash, such as ranks that miss each other, fills a log's end."""
    noise = "loading\n" * 900
    log = noise + "Traceback (most recent call last):\nOutOfMemoryError: no room\n" + "rank 1 lost rank 0\n" * 900 + "the end"
    told = reports.excerpt(log)
    assert told.startswith("Traceback (most recent call last):\nOutOfMemoryError: no room\n")
    assert told.endswith("rank 1 lost rank 0\nthe end")
    assert len(told) < 3100
    assert reports.excerpt(noise) == noise[-3000:]
    assert reports.excerpt("short\nValueError: why") == "short\nValueError: why"


def test_ports_of_another_run_are_refused():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        with pytest.raises(SystemExit, match=f"port {taken} is taken, perhaps by another run: pass --port, 2500 apart"):
            refuse_taken_ports([taken])
    refuse_taken_ports([taken])


@pytest.mark.parametrize(("case", "gpus"), [("n3 fa3", 1), ("PD, without CUDA graphs", 2)])
def test_a_run_looks_at_every_port_that_it_will_need(monkeypatch, tmp_path, case, gpus):
    """Of both sides' engines, and of those that are asked about ties (tests/releases/test_side_by_side.py)."""
    looked_at = []

    def refuse(ports: list[int]) -> None:
        looked_at.extend(ports)
        raise SystemExit("taken")

    monkeypatch.setattr(run_all.Case, "runs_here", lambda case: True)
    monkeypatch.setattr(run_all, "refuse_taken_ports", refuse)
    words = ["--gpus", str(gpus), "--port", "14500", "--logs", str(tmp_path), "--cases", case]
    monkeypatch.setattr(sys, "argv", ["run_all.py", str(tmp_path / "out.json"), *words])
    with pytest.raises(SystemExit, match="taken"):
        run_all.main()
    assert looked_at == ports_of_run([one for one in CASES if one.name == case] * 2, 14500)
