"""The house as its imports draw it: floors that nothing climbs, no circle, kernels at the bottom, SGLang behind one door."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

FLOORS = (
    {"kernels", "releases", "environment", "error_notes"},
    {"round_graph"},
    {"adapters"},
    {"model_check", "required"},
    {"config"},
    {"metadata"},
    {"attention", "indexer"},
    {"refusals", "backend"},
    {"multi_step", "start_checks"},
    {"registration"},
    {"plugin", "testing"},
    {"demo", "benchmarks"},
    {"cli"},
    {"__main__"},
)
"""Rooms of nsa_backend, kernels/ and benchmarks/ from the ground up: a room imports rooms of lower floors alone."""

FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
TALKS_TO_SGLANG = {"adapters", "testing", "demo", "benchmarks"}
LONGEST_FILE = 300


def modules() -> dict[str, Path]:
    """Every module by its dotted name, as it is imported."""
    found = {}
    for folder in ("nsa_backend", "kernels", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts if folder == "nsa_backend" else ("nsa_backend", *parts)
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = modules()


def imported(path: Path) -> set[str]:
    """Dotted names of all imports of a file, at its head, in functions and for types alike."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else node.module for name in full}
    return names


IMPORTS = {module: imported(path) for module, path in MODULES.items()}
OURS = {module: {name for name in names if name in MODULES} for module, names in IMPORTS.items()}


def room(module: str) -> str:
    """The first name below nsa_backend; the package itself, which everybody may import, is no room."""
    return ".".join(module.split(".")[1:2])


def test_every_room_has_a_floor():
    assert {room(module) for module in MODULES} - {""} == FLOOR.keys()


@pytest.mark.parametrize("module", sorted(MODULES))
def test_no_import_goes_up_or_sideways(module):
    here = room(module)
    others = {room(name) for name in OURS[module]} - {here, ""}
    assert {other for other in others if FLOOR[other] >= FLOOR[here]} == set()


def test_no_circle_of_files():
    done: set[str] = set()

    def walk(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join((*above, module))
        if module not in done:
            for name in OURS[module]:
                walk(name, (*above, module))
            done.add(module)

    for module in OURS:
        walk(module, ())


def test_kernels_are_a_leaf():
    for module in (name for name in MODULES if room(name) == "kernels"):
        for name in IMPORTS[module]:
            assert name.startswith("nsa_backend.kernels.") or name.split(".")[0] not in ("nsa_backend", "sglang"), module


def test_sglang_is_imported_behind_one_door():
    talking = {room(module) for module, names in IMPORTS.items() if any(name.split(".")[0] == "sglang" for name in names)}
    assert talking <= TALKS_TO_SGLANG
    assert "adapters" in talking


def test_both_generations_have_the_same_files():
    """A reader who knows one finds the other."""
    files = [{path.name for path in (ROOT / "nsa_backend" / "adapters" / name).glob("*.py")} for name in ("nsa", "dsa")]
    assert files[0] == files[1]
