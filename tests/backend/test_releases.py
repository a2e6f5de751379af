"""Which releases are served: the table, the requirement of the package, and the adapters behind it."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from nsa_backend.adapters.contract import OFFERED
from nsa_backend.releases import generation_of

ROOT = Path(__file__).resolve().parents[2]
SERVED = {
    "nsa": ("0.5.12", "0.5.12.post1"),
    "dsa": ("0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23"),
}
OTHERS = (
    "0.5.11", "0.5.13", "0.5.13.post1", "0.5.14", "0.5.15", "0.5.15.post1", "0.5.16", "0.5.17rc1", "0.5.24", "0.6.0", "main",
)  # fmt: skip


@pytest.mark.parametrize(("folder", "release"), [(a, r) for a, releases in SERVED.items() for r in releases])
def test_a_release_has_its_adapter(folder, release):
    assert generation_of(release).adapter == folder


@pytest.mark.parametrize("release", OTHERS)
def test_other_releases_have_none(release):
    assert generation_of(release) is None


def test_the_requirement_allows_what_is_served_and_nothing_else():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (requirement,) = [r for r in map(Requirement, declared) if r.name == "sglang"]
    for release in (*SERVED["nsa"], *SERVED["dsa"]):
        assert requirement.specifier.contains(release), release
    for release in (o for o in OTHERS if "rc" not in o and o != "main"):  # pip leaves pre-releases alone
        assert not requirement.specifier.contains(release), release


def offered(folder: str) -> set[str]:
    """Names that an adapter defines, read without importing it: it belongs to another release of SGLang."""
    tree = ast.parse((ROOT / f"nsa_backend/adapters/{folder}/adapter.py").read_text())
    names: set[str] = set()
    (adapter,) = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    for node in adapter.body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                names |= {leaf.id for leaf in ast.walk(target) if isinstance(leaf, ast.Name)}
        elif isinstance(node, ast.AnnAssign):
            names.add(node.target.id)
    return names


@pytest.mark.parametrize("folder", SERVED)
def test_every_adapter_offers_every_name(folder):
    assert offered(folder) >= OFFERED
