"""Mutation test of the package: change one thing at a time, and see whether a test notices.

    python tests/mutation/run.py record COVERING.json [TEST ...]    # which tests run which function
    python tests/mutation/run.py mutate COVERING.json RESULT.json [FILE ...]
    python tests/mutation/run.py again COVERING.json RESULT.json    # what was not killed, once more

A mutant runs in a child that this process forks with torch and SGLang imported, in a copy of the tree, with the quickest
covering test first, and dies at the first that fails. docs/contributing.md says how to read what comes out.
"""

from __future__ import annotations

import argparse
import compileall
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, fields
from importlib import import_module
from pathlib import Path
from typing import Any

from covering import SOURCES, Covering
from mutants import Mutant, mutants

ROOT = Path(__file__).resolve().parents[2]
NOT_SERVED = ("cli", "demo", "testing", "benchmarks")
"""Folders of the package that no server runs."""

STARTING_SECONDS = 60
"""Beside three times what its tests took: what a mutant may take before it counts as one that hangs."""

QUICKLY = ("-q", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:unraisableexception")

os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
os.environ["TRITON_INTERPRET"] = "1"
os.environ["TORCHDYNAMO_DISABLE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"


def import_what_takes_long() -> None:
    """All but the package and its tests: what `nsa_backend.testing.process.start_process` imports from SGLang."""
    loader = types.ModuleType("sgl_kernel.load_utils")
    loader._load_architecture_specific_ops = loader._preload_cuda_library = lambda: None
    sys.modules["sgl_kernel.load_utils"] = loader
    for name in ("pytest", "hypothesis.strategies", "sglang.srt.speculative.eagle_worker_v2", "sglang.srt.plugins"):
        import_module(name)
    gc.freeze()  # children need not look through all of it


def copy_tree(folder: Path) -> Path:
    """The tracked and new files of the checkout, compiled."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file() or (ROOT / name).is_symlink():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)  # the package has two
    compileall.compile_dir(folder, quiet=1)
    return folder


def run_tests(
    tree: Path, arguments: list[str], seconds: float, plugin: Callable | None = None, output: str = os.devnull
) -> str:
    """Run pytest in a forked child; returns "passed", "failed" or "timed out"."""
    child = os.fork()
    if not child:
        code = 1
        try:
            code = _in_child(tree, arguments, plugin, output)
        finally:  # SystemExit too: a child must not go on with what is its parent's
            sys.stdout.flush()
            os._exit(code)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return "passed" if status == 0 else "failed"
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timed out"


def _in_child(tree: Path, arguments: list[str], plugin: Callable | None, output: str) -> int:
    os.setsid()
    out = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    sys.dont_write_bytecode = True  # a mutant of the same second and size would be taken for the one before it
    hypothesis = sys.modules["hypothesis"]
    generate = (hypothesis.Phase.explicit, hypothesis.Phase.generate)  # a smaller example of a failure is of no use here
    hypothesis.settings.register_profile("mutants", phases=generate, database=None, derandomize=True)
    hypothesis.settings.load_profile("mutants")
    return int(sys.modules["pytest"].main([*QUICKLY, *arguments], [plugin()] if plugin else []))


def record(tree: Path, out: Path, tests: list[str]) -> None:
    """Run `tests`, or all that need no GPU, and write what covers what, beside what `out` has already; every one must pass."""
    from covering import Recorder

    class Saving(Recorder):
        def pytest_sessionfinish(self):
            self.save(out)

    found = run_tests(tree, tests, 7200, lambda: Saving(tree), f"{out}.log")
    if found != "passed":
        raise SystemExit(f"the tests {found} without any mutant: see {out}.log")


def sources(tree: Path) -> list[str]:
    """Files to mutate: what a server runs."""
    found = [path.relative_to(tree) for folder in SOURCES for path in sorted((tree / folder).rglob("*.py"))]
    served = (path for path in found if path.stem not in ("__init__", "__main__") and path.parts[1] not in NOT_SERVED)
    return [path.as_posix() for path in served]


class Trial:
    """Tries mutants in one tree, with the tests that cover each."""

    def __init__(self, tree: Path, covering: Covering, budget: float):
        """`budget` is how many seconds of tests to run for one mutant, the quickest first; 0 for all that cover it."""
        self._tree, self._covering, self._budget = tree, covering, budget

    def outcome(self, mutant: Mutant) -> dict[str, Any]:
        """What became of `mutant`: killed, survived, timed out or not covered, and what it changes."""
        path = self._tree / mutant.path
        source = path.read_text()
        tests = self._covering.tests(mutant.path, source, mutant.line, self._budget)
        changed, outcome = mutant.apply(source), "not covered"
        if tests:
            path.write_text(changed)
            for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
                stale.unlink()
            seconds = STARTING_SECONDS + 3 * self._covering.seconds(tests)
            found = run_tests(self._tree, ["-x", *tests], seconds)
            outcome = {"failed": "killed", "passed": "survived"}.get(found, found)
            path.write_text(source)
        return {**asdict(mutant), "outcome": outcome, "tests": len(tests), "change": difference(source, changed)}


def mutate(tree: Path, trial: Trial, out: Path, files: list[str], every: int, minutes: float) -> None:
    """Try mutants until they or the minutes are used up, and write each outcome.

    Args:
        files: paths from the root of the checkout; every file that a server runs where there is none.
        every: try one mutant of so many of each file, chosen at random with a fixed seed.
    """
    end, results = time.monotonic() + 60 * minutes, []
    for name in files or sources(tree):
        found = list(mutants(name, (tree / name).read_text()))
        chosen = random.Random(name).sample(found, -(-len(found) // every))
        for mutant in sorted(chosen, key=lambda m: m.line):
            if time.monotonic() > end:
                break
            results.append(trial.outcome(mutant))
            out.write_text(json.dumps(results, indent=1))
        outcomes = Counter(result["outcome"] for result in results if result["path"] == name)
        sys.stderr.write(f"{name}: {len(chosen)} of {len(found)} mutants, {dict(outcomes)}\n")


def again(trial: Trial, out: Path) -> None:
    """Try those that were not killed once more, after tests or the budget have changed; the sources must be the same."""
    results = json.loads(out.read_text())
    for place, result in enumerate(results):
        if result["outcome"] != "killed":
            results[place] = trial.outcome(Mutant(*(result[field.name] for field in fields(Mutant))))
            out.write_text(json.dumps(results, indent=1))


def difference(source: str, changed: str) -> list[str]:
    """What the mutant says instead, and what it says it instead of."""
    before, after = source.splitlines(), changed.splitlines()
    first = next(i for i, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1])
    return [before[first].strip(), after[first].strip()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "mutate", "again"))
    parser.add_argument("covering", type=Path)
    parser.add_argument("paths", nargs="*", help="record: tests; mutate: the result, then files to mutate; again: the result")
    parser.add_argument("--every", type=int, default=1, help="try one mutant of so many")
    parser.add_argument("--minutes", type=float, default=600, help="begin no mutant after so many")
    parser.add_argument("--budget", type=float, default=0, help="seconds of tests for one mutant; 0 for all")
    args = parser.parse_args()
    covering, (out, *files) = args.covering.resolve(), args.paths or [""]
    import_what_takes_long()
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_tree(Path(folder).resolve())
        if args.what == "record":
            record(tree, covering, args.paths)
            return
        trial = Trial(tree, Covering(covering), args.budget)
        if args.what == "mutate":
            mutate(tree, trial, Path(out).resolve(), files, args.every, args.minutes)
        else:
            again(trial, Path(out).resolve())


if __name__ == "__main__":
    main()
