"""Scripts beside these tests, each run in a process of its own: what it answers, as JSON, to what it is asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def answers(script: str, asked: list, *arguments: str, folder: Path | None = None, **environment: str) -> list[Any]:
    """One for each that is asked; the process sees no GPU, and has our plugin unless `environment` says otherwise."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name(script)), *arguments], input=json.dumps(asked),
        env=os.environ | {"NSA_BACKEND_DISABLE": "0", "CUDA_VISIBLE_DEVICES": ""} | environment, cwd=folder,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == len(asked)
    return found
