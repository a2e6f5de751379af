"""`python -m nsa_backend`: help with an example each, exit codes, and what doctor and plot print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from nsa_backend import __main__ as command
from nsa_backend import __version__, releases
from nsa_backend.adapters import shared
from nsa_backend.attention.implementations import IMPLEMENTATIONS
from nsa_backend.cli import doctor
from nsa_backend.environment import SWITCHES

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON_INTERPRET", "NSA_BACKEND"))}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "nsa_backend", *arguments],
        env=clean | environment, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", command.COMMANDS)
def test_help_shows_an_example_that_parses(name, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main([name, "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert f"example: python -m nsa_backend {name}" in out


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["demo", "--steps", "1"], ["demo", "--requests", "0"]])
def test_bad_arguments_exit_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(arguments)
    assert stop.value.code == 2
    assert "usage: python -m nsa_backend" in capsys.readouterr().err


@pytest.mark.slow
def test_doctor_as_json_without_a_gpu():
    done = run("doctor", "--json", NSA_BACKEND_CHECK="1")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["nsa_backend"] == __version__
    assert report["problems"] == []
    assert report["packages"]["sglang"]["version"] == shared.version("sglang")
    assert report["packages"]["sgl-deep-gemm"]["version"]
    assert "front" in report["packages"]["nvidia-cutlass-dsl"]["for"]
    assert set(report["implementations"]) == set(IMPLEMENTATIONS)
    assert set(report["environment"]) == set(SWITCHES)
    assert {"nsa_backend.refusals.refuse_unsupported"} < {check["asked_by"] for check in report["start_checks"]}
    assert report["environment"]["NSA_BACKEND_CHECK"]["value"] == "1"
    if report["gpu"]["name"] is None:
        assert report["implementations"]["torch"]["bfloat16"] is None
        assert "no GPU" in report["implementations"]["fa3"]["bfloat16"]
        assert "made for the rows of a prompt" not in report["implementations"]["sparse_prefill"]["bfloat16"]


@pytest.fixture
def told(monkeypatch, capsys):
    """Returns a function of the doctor's words that gives what it prints."""
    monkeypatch.setattr("logging.disable", lambda level: None)  # the command is the end of its process, and this is not
    for name in SWITCHES:
        monkeypatch.delenv(name, raising=False)

    def printed(*words: str) -> str:
        with warnings.catch_warnings():
            assert command.main(["doctor", *words]) == 0
        return " ".join(capsys.readouterr().out.split())

    return printed


def test_the_doctor_says_in_a_few_lines_what_this_machine_can_run(told, monkeypatch):
    monkeypatch.setenv("NSA_BACKEND_REQUIRED", "1")
    out = told()
    assert "kernels for 128 heads on a bfloat16 KV cache: none" in out
    assert "nothing is served without a GPU" in out
    assert "environment: NSA_BACKEND_REQUIRED=1" in out
    assert "a start is stopped when" not in out
    monkeypatch.setattr(doctor, "_gpu", lambda adapter: {"name": "NVIDIA H200", "driver": "1", "sm": 90})
    monkeypatch.setattr(doctor, "_implementations", lambda heads, gpu: {
        "fa3": {"bfloat16": None, "float8_e4m3fn": "no"}, "sparse_prefill": {"bfloat16": None, "float8_e4m3fn": None},
        "torch": {"bfloat16": None, "float8_e4m3fn": None},
    })  # fmt: skip
    out = told("--heads", "16")
    assert "kernels for 16 heads on a bfloat16 KV cache: fa3, sparse_prefill (prefill) kernels" in out
    assert "float8_e4m3fn KV cache: sparse_prefill (prefill) environment" in out


def test_the_doctor_tells_all_where_it_is_asked_to(told):
    out = told("--all")
    for word in (*IMPLEMENTATIONS, *SWITCHES, "sglang-kernel", "the plugin takes over: the attention backend nsa"):
        assert word in out


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({"NSA_BACKEND_DISABLE": "1"}, "NSA_BACKEND_DISABLE=1: the plugin does nothing"),
        ({"NSA_BACKEND_DISABLE": "yes"}, "NSA_BACKEND_DISABLE must be 0 or 1, and it is 'yes'"),
    ],
)
def test_doctor_exits_with_1_where_the_plugin_would_not_load(monkeypatch, environment, problem):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    report = doctor.examine(128)
    assert problem in report["problems"]
    assert report["plugin"]["takes_over"] == []


def test_doctor_names_a_wrong_package_and_another_host(monkeypatch):
    real = shared.version
    monkeypatch.setattr(shared, "version", lambda name: "0.0.1" if name == "sgl-deep-gemm" else real(name))
    monkeypatch.setattr(releases, "version", lambda name: "0.6.0")
    problems = "\n".join(doctor.examine(128)["problems"])
    assert "it supports SGLang <=0.5.12.post1,>=0.5.12 or <=0.5.23,>=0.5.17 and this is 0.6.0" in problems
    assert "sgl-deep-gemm 0.0.1 is installed and SGLang" in problems


def test_plot_draws_every_figure_from_the_committed_results(tmp_path):
    done = run("plot", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "attention.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "attention.svg").read_text().count("<path") > 20
    assert (ROOT / "docs/figures/attention.svg").exists()


def test_plot_says_which_file_is_missing(tmp_path):
    done = run("plot", "--results", str(tmp_path), "--out", str(tmp_path))
    assert done.returncode == 1
    assert "auto_0_5_23_h200.json does not exist: pass the folder with the result files as --results" in done.stderr
