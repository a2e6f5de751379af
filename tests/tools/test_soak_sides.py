"""A soak run of a pair of servers over HTTP, against stand-ins for them, and sides in processes of their own."""

import json
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import soak
import soak_server
import soak_side
import soak_traffic
from pd_servers import DECODE
from soak_answers import Template

SERVER = Path(__file__).resolve().parents[1] / "support" / "stand_in_of_soak.py"


@pytest.fixture
def serve_quickly(monkeypatch, tmp_path):
    """Returns a function of (side, seconds a server takes to its first token) that runs that side and returns its report."""
    monkeypatch.chdir(tmp_path)
    for name, seconds in (("TAIL_SECONDS", 8.0), ("DRAIN_SECONDS", 2.0), ("IDLE_SECONDS", 0.1), ("LAST_SECONDS", 0.5)):
        monkeypatch.setattr(soak_side, name, seconds)
    monkeypatch.setattr(soak_side, "SAMPLE_SECONDS", 0.2)
    monkeypatch.setattr(soak_side, "make_templates", lambda seed: [Template(i, (2,) * 9, 8 * i + 8) for i in range(4)])
    monkeypatch.setattr(soak_side.faithful, "write", lambda path: path)
    everyone = SimpleNamespace(get=lambda pid, default: pid)  # each process holds as many MiB as its number says
    monkeypatch.setattr(soak_server, "by_process_mib", lambda seconds: everyone)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGINT)}

    def run(side: str, delay: float, port: int, topology: str = "one", minutes: float = 0.23) -> dict:
        def commands(checkpoint: Path, port: int) -> list[list[str]]:
            ports = [port, port + DECODE][: len(served.servers)]
            return [[sys.executable, str(SERVER), str(port), str(delay), side] for port in ports]

        served = soak_side.TOPOLOGIES[topology]
        monkeypatch.setitem(soak_side.TOPOLOGIES, topology, replace(served, commands=commands))
        out = tmp_path / f"{side}.json"
        options = ["--side", side, "--minutes", str(minutes), "--port", str(port), "--topology", topology]
        monkeypatch.setattr(sys, "argv", ["soak_side.py", str(out), *options])
        soak_side.main()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        return json.loads(out.read_text())

    return run


def test_a_pair_of_servers_gets_every_request_and_every_abort(serve_quickly, monkeypatch, tmp_path):
    """The load lasts until every kind of request was seen, and until both servers have read all that was sent."""

    def asked_by_port() -> dict[int, set]:
        asked = [json.loads(line) for line in (tmp_path / "asked").read_text().splitlines()]
        return {
            port: {(a["rid"], a.get("bootstrap_room")) for at, a in asked if at == port} for port in (23840, 23840 + DECODE)
        }

    servers = []

    def load(run: soak_side.Soak) -> None:
        deadline = time.monotonic() + 60
        while not any(len(sample["by_server"]) == len(run.servers) for sample in run.samples) and time.monotonic() < deadline:
            time.sleep(0.05)  # stand-ins are there at once, before anybody has sampled both
        run.load = (time.monotonic(), time.monotonic())
        servers.extend(server.pid for server in run.servers)
        run.traffic.start(run.templates, run.references)
        while {record.kind for record in run.traffic.records} < set(soak_traffic.SHARES) and time.monotonic() < deadline:
            time.sleep(0.05)
        run.traffic.drain(deadline)
        while len(set(map(frozenset, asked_by_port().values()))) > 1 and time.monotonic() < deadline:
            time.sleep(0.05)

    monkeypatch.setattr(soak_side, "load", load)
    monkeypatch.setattr(soak_traffic, "SHARES", {"finished": 0.6, "aborted": 0.2, "closed": 0.2})
    found = serve_quickly("ours", 0.02, 23840, "pd", minutes=2)
    assert found["references"] == 4
    assert found["requests"]["failed"] == 0
    assert all(found["requests"][kind] for kind in ("finished", "aborted", "closed"))
    assert len(found["active"]) == found["servers"] == 2
    assert found["held"]["before_mib"] == sum(servers)
    assert [(name, of_one["held"]["before_mib"]) for name, of_one in found["by_server"].items()] == [
        ("prefill", servers[0]),
        ("decode", servers[1]),
    ]
    assert not [problem for problem in found["problems"] if "lines of the log say" in problem]
    prefill, decode = asked_by_port().values()
    assert prefill == decode
    assert any(room is None for _, room in prefill)  # an abort
    rooms = [room for _, room in prefill if room is not None]
    assert len(set(rooms)) == len(rooms)


SIDE = """
import json, pathlib, signal, sys, time
out = pathlib.Path(sys.argv[1])
options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
def cut(*_):
    out.write_text(json.dumps({"options": options, "cut": True}))
    sys.exit(1)
signal.signal(signal.SIGTERM, cut)
print("ready", flush=True)
time.sleep(float(pathlib.Path(__file__).with_name("seconds").read_text()))
out.write_text(json.dumps({"options": options, "began": time.time()}))
"""


class TestSides:
    @pytest.fixture
    def args(self, monkeypatch, tmp_path):
        (tmp_path / "soak_side.py").write_text(SIDE)
        (tmp_path / "seconds").write_text("0.2")
        monkeypatch.setattr(soak, "HERE", tmp_path)
        monkeypatch.setattr(soak, "GRACE_SECONDS", 0.0)
        asked = {"gpus": ["2", "3"], "minutes": 0.1, "port": 33000, "seed": 4, "topology": "one", "faults": None}
        asked |= {"sides": ["ours", "builtin"]}
        return SimpleNamespace(out=tmp_path / "out.json", **asked)

    @pytest.mark.parametrize("sides", [["ours", "builtin"], ["ours", "three_graphs", "builtin"]])
    def test_as_many_gpus_as_sides_serve_at_once(self, args, sides):
        args.sides, args.gpus = sides, ["1", "2", "3"][: len(sides)]
        found = {side: report["options"] for side, report in soak.run(args).items()}
        assert {side: options["--gpu"] for side, options in found.items()} == dict(zip(sides, args.gpus, strict=True))
        assert [options["--side"] for options in found.values()] == sides
        assert len({options["--port"] for options in found.values()}) == len(sides)
        assert {(options["--seed"], options["--minutes"]) for options in found.values()} == {("4", "0.1")}

    def test_one_gpu_serves_in_turns(self, args):
        args.gpus = ["1"]
        reports = soak.run(args)
        assert [reports[s]["options"]["--gpu"] for s in ("ours", "builtin")] == ["1", "1"]
        assert reports["builtin"]["began"] - reports["ours"]["began"] >= 0.2

    def test_a_late_side_is_ended_and_writes_what_it_has_and_one_that_dies_leaves_nothing(self, args, tmp_path):
        (tmp_path / "seconds").write_text("60")
        args.minutes = 0.03
        began = time.monotonic()
        assert all(report["cut"] for report in soak.run(args).values())
        assert time.monotonic() - began < 20
        (tmp_path / "soak_side.py").write_text("raise SystemExit(9)")
        assert soak.run(args) == {"ours": None, "builtin": None}


def test_what_the_built_in_backend_cannot_serve_is_run_without_it(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["soak.py", str(tmp_path / "out.json"), "--topology", "dcp", "--gpus", "0,1"])
    with pytest.raises(SystemExit, match="2"):
        soak.main()
    assert "--topology dcp is what SGLang's own backend lacks: name the others, --sides ours" in capsys.readouterr().err
