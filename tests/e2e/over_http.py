"""Start the server as the README shows it, ask it over HTTP, and check accept length and the log.

python tests/e2e/over_http.py OUT.json [--port 32000]
"""

import argparse
import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from engine_options import new_tokens
from workloads import WORKLOADS

from nsa_backend.benchmarks.checkpoints import faithful
from nsa_backend.benchmarks.reports.report import environment
from nsa_backend.benchmarks.servers.generation import accept_length
from nsa_backend.benchmarks.servers.server import Server


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--port", type=int, default=32000)
    args = parser.parse_args()
    started = time.time()
    with ExitStack() as resources:
        work = Path(resources.enter_context(TemporaryDirectory()))
        server = resources.enter_context(Server("ours", faithful.write(work / "checkpoint"), args.port, 3, work / "server.log"))
        server.wait()
        ready = time.time() - started
        answers = server.generate(WORKLOADS["8x300"]()[0], new_tokens(3))[1]
        log = server.log.read_text()
    accept = [round(accept_length(a["meta_info"]["spec_correct_drafts_histogram"]), 4) for a in answers]
    lines = [line for line in log.splitlines() if "nsa_backend" in line and "is active" in line]
    report = {
        "environment": environment(),
        "accept": accept,
        "mean": sum(accept) / len(accept),
        "log": lines,
        "seconds_to_ready": round(ready, 1),
    }
    args.out.write_text(json.dumps(report, indent=1))
    print(json.dumps(report))
    return 0 if report["mean"] >= 3.9 and len(lines) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
