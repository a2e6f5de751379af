"""Cases that run their workloads twice on one side, with an action between or in another place, against a stand-in engine."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import actions
import pytest
import reports
import run_all
import run_case
import ties
import torch
from safetensors.torch import save_file
from workloads import CASES, STANDARD


def answers(count: int, **meta) -> list[dict]:
    return [
        {"output_ids": [5, 6, 7, 8], "meta_info": {"spec_correct_drafts_histogram": [0, 0, 0, 9], "cached_tokens": 64} | meta}
        for _ in range(count)
    ]


class Engine:
    """Stands for sglang.Engine of 0.5.23; takes weights in parts, within a session alone, and keeps them."""

    is_open = False

    def __init__(self, **arguments):
        self.arguments, self.calls, self.weights = arguments, [], {}

    def generate(self, input_ids, sampling_params):
        self.calls.append("generate")
        host = 2944 if self.calls.count("generate") > 4 else 0
        return answers(len(input_ids), cached_tokens_details={"device": 0, "host": host})

    def begin_weight_update(self):
        self.calls.append("begin")
        done, self.is_open = not self.is_open, True
        return done, "Success" if done else "a weight-update session is already open"

    def update_weights_from_tensor(self, tensors, flush_cache):
        self.calls.append(([name for name, _ in tensors], flush_cache))
        self.weights |= tensors
        return self.is_open, "Succeeded"

    def end_weight_update(self):
        self.calls.append("end")
        done, self.is_open = self.is_open, False
        return done, "Success" if done else "no weight-update session is open"

    def flush_cache(self):
        self.calls.append("flush")
        return SimpleNamespace(success=True, message="")

    def release_memory_occupation(self):
        self.calls.append("release")

    def resume_memory_occupation(self):
        self.calls.append("resume")

    def get_server_info(self):
        return {"internal_states": [{"nsa_backend_rounds": {"greedy requests": self.calls.count("generate")}}]}

    def shutdown(self):
        self.calls.append("shutdown")


@pytest.fixture
def engine(monkeypatch):
    engine = Engine()
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(Engine=lambda **arguments: engine))
    return engine


def case_called(name: str):
    return next(c for c in CASES if c.name == name)


def test_weights_are_updated_between_two_runs_of_the_same(engine, monkeypatch, tmp_path):
    """All of them are zero, and then the checkpoint's; prefixes of the zeros are not kept."""
    monkeypatch.setattr(actions, "MEGABYTES_AT_ONCE", 1)
    weights = {"a": torch.ones(200, 1024), "b": torch.ones(200, 1024), "c": torch.arange(3.0)}
    save_file(weights, tmp_path / "x.safetensors")
    case, calls = case_called("weights updated"), [(["a"], False), (["b", "c"], False), (["a"], False), (["b", "c"], True)]
    zeros = []
    take = engine.update_weights_from_tensor
    engine.update_weights_from_tensor = lambda tensors, flush_cache: (
        zeros.append(all(not tensor.any() for _, tensor in tensors)) or take(tensors, flush_cache)
    )
    found = run_case.run_engine(case, {"model_path": str(tmp_path)})
    assert tuple(found) == case.measured() == (*STANDARD, *(f"{w}, after weights were updated" for w in STANDARD))
    assert engine.calls == ["generate"] * 2 + ["begin", *calls, "end"] + ["generate"] * 2 + ["shutdown"]
    assert zeros == [True, True, False, False]
    assert engine.weights.keys() == weights.keys()
    assert all(torch.equal(engine.weights[name], tensor) for name, tensor in weights.items())


def test_weights_are_loaded_again_and_graphs_captured(engine, monkeypatch, tmp_path, capsys):
    """Between zeros and the second run; SGLang's own request says what is asked for."""
    asked, answer = [], (True, "Succeeded", 0)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", SimpleNamespace(UpdateWeightFromDiskReqInput=dict))
    engine.loop = SimpleNamespace(run_until_complete=lambda done: done)
    engine.tokenizer_manager = SimpleNamespace(
        update_weights_from_disk=lambda wanted, request: engine.calls.append("disk") or asked.append(wanted) or answer
    )
    save_file({"a": torch.ones(3)}, tmp_path / "x.safetensors")
    case = case_called("weights updated from disk, graphs captured again")
    run_case.run_engine(case, {"model_path": str(tmp_path)})
    zeros = ["begin", (["a"], False), "end"]
    assert engine.calls == ["generate"] * 2 + zeros + ["disk"] + ["generate"] * 2 + ["shutdown"]
    assert not engine.weights["a"].any()
    assert 'replayed rounds: {"greedy requests": 4}' in capsys.readouterr().out
    assert asked == [{"model_path": str(tmp_path), "recapture_cuda_graph": True}]
    answer = (False, "no such folder", 0)
    with pytest.raises(RuntimeError, match="did not load the checkpoint again: no such folder"):
        run_case.run_engine(case, {"model_path": str(tmp_path)})


def test_the_weights_of_an_attention_come_together(monkeypatch):
    monkeypatch.setattr(actions, "MEGABYTES_AT_ONCE", 1)
    attention = {f"model.layers.0.self_attn.{name}": torch.zeros(150, 1024) for name in ("q_a_proj", "kv_a_proj_with_mqa")}
    others = {"model.layers.0.mlp": torch.zeros(3), "model.layers.1.self_attn.q_a_proj": torch.zeros(3)}
    parts = [[name for name, _ in part] for part in actions.in_parts(attention | others)]
    assert parts == [["model.layers.0.mlp"], sorted(attention), ["model.layers.1.self_attn.q_a_proj"]]


def test_what_must_come_from_host_memory(engine):
    case = case_called("HiCache")
    found = run_case.run_engine(case, {"model_path": ""})
    assert set(found[case.loaded_back]["host_tokens"]) == {2944}
    assert found["prompts"]["host_tokens"] == [0] * 8
    assert reports.verdicts(case, found) == []
    found[case.loaded_back]["host_tokens"] = [0] * 8
    nothing = f"{case.name}, {case.loaded_back}: no prompt came back from host, so nothing was tested"
    assert reports.verdicts(case, found) == [nothing]


def test_what_must_come_from_storage(engine, monkeypatch):
    """Once nothing is left nearer; the folder is the engine's alone, and gone with it."""
    monkeypatch.setattr(actions, "BACKUP_SECONDS", 0.0)
    case, folders = case_called("HiCache, storage in files"), []

    def generate(input_ids, sampling_params):
        folders.append(Path(os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"]))
        assert folders[-1].is_dir()
        return answers(len(input_ids), cached_tokens_details={"storage": 64 * ("flush" in engine.calls)})

    monkeypatch.setattr(engine, "generate", generate)
    found = run_case.run_engine(case, {"model_path": ""})
    assert len(set(folders)) == 1
    assert not folders[0].exists()
    assert set(found[case.loaded_back]["storage_tokens"]) == {64}
    assert reports.verdicts(case, found) == []


def test_a_second_run_is_held_to_the_floors_and_outputs_of_the_first(engine, tmp_path):
    case = case_called("memory released and resumed")
    found = run_case.run_engine(case, {"model_path": ""})
    assert engine.calls == ["generate"] * 2 + ["release", "resume"] + ["generate"] * 2 + ["shutdown"]
    second = f"8x300, {case.again}"
    assert ties.differences(case, found, found) == []
    found[second] = found[second] | {"accept": [1.6] * 8, "output_ids": [[5, 6, 9, 8], *found[second]["output_ids"][1:]]}
    (problem,) = [p for p in reports.verdicts(case, found) if "mean accept" in p]
    assert problem == f"{case.name}, {second}: mean accept length 1.600 < 3.900"
    (difference,) = ties.differences(case, found, found)
    assert (difference["workload"], difference["against"], difference["position"]) == ("8x300", second, 2)
    assert (difference["ours"], difference["other"]) == (7, 9)
    alone, other = (
        run_all.Run({}, [case], SimpleNamespace(backends=["ours", "builtin"]), None, results={(case.name, side): (found, "")})
        for side in ("ours", "builtin")
    )
    assert alone.parted() == [(case, [difference])]
    assert other.parted() == []
    assert len(reports.row_of(case, {"ours": found})["workloads"]) == 4
