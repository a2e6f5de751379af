"""Kernels in CUDA C++ that an earlier process has compiled."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from nsa_backend.kernels import cuda_source

MACROS = {"VALUE": 3}


@pytest.fixture
def source(tmp_path, monkeypatch) -> Path:
    """A kernel with a header, in a process that has SGLang's caches in a folder of their own."""
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "caches"))
    monkeypatch.setattr(cuda_source, "_told", set())
    (tmp_path / "added.cuh").write_text("constexpr int ADDED = 1;\n")
    source = tmp_path / "writes.cu"
    source.write_text('#include "added.cuh"\nextern "C" __global__ void writes(int* to) { *to = VALUE + ADDED; }\n')
    return source


@pytest.fixture
def compiles(monkeypatch) -> list[dict]:
    """Macros of what is compiled."""
    original, found = cuda_source.compiled, []
    monkeypatch.setattr(cuda_source, "compiled", lambda source, macros: (found.append(macros), original(source, macros))[1])
    return found


def files(source: Path) -> list[Path]:
    return [path for path in (source.parent / "caches").rglob("*") if path.is_file()]


def test_what_one_process_has_compiled_the_next_one_reads(source, compiles):
    cubin, _ = cuda_source.compiled(source, MACROS)
    assert [cuda_source.kept(source, MACROS) for _ in range(3)] == [cubin] * 3
    assert compiles == [MACROS] * 2  # one of them above
    assert len(files(source)) == 1


@pytest.mark.parametrize("change", ["macro", "source", "header", "compiler"])
def test_what_is_made_from_something_else_is_compiled(source, compiles, monkeypatch, change):
    before, macros = cuda_source.kept(source, MACROS), MACROS
    if change == "macro":
        macros = {"VALUE": 4}
    elif change == "compiler":
        monkeypatch.setattr("cuda.bindings.nvrtc.nvrtcVersion", lambda: (0, 99, 0))
    else:
        file = source if change == "source" else source.parent / "added.cuh"
        file.write_text(file.read_text().replace("ADDED", "ADDED + 0") if change == "source" else "constexpr int ADDED = 2;\n")
    after = cuda_source.kept(source, macros)
    assert len(compiles) == len(files(source)) == 2
    assert (after == before) == (change in ("source", "compiler"))  # which compute the same


@pytest.mark.parametrize("left", [0, 40, -1])
def test_a_damaged_file_is_written_anew(source, compiles, left):
    whole = cuda_source.kept(source, MACROS)
    (file,) = files(source)
    file.write_bytes(file.read_bytes()[:left])
    assert [cuda_source.kept(source, MACROS) for _ in range(2)] == [whole, whole]
    assert len(compiles) == 2


@pytest.mark.parametrize("at", ["the folder", "the file"])
def test_where_nothing_can_be_kept_the_log_says_so_once(source, compiles, caplog, at):
    caches = source.parent / "caches"
    if at == "the folder":
        caches.write_text("no folder")
    else:  # a folder has its name
        whole = cuda_source.kept(source, MACROS)
        (file,) = files(source)
        file.unlink()
        file.mkdir()
    with caplog.at_level(logging.WARNING, cuda_source.__name__):
        found = [cuda_source.kept(source, MACROS) for _ in range(2)]
    assert found[0] == found[1]
    assert at == "the folder" or found[0] == whole
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith(
        f"nsa_backend: kernels in CUDA C++ are compiled at every start, as {caches / 'nsa_backend'} cannot keep them ("
    )
    assert said.endswith("set SGLANG_CACHE_DIR to a folder with room that this user may write to")
    assert not files(source)


def test_no_folder_named_is_sglangs_own(monkeypatch):
    monkeypatch.delenv("SGLANG_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cuda_source._folder() == Path("/home/somebody/.cache/sglang/nsa_backend")
