"""What end-to-end runs say of engines that fail, and of ports that others have."""

import socket

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


def test_ports_of_another_run_are_refused():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        with pytest.raises(SystemExit, match=f"port {taken} is taken, perhaps by another run: pass --port, 2500 apart"):
            refuse_taken_ports([taken])
    refuse_taken_ports([taken])
