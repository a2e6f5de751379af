"""What end-to-end runs say of engines that fail, and of ports that others have."""

import socket
from pathlib import Path

import engines
import pytest
import reports
from engines import refuse_taken_ports


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


def test_ports_of_another_run_are_refused(monkeypatch):
    monkeypatch.setattr(engines, "HANDED_OUT", Path("no such file"))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        with pytest.raises(SystemExit, match=f"port {taken} is taken, perhaps by another run: pass --port, 2500 apart"):
            refuse_taken_ports([taken])
    refuse_taken_ports([taken])


def test_ports_that_linux_hands_out_are_refused(tmp_path, monkeypatch):
    """A server comes to its port minutes after it was asked about."""
    handed_out = tmp_path / "range"
    handed_out.write_text("32768\t60999\n")
    monkeypatch.setattr(engines, "HANDED_OUT", handed_out)
    with pytest.raises(
        SystemExit, match="port 34010 is one that this machine hands out to others: pass a --port 2500 below 32768"
    ):
        refuse_taken_ports([32000, 34010])
