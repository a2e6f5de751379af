"""Any supported SGLang release in this process, with the plugin loaded, on a machine without a GPU.

The tests here run on every release that the package serves, each in an environment of its own (`make test-hosts`). They hold
what a release must keep for the backend to be right under it.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import sys
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest

from nsa_backend.testing.process import start_process

start_process()

import torch  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

from nsa_backend import releases  # noqa: E402
from nsa_backend.adapters import shared  # noqa: E402
from nsa_backend.adapters.installed import adapter  # noqa: E402
from nsa_backend.releases import installed, round_graph_problem  # noqa: E402

OF_THE_OTHER_GENERATION = "test_nsa_*.py" if "dsa" in adapter.BACKEND_NAMES else "test_dsa_*.py"
collect_ignore_glob = [OF_THE_OTHER_GENERATION]
"""What only one generation has is in files of its own; elsewhere they are not collected, and the summary says so."""
if not hasattr(sys.modules.get("sglang.srt.runtime_context"), "_derived_widths"):
    # SGLang's model classes are built as the newest release lets one.
    collect_ignore_glob += [
        "test_dsa_ranks.py",
        "test_dsa_faithful_checkpoint.py",
        "test_dsa_eagle3_checkpoint.py",
    ]
    # Before it, HiCache has no index keys of drafts, and a decode server turns no positions into slots.
    collect_ignore_glob += ["test_dsa_hicache.py", "test_dsa_disaggregation.py"]
    # Nor are there drafts under pipeline parallelism outside PD.
    collect_ignore_glob += ["test_dsa_pipeline_drafts.py"]
if "enable_prefill_cp" in {rule.attribute for rule in adapter.REFUSED}:
    collect_ignore_glob.append("test_dsa_prefill_cp*.py")
if installed() != "0.5.23":
    # Rounds under DP attention and of a decode server are three graphs there, and a request counts its slots elsewhere.
    collect_ignore_glob += ["test_dsa_round_ranks*.py", "test_dsa_round_pages.py", "test_dsa_round_pair*.py"]
    # SGLang captures one graph of target_verify a size; its layers are others, and no rank has a part of a request's KV.
    collect_ignore_glob += ["test_dsa_round_short.py", "test_dsa_layer_front*.py", "test_dsa_divided_context*.py"]
    # No tiles of experts were measured with its Triton.
    collect_ignore_glob += ["test_dsa_moe_configs.py"]
if round_graph_problem() is not None:
    collect_ignore_glob += ["test_dsa_round_*.py"]


def pytest_terminal_summary(terminalreporter):
    files = sorted(path.name for path in Path(__file__).parent.glob(OF_THE_OTHER_GENERATION))
    terminalreporter.write_line(
        f"SGLang {installed()} has nothing that these are about, `make test-hosts` runs them on a release that does: "
        + ", ".join(files)
    )


@pytest.fixture(autouse=True, scope="session")
def _versions_are_read_once():
    """What is installed stays so; a check of a server's options asks six times, which is a tenth of the time that it takes."""
    once = functools.cache(importlib.metadata.version)
    with pytest.MonkeyPatch.context() as patch:
        for module in (releases, shared):
            patch.setattr(module, "version", once)
        yield


@pytest.fixture(scope="module")
def sampled_rounds():
    """Sampled rounds in one graph are asked for, and there is memory for them."""
    from nsa_backend.adapters.dsa.rounds import capture, served

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(served.SAMPLED_SWITCH, "1")
        for name in ("free_bytes", "settled_free_bytes"):
            patch.setattr(capture, name, lambda device: 2**40)
        yield


@pytest.fixture
def one_rank():
    """SGLang's decode context parallel off, which its KV pools ask for; releases that do not ask have nothing to state."""
    from sglang.srt import runtime_context

    parallel = getattr(runtime_context, "get_parallel", None)
    if parallel is None or not hasattr(type(parallel()), "override"):
        yield
        return
    with parallel().override(attn_dcp_rank=0, attn_dcp_size=1):
        yield


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    """SGLang's, with the plugin's options; it takes a twentieth of a second to make."""
    found = argparse.ArgumentParser()
    ServerArgs.add_cli_args(found)
    return found


@pytest.fixture
def small_model(tmp_path, monkeypatch) -> Path:
    """A folder with the config of a small V3.2; how this process divides prefills is not settled yet."""
    from nsa_backend.benchmarks.checkpoints.faithful import SHAPES, config

    (tmp_path / "config.json").write_text(json.dumps(config(SHAPES["faithful"])))
    if prefill_cp := sys.modules.get("sglang.srt.layers.cp.base"):
        monkeypatch.setattr(prefill_cp, "_STRATEGY", None)  # where resolving leaves it
    return tmp_path


@pytest.fixture
def parse(parser, small_model):
    """Returns a function of command-line words that parses them as SGLang's launcher does, for a small V3.2 checkpoint."""

    def parsed(*words: str) -> argparse.Namespace:
        # Without a GPU, SGLang can neither tell the device nor measure how much memory to leave.
        options = ["--model-path", str(small_model), "--device", "cuda", "--mem-fraction-static", "0.8", *words]
        return deepcopy(parser.parse_args(options))  # whose defaults are the parser's own objects

    return parsed


@pytest.fixture
def hopper(monkeypatch):
    """What SGLang asks of a GPU as it resolves options."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "NVIDIA H200")


@pytest.fixture
def resolve(parse, hopper):
    """Returns a function of command-line words that goes as far as the launcher's main process: resolved and to be checked."""

    def resolved(*words: str) -> ServerArgs:
        server_args = ServerArgs.from_cli_args(parse(*words))
        if hasattr(server_args, "resolve_once"):
            server_args.resolve_once()  # older releases resolve when they construct
        return server_args

    return resolved


@pytest.fixture
def checkpoint(tmp_path):
    """Returns a function of dropped and changed fields that writes a small V3.2 config and gives its folder."""

    def write(name: str, drop: str = "-", **changed) -> str:
        folder = tmp_path / name
        folder.mkdir()
        from nsa_backend.benchmarks.checkpoints.faithful import SHAPES, config

        fields = {field: value for field, value in config(SHAPES["faithful"]).items() if not field.startswith(drop)}
        (folder / "config.json").write_text(json.dumps(fields | changed))
        return str(folder)

    return write


@pytest.fixture
def arguments(resolve):
    """Returns a function of changed attributes that gives a served server's resolved arguments with those changes."""
    from installed_source import server_fields

    view = adapter.resolved(resolve("--attention-backend", adapter.BACKEND_NAMES[0]))
    values = {name: getattr(view, name) for name in server_fields()}
    return lambda **changed: SimpleNamespace(**values | changed)
