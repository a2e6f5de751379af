"""Configs of SGLang's Triton experts: which lookups are answered by this package, and which stay SGLang's."""

from __future__ import annotations

import inspect
import json
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from nsa_backend.adapters import moe_configs
from nsa_backend.adapters.installed import adapter
from nsa_backend.benchmarks.tuning.experts import Shape, configs_of, looked_up, wins

lookup = import_module(moe_configs.MODULE)
OF_A_RANK = 256, 256  # experts of DeepSeek-V3.2 and their width on one of eight ranks


@pytest.fixture(autouse=True)
def sglangs(monkeypatch):
    """SGLang's lookup on an H200, without its memory, and without the hook that backends of other tests put around it."""
    found = inspect.unwrap(lookup.get_moe_configs)
    monkeypatch.setattr(lookup, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(lookup, "get_moe_configs", found)
    moe_configs._own.cache_clear()
    yield found
    moe_configs._own.cache_clear()


@pytest.fixture
def taken(monkeypatch, sglangs):
    """The lookup as the hook leaves it."""
    hooked = []
    monkeypatch.setattr(moe_configs, "hook", lambda target, function, kind: hooked.append((target, function)))
    monkeypatch.delenv(moe_configs.USERS_FOLDER, raising=False)
    adapter.take_moe_configs()
    ((target, around),) = hooked
    assert target == f"{lookup.__name__}.get_moe_configs"
    monkeypatch.setattr(lookup, "get_moe_configs", partial(around, sglangs))


def chosen(tokens: int, experts: int = 256, width: int = 256, hidden: int = 7168):
    """(config of the first product, of the second) as SGLang's experts look them up."""
    return looked_up(Shape(experts, width, hidden, routed=experts), tokens)


@pytest.mark.parametrize("tokens", [1, 4, 8, 32, 128, 256])
def test_a_rank_of_deepseek_v32_has_tiles_of_16_rows(taken, tokens):
    first, second = chosen(tokens)
    assert first["BLOCK_SIZE_M"] == second["BLOCK_SIZE_M"] == 16
    assert second["USE_TMA"] is True


def test_without_them_decode_has_tiles_of_64_rows():
    """What they are for: as soon as SGLang has better ones, this package's can go."""
    assert [chosen(tokens)[0]["BLOCK_SIZE_M"] for tokens in (4, 32, 128)] == [64, 64, 64]


def test_a_number_of_tokens_between_two_takes_the_nearest(taken):
    assert chosen(30) == chosen(32)
    assert chosen(100_000) == chosen(8192)


def test_a_rank_of_glm_5_has_sglangs_tiles_where_they_are_as_fast(taken, monkeypatch, sglangs):
    """Which are of Triton 3.5, and have 16 rows too."""
    of_glm = 257, 256, 6144
    with_ours = {tokens: chosen(tokens, *of_glm) for tokens in (32, 128, 8192)}
    monkeypatch.setattr(lookup, "get_moe_configs", sglangs)
    assert [tokens for tokens, configs in with_ours.items() if configs != chosen(tokens, *of_glm)] == [128]


NOT_TIMED, WRONG = {}, {"skewed_us": {"sglang": 1.0}}


@pytest.mark.parametrize(
    ("best", "skewed", "won"),
    [
        (0.9, NOT_TIMED, True),
        (0.9, WRONG, False),
        (0.9, {"skewed_us": {"best": 0.9, "sglang": 1.0}}, True),
        (0.9, {"skewed_us": {"best": 1.1, "sglang": 1.0}}, False),
        (1.1, {"skewed_us": {"best": 0.9, "sglang": 1.0}}, False),
        (1.0, NOT_TIMED, False),
    ],
)
def test_tiles_win_with_even_and_with_skewed_choices(best, skewed, won):
    assert wins({"best": {"name": "tiles"}, "us": {"tiles": best, "sglang": 1.0}} | skewed) is won


@pytest.mark.parametrize("shape", [(256, 512), (257, 128), (8, 1792)])
def test_other_shapes_are_sglangs(taken, monkeypatch, sglangs, shape):
    with_ours = chosen(32, *shape)
    monkeypatch.setattr(lookup, "get_moe_configs", sglangs)
    assert with_ours == chosen(32, *shape)


def test_another_gpu_is_sglangs(taken, monkeypatch):
    monkeypatch.setattr(lookup, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    assert moe_configs._own(*OF_A_RANK, "fp8_w8a8", 128, 128) is None


def test_deterministic_inference_has_no_configs(taken, monkeypatch):
    """SGLang's default tiles serve it, whatever files there are."""
    deterministic = SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=True))
    monkeypatch.setattr(lookup, "get_exec", lambda: deterministic)
    assert lookup.get_moe_configs(*OF_A_RANK, "fp8_w8a8", 128, 128) is None


def test_experts_that_are_fused_because_the_user_insists_are_sglangs(taken, monkeypatch):
    """DeepSeek-V3.2 then has 257 experts as GLM-5 has, and another hidden size."""
    of_glm = 257, 256, "fp8_w8a8", 128, 128
    assert moe_configs._own(*of_glm) is not None
    moe_configs._own.cache_clear()
    fused = SimpleNamespace(
        moe=SimpleNamespace(enforce_shared_experts_fusion=True), deterministic=lookup.get_exec().deterministic
    )
    monkeypatch.setattr(lookup, "get_exec", lambda: fused)
    assert moe_configs._own(*of_glm) is None


def test_sglangs_own_of_this_triton_win(taken, monkeypatch, tmp_path):
    """A release that ships configs for the shape and Triton has measured them."""
    folder = tmp_path / "configs" / f"triton_{moe_configs.triton.__version__.replace('.', '_')}"
    folder.mkdir(parents=True)
    name = lookup.get_config_file_name(*OF_A_RANK, "fp8_w8a8", [128, 128])
    (folder / name).write_text("{}")
    monkeypatch.setattr(lookup, "__file__", str(tmp_path / "module.py"))
    assert moe_configs._own(*OF_A_RANK, "fp8_w8a8", 128, 128) is None


def test_a_folder_that_the_user_names_wins(monkeypatch, tmp_path):
    monkeypatch.setenv(moe_configs.USERS_FOLDER, str(tmp_path))
    monkeypatch.setattr(moe_configs, "hook", lambda *_: pytest.fail("hooked"))
    adapter.take_moe_configs()


@pytest.mark.parametrize("module", ["sglang.srt.layers.moe.nowhere.configs", "sglang.srt.layers.moe.configs"])
def test_a_release_that_looks_them_up_elsewhere_keeps_its_own(monkeypatch, module):
    monkeypatch.setattr(moe_configs, "MODULE", module)
    monkeypatch.setattr(moe_configs, "hook", lambda *_: pytest.fail("hooked"))
    adapter.take_moe_configs()


def test_another_triton_has_none(monkeypatch):
    monkeypatch.setattr(moe_configs.triton, "__version__", "3.9.0")
    monkeypatch.setattr(moe_configs, "hook", lambda *_: pytest.fail("hooked"))
    adapter.take_moe_configs()


def test_both_products_sort_rows_alike():
    """SGLang sorts tokens by expert once, for the rows of the first product, and looks both configs up by one key."""
    files = moe_configs.measured()
    firsts = [name for name in files if not name.endswith("_down.json")]
    assert files.keys() == {*firsts, *(name.replace(".json", "_down.json") for name in firsts)}
    for name in firsts:
        second = files[name.replace(".json", "_down.json")]
        rows = {tokens: one["BLOCK_SIZE_M"] for tokens, one in files[name].items()}
        assert rows == {tokens: one["BLOCK_SIZE_M"] for tokens, one in second.items()}


def test_each_is_the_fastest_of_its_report():
    """The file is written from reports; nobody tunes it by hand."""
    results = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "experts_0_5_23_h200.json"
    reports = json.loads(results.read_text())["reports"].values()
    every = [row for report in reports for row in report["rows"] if "best" in row]  # others compare no tiles
    files = moe_configs.measured()
    rows = [row for row in every if any(name.startswith(f"E={row['experts']},N={row['width']},") for name in files)]
    for row in rows:
        name = lookup.get_config_file_name(row["experts"], row["width"], "fp8_w8a8", [128, 128])
        chosen, best = files[name][str(row["tokens"])], row["us"][row["best"]["name"]]
        assert best == min(us for way, us in row["us"].items() if " then " in way)
        assert chosen == row["best" if wins(row) else "sglang"]["first"]
        assert best < row["us"]["sglang"] or not wins(row)
    assert len(files) == 2 * len({row["experts"] for row in rows})
    assert files == configs_of(rows)
