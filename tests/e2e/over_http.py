"""Start the server as the README shows it, ask it over HTTP, and check accept length and the log.

python tests/e2e/over_http.py OUT.json [--port 32000]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "benchmarks")]
import faithful_checkpoint
from bench_common import accept_length, environment
from workloads import WORKLOADS, new_tokens


def command(checkpoint: Path, port: int) -> list[str]:
    """The README's command; the last line is what a checkpoint without a tokenizer needs."""
    return [
        sys.executable, "-m", "sglang.launch_server", "--model-path", str(checkpoint),
        "--attention-backend", "nsa", "--nsa-decode-backend", "fa3", "--kv-cache-dtype", "bfloat16",
        "--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3",
        "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4", "--port", str(port),
        "--skip-tokenizer-init", "--grammar-backend", "none", "--mem-fraction-static", "0.3", "--max-running-requests", "32",
    ]  # fmt: skip


def post(port: int, body: dict) -> list[dict]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def wait_until_ready(port: int, server: subprocess.Popen, seconds: int = 240) -> None:
    for _ in range(seconds):
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with {server.returncode}")
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise TimeoutError("the server did not become ready")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--port", type=int, default=32000)
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp())
    log = work / "server.log"
    started = time.time()
    with log.open("w") as stream:
        checkpoint = faithful_checkpoint.write(work / "checkpoint")
        server = subprocess.Popen(command(checkpoint, args.port), stdout=stream, stderr=subprocess.STDOUT)
        try:
            wait_until_ready(args.port, server)
            ready = time.time() - started
            sampling = {"temperature": 0, "max_new_tokens": new_tokens(3), "ignore_eos": True}
            answers = post(args.port, {"input_ids": WORKLOADS["8x300"]()[0], "sampling_params": sampling})
        finally:
            server.terminate()
            server.wait(timeout=30)
            print(log.read_text()[-1500:])
    accept = [round(accept_length(a["meta_info"]["spec_correct_drafts_histogram"]), 4) for a in answers]
    lines = [line for line in log.read_text().splitlines() if "nsa_backend" in line and "is active" in line]
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
