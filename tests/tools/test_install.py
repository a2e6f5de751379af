"""The package as it is installed: the kernels folder, the wheel, the demo as a command."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from nsa_backend import __main__ as command

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str, cwd: Path = ROOT) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON_INTERPRET", "PYTHONPATH"))}
    done = subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_pypi_kernels_is_not_shadowed_from_the_root_of_a_checkout():
    """SGLang imports PyPI's `kernels`; python puts the current folder first on sys.path."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    where = run(sys.executable, "-c", "import kernels; print(kernels.__file__)").strip()
    assert "site-packages" in where


def test_our_kernels_are_nsa_backend_kernels():
    where = run(sys.executable, "-c", "import nsa_backend.kernels.checks as c; print(c.__file__)", cwd=Path("/")).strip()
    assert Path(where).resolve() == ROOT / "kernels" / "checks.py"


@pytest.mark.slow
def test_wheel_holds_every_module(tmp_path):
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(ROOT))
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {p.relative_to(ROOT).as_posix() for p in (ROOT / "nsa_backend").rglob("*.py")}
    sources |= {f"nsa_backend/kernels/{p.name}" for of in ("*.py", "*.cu", "*.cuh") for p in (ROOT / "kernels").glob(of)}
    assert sources <= names
    assert not any(name.startswith("kernels/") or name == "nsa_backend/kernels/__init__.py" for name in names)
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    code = "import sys; sys.path.insert(0, '.'); import nsa_backend.kernels.metadata as m; print(m.__file__)"
    where = run(sys.executable, "-c", code, cwd=tmp_path / "installed").strip()
    assert Path(where).resolve() == (tmp_path / "installed/nsa_backend/kernels/metadata.py").resolve()


@pytest.mark.slow
def test_sdist_builds_and_installs_without_a_checkout(tmp_path):
    """Into a folder of its own, without reinstalling SGLang; the package that is imported there has everything it reads."""
    run(sys.executable, "-m", "build", "--sdist", "--outdir", str(tmp_path), str(ROOT))
    (sdist,) = tmp_path.glob("*.tar.gz")
    target = tmp_path / "installed"
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), str(sdist))
    code = (
        f"import sys; sys.path.insert(0, {str(target)!r}); import nsa_backend.kernels.join_query as k; "
        "from nsa_backend.attention.auto import TABLE; from nsa_backend.kernels.sparse_verify import WHOLE; "
        "import nsa_backend.__main__ as m; print(k.__file__, TABLE, WHOLE, m.__file__)"
    )
    for path in run(sys.executable, "-W", "ignore", "-c", code, cwd=tmp_path).split()[-4:]:
        assert Path(path).exists()
        assert Path(path).is_relative_to(target)
    entry = next(target.glob("sglang_nsa_backend-*.dist-info")) / "entry_points.txt"
    assert "nsa_backend = nsa_backend.plugin:register" in entry.read_text()


@pytest.mark.parametrize("num_steps", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 6))])
def test_demo_accepts_every_draft(num_steps, capsys):
    """In this process, which has loaded what the command loads; `test_whole_demo.py` starts one."""
    assert command.main(["demo", "--steps", str(num_steps), "--requests", "3", "--tokens", "14"]) == 0
    out = capsys.readouterr().out
    assert f"{num_steps + 1}.00 of {num_steps + 1}" in out
    assert "per-step lengths True" in out
