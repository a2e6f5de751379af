"""Scripts that compile: in a process of their own, as elsewhere in these tests kernels are the interpreter's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def ran(*words: str | Path, cache: Path | None = None) -> subprocess.CompletedProcess:
    """Python with these words, in which Triton compiles, into `cache` where one is given."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache)} if cache else {}
    return subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=False)


def printed_by(script: str, cache: Path | None = None) -> Any:
    """The JSON that a script of this folder prints."""
    done = ran(Path(__file__).with_name(script), cache=cache)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
