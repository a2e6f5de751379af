"""Which tests run which function of the package, and how long each takes: recorded once, on the unchanged source."""

from __future__ import annotations

import ast
import json
import math
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import coverage
import pytest

SOURCES = ("nsa_backend", "kernels")

VARIANTS, QUICK = 4, 0.5
"""Parameter sets of one test function that are run for a mutant: all that take less than so many seconds, and some others."""


class Recorder:
    """A pytest plugin: one coverage context a test."""

    def __init__(self, root: Path):
        self.root = root
        folders = [str(root / name / "*") for name in SOURCES]
        self.coverage = coverage.Coverage(data_file=None, include=folders, branch=False)
        self.seconds: dict[str, float] = defaultdict(float)
        self.coverage.start()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item):
        self.coverage.switch_context(item.nodeid)
        yield
        self.coverage.switch_context("")

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] += report.duration

    def save(self, path: Path) -> None:
        """Write {"seconds": {test: seconds}, "tests": {file: {function: [test, ...]}}}."""
        self.coverage.stop()
        data = self.coverage.get_data()
        tests: dict[str, dict[str, list[str]]] = {}
        for file in data.measured_files():
            source = Path(file).resolve().relative_to(self.root).as_posix()
            spans, found = functions(Path(file).read_text()), defaultdict(set)
            for line, contexts in data.contexts_by_lineno(file).items():
                found[enclosing(spans, line)].update(filter(None, contexts))
            tests[source] = {name: sorted(names) for name, names in found.items()}
        known = json.loads(path.read_text()) if path.exists() else {"seconds": {}, "tests": {}}
        for file, names in known["tests"].items():
            for name, others in names.items():
                here = tests.setdefault(file, {})
                here[name] = sorted({*here.get(name, ()), *others})
        path.write_text(json.dumps({"seconds": known["seconds"] | self.seconds, "tests": tests}))


def functions(source: str) -> list[tuple[int, int, str]]:
    """(first line of the body, last line, name) of every function that is not inside another."""
    spans, nodes = [], list(ast.parse(source).body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef):
            spans.append((node.lineno, node.end_lineno, f"{node.name}:{node.lineno}"))
        elif isinstance(node, ast.ClassDef):
            nodes += node.body
    return spans


def enclosing(spans: list[tuple[int, int, str]], line: int) -> str:
    """The name of the function that `line` is in; "" at module level."""
    return next((name for first, last, name in spans if first <= line <= last), "")


class Covering:
    """The recorded answer to: which tests could notice a change of this line?"""

    def __init__(self, path: Path):
        recorded: dict[str, Any] = json.loads(path.read_text())
        self._seconds, self._tests = recorded["seconds"], recorded["tests"]

    def tests(self, path: str, source: str, line: int, budget: float = 0) -> list[str]:
        """Tests that run the function around `line`, or anything of the file at module level; the quickest first.

        Of a slow test function `VARIANTS` sets of parameters are taken, and of all tests what fits into `budget` seconds,
        where there is one.
        """
        of_file = self._tests.get(path, {})
        name = enclosing(functions(source), line)
        of_function = of_file.get(name) if name else None
        # Of a compiled kernel no line is seen: its file's tests are those of the functions that launch it.
        found = of_function or {test for tests in of_file.values() for test in tests}
        variants: Counter[str] = Counter()
        chosen, left = [], budget or math.inf
        for test in sorted(found, key=lambda test: (self._seconds[test], test)):
            function = test.partition("[")[0]
            variants[function] += self._seconds[test] > QUICK
            left -= self._seconds[test]
            if variants[function] <= VARIANTS and (left >= 0 or not chosen):
                chosen.append(test)
        return chosen

    def seconds(self, tests: list[str]) -> float:
        return sum(self._seconds[test] for test in tests)
