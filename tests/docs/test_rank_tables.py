"""Tables of ranks from rows as `bench serve` and `bench profile` of a rank write them: two turns a side, several sides."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs" / "tables"))
import context_tables
import rank_tables
import result_files
import speed_tables

from nsa_backend.benchmarks.reports import file_report
from nsa_backend.benchmarks.reports.parts import PARTS, REST
from nsa_backend.kernels.router import Division

FIRST_TURN = {"builtin": 10.0, "ours": 9.8, "front": 9.0, "front_verify": 8.0, "auto": 8.5, "sparse_prefill": 7.0}


def report(commit: str, rows: list[dict]) -> dict:
    environment = {"gpu": "NVIDIA H200", "packages": {"sglang": "0.5.23"}, "commit": commit, "date": "2026-11-24"}
    return {"environment": environment, "command": "bench serve", "rows": rows, "not_measured": [], "seconds": 1.0}


def cell(steps: int, batch: int, length: int) -> dict:
    return {"checkpoint": "v3.2-tp8", "steps": steps, "batch": batch, "length": length}


def served(shape: dict, side: str, ms: float) -> list[dict]:
    """Rows of both turns, the second one 0.2 ms longer."""
    return [
        shape | {"side": side, "turn": turn} | {key: {"median": t, "min_max": [t - 0.1, t + 0.1]} for key in rank_tables.TIMES}
        for turn, t in enumerate((ms, ms + 0.2))
    ]


@pytest.fixture
def filed(tmp_path, monkeypatch):
    """Returns a function that puts rows into the rank's or another result file under a name, by the command."""
    monkeypatch.setattr(result_files, "RESULTS", tmp_path)

    def put(name: str, commit: str, *runs: list[dict], topic: str = "rank_v32_tp8") -> None:
        paths = []
        for number, rows in enumerate(runs):
            paths.append(tmp_path / f"run{number}.json")
            paths[-1].write_text(json.dumps(report(commit, rows)))
        file_report.main([str(tmp_path / f"{topic}_0_5_23_h200.json"), name, *map(str, paths)])
        forget()

    yield put
    forget()


def forget() -> None:
    """What was read of result files."""
    for read in (rank_tables.runs, context_tables.two_ranks, result_files.result):
        read.cache_clear()


def say(folder: Path, name: str, **facts: object) -> None:
    """Have the rank's report of this name say them too."""
    file = folder / "rank_v32_tp8_0_5_23_h200.json"
    found = json.loads(file.read_text())
    found["reports"][name] |= facts
    file.write_text(json.dumps(found))
    forget()


def row(table: str, shape: str) -> list[str]:
    """Cells of a table by shape, or by requests, behind the first."""
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {shape} |")]
    return line.strip("| ").split(" | ")[1:]


def test_turns_are_one_cell_and_the_default_is_in_the_first_table(filed):
    drafts = [row for side, ms in FIRST_TURN.items() for batch in (1, 8) for row in served(cell(3, batch, 300), side, ms)]
    none = [row for side in ("builtin", "ours") for row in served(cell(0, 1, 300), side, FIRST_TURN[side] + (side == "ours"))]
    filed("rounds", "abc1234", drafts, none)
    assert row(rank_tables.rank(), "1 x 300") == ["0.851 (8.60)"]
    assert row(rank_tables.first_tokens(), "1 x 300") == ["0.85 (9)"]  # 300 rows go without sparse_prefill
    assert row(rank_tables.first_tokens(), "8 x 300") == ["0.70 (7)"]
    assert (rank_tables.rounds_shorter(), rank_tables.samples_apart()) == ("2 of 2", "4.7 %")
    filed("again", "new", [row for side in ("builtin", "ours") for row in served(cell(3, 1, 300), side, 13.9)])
    assert rank_tables.host_waits() == "10 to 14"
    assert rank_tables.lost_by_ranks() == [
        ["a rank of DeepSeek-V3.2, fa3, NSA_BACKEND_LAYER_FRONT=0", behind, "1 x 300 (1.079)"]
        for behind in rank_tables.TIMES.values()
    ]


def test_an_fp8_cache_is_a_rank_of_its_own(filed):
    """Beside the built-in on the same cache."""
    filed("bf16", "old", [row for side, ms in FIRST_TURN.items() for row in served(cell(3, 8, 300), side, ms)])
    fp8 = cell(3, 8, 300) | {"kv": "fp8_e4m3"}
    sides = {"builtin": 20.0, "auto": 12.8, "sparse_prefill": 9.9}
    filed("fp8", "new", [row for side, ms in sides.items() for row in served(fp8, side, ms)])
    assert row(rank_tables.first_tokens(), "8 x 300") == ["0.70 (7)", "0.50 (10)"]
    assert rank_tables.rounds_saved() == "15 to 36 %"
    assert rank_tables.rank().splitlines()[0] == "| requests x tokens | DeepSeek-V3.2 | DeepSeek-V3.2, FP8 KV |"
    assert row(rank_tables.rank(), "8 x 300") == ["0.851 (8.60)", "0.642 (12.90)"]


def test_glms_fp8_cache_is_a_column_and_a_row_too_and_what_ours_ran_alone_is_none(filed):
    shape = cell(3, 8, 300) | {"checkpoint": "glm-5.1-tp8", "kv": "fp8_e4m3"}
    filed("fp8_kv", "new", [row for side, ms in {"builtin": 10.0, "default": 8.0}.items() for row in served(shape, side, ms)])
    filed("ours_alone", "new", served(shape | {"checkpoint": "v3.2-dp8"}, "default", 1.0) + served(shape, "default", 1.0))
    assert rank_tables.rank().splitlines()[0] == "| requests x tokens | GLM-5.1, FP8 KV |"
    assert row(rank_tables.rank(), "8 x 300") == ["0.802 (8.10)"]
    filed("eight_gpus", "new", [])
    assert "| a rank of GLM-5.1, FP8 KV | - | 20 % | - | - |" in rank_tables.rank_rounds().splitlines()


def test_a_later_default_takes_the_place_of_an_earlier_one(filed, tmp_path):
    """In rounds and, with its prefill by rows, in first tokens; where it was not measured the earlier one stays."""
    fp8 = [cell(3, batch, 300) | {"kv": "fp8_e4m3"} for batch in (8, 32)]
    sides = {"builtin": 20.0, "auto": 16.0, "sparse_prefill": 14.0}
    filed("earlier", "old", [row for shape in fp8 for side, ms in sides.items() for row in served(shape, side, ms)])
    filed("later", "new", [row for side, ms in (("builtin", 20.0), ("auto", 10.0)) for row in served(fp8[1], side, ms)])
    file = tmp_path / "rank_v32_tp8_0_5_23_h200.json"
    found = json.loads(file.read_text())
    found["reports"]["later"]["sides_are"] = {"auto": "default"}
    file.write_text(json.dumps(found))
    rank_tables.runs.cache_clear()
    found = [row(rank_tables.first_tokens(), shape)[0].split()[0] for shape in ("8 x 300", "32 x 300")]
    assert found == ["0.70", "0.50"]
    assert [row(rank_tables.rank(), shape)[0].split()[0] for shape in ("8 x 300", "32 x 300")] == ["0.801", "0.502"]
    assert rank_tables.rounds_saved() == "20 to 50 %"


def test_few_new_tokens_are_told_beside_pieces(filed):
    """With drafts SGLang prefills a page of what is cached too: 512 new tokens are 576, of which nothing is promised."""
    shapes = {(8, 64, 0): 6.0, (1, 448, 8192): 6.0, (1, 512, 8192): 11.0}
    rows = [
        row
        for (batch, length, cached), ms in shapes.items()
        for side, time in {"default": ms, "pieces": 12.0, "builtin": 10.0}.items()
        for row in served(cell(3, batch, length) | ({"cached": cached} if cached else {}), side, time)
    ]
    filed("run", "new", rows)
    assert rank_tables.short_prefills().splitlines()[2:] == [
        "| 8 x 64 | 6 | 12 | 10 |",
        "| 1 x 512 behind 8128 | 6 | 12 | 10 |",
        "| 1 x 576 behind 8128 | 11 | 12 | 10 |",
    ]
    assert rank_tables.short_prefills_saved() == "40 %"
    later = "first token later"
    assert rank_tables.lost_beside_pieces() == [
        ["turns of chats, a rank of DeepSeek-V3.2", later, "1 of 2; at most 1.099 (1 x 512 behind 8192)"],
        ["NSA_BACKEND_SHORT_PREFILLS=0, a rank of DeepSeek-V3.2", later, "3 of 3; at most 1.198 (8 x 64)"],
    ]
    assert "8 x 64" not in rank_tables.first_tokens() + rank_tables.rank()


def test_several_ranks_as_one_server_are_no_cells_of_one_rank(filed):
    together = cell(3, 1, 300) | {"parallel": "tp2"}
    both = [
        served(shape, side, ms) for shape, ms in ((cell(3, 1, 300), 10.0), (together, 20.0)) for side in ("auto", "builtin")
    ]
    filed("rounds", "new", [row for rows in both for row in rows])
    assert row(rank_tables.rank(), "1 x 300") == ["~1.000 (10.10)"]


def test_ranks_of_dp_attention_and_of_a_newer_model_have_columns(filed):
    """DP attention has 128 heads, of which sparse_prefill serves none: its first tokens are those of the default."""
    others = {"v3.2-dp8": 9.0, "glm-5.2-tp8": 8.0}
    sides = [
        served(cell(3, 8, 4096) | {"checkpoint": n}, side, ms)
        for n, ours in others.items()
        for side, ms in (("default", ours), ("builtin", 10.0))
    ]
    filed("others", "new", [row for rows in sides for row in rows])
    assert row(rank_tables.rank(), "8 x 4096") == ["0.901 (9.10)", "0.802 (8.10)"]
    assert row(rank_tables.first_tokens(), "8 x 4096") == ["0.90 (9)", "0.80 (8)"]
    assert rank_tables.rounds_saved() == "10 to 20 %"


def test_ranks_that_divide_the_kv_stand_beside_both_sides_that_do_not(filed):
    """A cell that the built-in has not run has no ratio to it."""
    times = {("dcp2", "default"): 11.9, ("tp2", "default"): 9.9, ("tp2", "builtin"): 15.9}
    rows = [
        row | {"pool_tokens": 100 if parallel == "tp2" else 180}
        for length in (300, 4096)
        for (parallel, side), ms in times.items()
        if (length, side) != (4096, "builtin")
        for row in served(cell(3, 1, length) | {"parallel": parallel}, side, ms + (length == 4096))
    ]
    of_parts = cell(3, 1, 300) | {"parallel": "dcp2", "side": "default", "parts": {}, "exchange_a_layer": [3.0, 13.6]}
    filed("two_of_eight_ranks", "new", [*rows, of_parts])
    filed("context_divided_whole_prefills", "new", served(cell(3, 1, 64) | {"parallel": "dcp2"}, "default", 1.0))
    assert row(context_tables.context_ranks(), "1 x 300") == ["12.00 (1.200 / 0.750)", "12 (1.200 / 0.750)"]
    assert row(context_tables.context_ranks(), "1 x 4096") == ["13.00 (1.182 / -)", "13 (1.182 / -)"]
    assert (context_tables.context_longer(), context_tables.context_saved()) == ("18 to 20 %", "25 %")
    assert context_tables.context_pool() == "180 tokens where 100 fitted, 1.80 times"
    assert context_tables.context_exchange() == "14"
    longer = "longer rounds or tokens 2 of 2, at most 1.200 (1 x 300); first token later 2 of 2, at most 1.200 (1 x 300)"
    assert context_tables.lost_by_two_ranks() == [["--dcp-size 2", "beside ours without it", longer]]
    assert rank_tables.rank().count("|") == rank_tables.rank().splitlines()[0].count("|") * 2  # of one rank nothing ran


def test_a_later_run_of_ours_alone_stands_beside_the_built_in_of_the_earlier(filed):
    first = {("dcp2", "default"): 11.9, ("tp2", "default"): 9.9, ("tp2", "builtin"): 15.9}
    again = {("dcp2", "default"): 10.9, ("tp2", "default"): 9.9}
    for name, times in (("two_of_eight_ranks", first), ("context_divided_whole_prefills", again)):
        cells = [served(cell(3, 1, 300) | {"parallel": parallel}, side, ms) for (parallel, side), ms in times.items()]
        filed(name, "new", [row for rows in cells for row in rows])
    assert row(context_tables.context_ranks(), "1 x 300") == ["11.00 (1.100 / 0.688)", "11 (1.100 / 0.688)"]


def test_vllm_is_told_where_it_did_not_wander_and_where_it_wins(filed):
    """Rounds of one request wander in both runs, so they are left out; others are of the last run in which they did not."""
    ours = [row for batch in (1, 8) for side in ("auto", "builtin") for row in served(cell(3, batch, 300), side, 10.0)]
    filed("rounds", "new", [*ours, *[row for side in ("auto", "builtin") for row in served(cell(0, 8, 300), side, 5.0)]])
    steady = {key: {"median": 8.0, "min_max": [7.9, 8.1]} for key in rank_tables.TIMES}
    of_vllm = {"side": "vllm", "turn": 0}
    wandered, compiled = ({"median": ms, "min_max": [ms - 7, ms + 80]} for ms in (8.0, -8.0))
    first = [cell(3, 1, 300) | steady | {"round_ms": wandered}, *(cell(n, 8, 300) | steady for n in (3, 0))]
    faster = {key: {"median": 4.0, "min_max": [3.9, 4.1]} for key in rank_tables.TIMES}
    again = [cell(3, 1, 300) | steady | {"round_ms": compiled}, cell(0, 8, 300) | faster]
    for name, rows in (("vllm", first), ("vllm_again", again)):
        filed(name, "new", [one | of_vllm for one in rows])
    assert rank_tables.vllm().splitlines()[2:] == [
        "| 1 x 300 | - | 1.26 (10 / 8) | - |",
        # So many rows go by sparse_prefill, whose side did not run.
        "| 8 x 300 | 1.262 (10.10 / 8.00) | - | 1.275 (5.10 / 4.00) |",
    ]
    assert rank_tables.vllm().splitlines()[0] == "| requests x tokens | round | its first token | token without drafts |"
    whose = "a rank of DeepSeek-V3.2, [beside vLLM](vllm.md)"
    assert rank_tables.lost_to_vllm() == [
        [whose, "longer rounds or tokens", "8 x 300, 3 drafts (1.262); 8 x 300 (1.275)"],
        [whose, "first token later", "1 x 300, 3 drafts (1.262)"],
    ]
    assert rank_tables.one_draft() == rank_tables.five_drafts() == "-"


def test_vllms_first_tokens_are_left_out_where_the_host_was_busy(filed, tmp_path):
    filed("rounds", "new", [row for side in ("auto", "builtin") for row in served(cell(3, 1, 300), side, 10.0)])
    of_vllm = {key: {"median": 8.0, "min_max": [7.9, 8.1]} for key in rank_tables.TIMES} | {"side": "vllm", "turn": 0}
    filed("vllm", "new", [cell(3, 1, 300) | of_vllm])
    assert row(rank_tables.vllm(), "1 x 300") == ["1.262 (10.10 / 8.00)", "1.26 (10 / 8)"]
    say(tmp_path, "vllm", busy_host=True)
    assert rank_tables.vllm().splitlines()[0] == "| requests x tokens | round |"
    assert row(rank_tables.vllm(), "1 x 300") == ["1.262 (10.10 / 8.00)"]


def test_what_captures_of_all_sizes_took_and_a_crowd_are_told(filed):
    captures = [{"what": "target verify", "seconds": 9.0, "gib": 1.0}]
    captures += [
        {"what": f"whole rounds, {kind}", "sizes": n, "seconds": 1.0, "gib": 0.1} for kind, n in (("greedy", 20), ("short", 9))
    ]
    builtin = {"checkpoint": "v3.2-tp8", "captures": captures[:1], "ready_s": 157.7}
    ours = {"checkpoint": "v3.2-tp8", "captures": captures, "ready_s": 173.7, "rounds_s": 2.71, "rounds_gib": 0.571}
    filed("captures_beside_sglang", "new", [builtin, ours])
    crowd = {"checkpoint": "v3.2-tp8-20-layers", "decoded_at_once": 16, "requests": 16, "length": 131072, "retracted": 0}
    filed("crowd", "new", [crowd | {"first_token_s": [7.7, 107.6]}])
    of_glm = cell(5, 1, 300) | {"checkpoint": "glm-5.1-tp8"}
    theirs = of_glm | {"side": "builtin", "captures": captures[:1]}
    filed("five_drafts", "new", [theirs, of_glm | {"side": "auto", "captures": captures}], topic="rank_glm51_tp8")
    told = "2.7 s and 0.57 GiB for 20 batch sizes, and the start 174 s instead of 158. GLM-5.1's took 2.0 s and 0.20 GiB for 20"
    assert rank_tables.all_sizes() == told
    told = "16 of 16 requests of 131072 tokens were decoded at once, none retracted; first tokens took 8 to 108 s"
    assert context_tables.crowd() == told


def test_a_later_run_replaces_the_cells_that_it_measured(filed):
    filed("first", "old", [row for n in (1, 8) for side in ("auto", "builtin") for row in served(cell(3, n, 300), side, 20.0)])
    later = [row for side in ("auto", "builtin") for row in served(cell(3, 1, 300), side, FIRST_TURN[side])]
    filed("rounds", "new", later + served(cell(3, 8, 300), "auto", 1.0))  # its time ran out before the built-in's turn
    assert row(rank_tables.rank(), "1 x 300") == ["0.851 (8.60)"]
    assert row(rank_tables.rank(), "8 x 300") == ["~1.000 (20.10)"]


def test_a_side_is_told_by_the_newest_run_that_has_it_beside_that_run_s_built_in(filed):
    filed("first", "old", [row for side in ("auto", "builtin") for row in served(cell(3, 1, 300), side, FIRST_TURN[side])])
    filed("ours", "new", [row for side in ("ours", "builtin") for row in served(cell(3, 1, 300), side, 20.0)])
    assert row(rank_tables.rank(), "1 x 300") == ["0.851 (8.60)"]
    assert rank_tables.rounds_saved() == "15 %"


def test_experts_in_one_launch_under_dp_attention_are_told_where_tiles_have_their_rows(filed):
    ms = {(8, "more experts"): 8.0, (8, "builtin"): 10.0, (64, "more experts"): 9.9, (64, "builtin"): 10.0}
    rows = [one | {"checkpoint": "v3.2-dp8"} for (n, side), each in ms.items() for one in served(cell(3, n, 300), side, each)]
    filed("more_experts", "new", rows, topic="rank_v32_dp8")
    ms = {(8, "default"): 9.5, (8, "builtin"): 10.0, (64, "default"): 8.5, (64, "builtin"): 10.0}
    rows = [one | {"checkpoint": "v3.2-dp8"} for (n, side), each in ms.items() for one in served(cell(3, n, 300), side, each)]
    filed("first", "old", rows, topic="rank_v32_dp8")
    assert (rank_tables.experts_under_dp_attention(), rank_tables.dp_saved()) == ("0.80", "15 to 20 %")


def test_without_drafts_tokens_are_told_apart(filed):
    none = {"builtin": 10.0, "default": 6.0}
    filed("tokens", "new", [row for side, ms in none.items() for row in served(cell(0, 1, 300), side, ms)])
    assert (rank_tables.token_saved(), rank_tables.rounds_saved()) == ("40 %", "- %")
    assert rank_tables.rank_tokens().splitlines()[0] == "| requests x tokens | DeepSeek-V3.2 |"
    assert row(rank_tables.rank_tokens(), "1 x 300") == ["0.604 (6.10)"]


def test_times_whose_ranges_meet_are_alike(filed):
    sides = {"builtin": 10.0, "auto": 9.75}
    filed("alike", "new", [row for side, ms in sides.items() for row in served(cell(3, 1, 300), side, ms)])
    assert row(rank_tables.first_tokens(), "1 x 300") == ["~0.98 (10)"]
    assert rank_tables.rounds_shorter() == "0 of 1"


def test_prompts_that_are_longer_than_tables_have_are_told_in_a_sentence(filed):
    times = {(32768, "default"): 6.9, (32768, "builtin"): 10.0, (131072, "default"): 7.9, (131072, "builtin"): 10.0}
    rows = [row for (length, side), ms in times.items() for row in served(cell(3, 1, length), side, ms)]
    ours = [row | {"side": "sparse_prefill"} for row in rows if row["side"] == "default"]
    eight = [row for side, ms in (("default", 1.0), ("builtin", 2.0)) for row in served(cell(3, 8, 8192), side, ms)]
    filed("copies_left_out", "new", [*rows, *ours, *eight])
    newer = {(4096, "default"): 5.0, (4096, "builtin"): 10.0, (131072, "default"): 6.0, (131072, "builtin"): 10.0}
    of_newer = [row for (length, side), ms in newer.items() for row in served(cell(0, 1, length), side, ms)]
    filed("second_product", "new", [row for row in of_newer if row["length"] == 4096])
    filed("weights_come_early", "new", [])
    filed("tokens_to_32768", "new", [row for row in of_newer if row["length"] != 4096])
    filed("newest_front", "new", [])
    filed("alone", "new", served(cell(3, 8, 32768), "default", 1.0))
    assert rank_tables.long_requests() == "32768 / 131072 tokens 0.693 / 0.792 of 1; 8192 tokens 0.524 of 8"
    assert rank_tables.longer_first_tokens() == "0.50 / 0.69 / 0.60 of 1, 0.52 of 8"
    assert rank_tables.rank().splitlines()[2:] == rank_tables.first_tokens().splitlines()[2:] == []


def test_what_may_be_chance_is_no_loss(filed):
    """A first token on FP8 KV whose range meets the built-in's; one beyond it is told."""
    fp8 = {batch: cell(3, batch, 300) | {"kv": "fp8_e4m3"} for batch in (1, 32)}
    times = {(1, "default"): 9.75, (1, "builtin"): 10.0, (32, "default"): 12.0, (32, "builtin"): 10.0}
    filed("fp8", "new", [row for (batch, side), ms in times.items() for row in served(fp8[batch], side, ms)])
    assert rank_tables.lost_by_ranks() == [
        ["a rank of DeepSeek-V3.2, FP8 KV, default", behind, "32 x 300, 3 drafts (1.198)"]
        for behind in rank_tables.TIMES.values()
    ]


def test_a_report_says_which_side_its_servers_were(filed, tmp_path):
    rows = [row for side in ("auto", "builtin") for row in served(cell(3, 1, 300), side, 10.0 if side == "auto" else 20.0)]
    filed("alone", "new", rows)
    assert rank_tables.rounds_saved() == "50 %"
    assert row(rank_tables.rank(), "1 x 300") == ["0.502 (10.10)"]
    say(tmp_path, "alone", sides_are={"auto": "auto_alone"})
    assert rank_tables.rounds_saved() == "- %"
    assert "0.502" not in rank_tables.rank()


def test_kernels_by_part_are_those_of_the_default_s_newest_rounds_with_drafts(filed):
    def of(steps: int, side: str, us: float) -> dict:
        parts = {part: [61, 100.0] for part in (*PARTS, REST)} | {"attention": [61, us], "indexer": [0, 0.0]}
        return cell(steps, 1, 300) | {"side": side, "parts": parts, "period_us": 1000.0}

    filed("first", "old", [of(3, "auto", 300.0)])
    filed("parts", "new", [of(3, "auto", 200.0), of(3, "builtin", 400.0), of(0, "auto", 500.0)])
    shown = rank_tables.rank_kernels().splitlines()
    assert shown[0] == "| us | 1 x 300 |"
    assert "| attention | 200 |" in shown
    assert "| from one round to the next | 1000 |" in shown
    assert not [line for line in shown if "indexer" in line]


def test_all_ranks_as_one_server_are_told_before_ranks_alone(filed):
    """A cell of one rank whose range meets the built-in's may be chance, one that is behind is shown."""
    whole = {(1, "default"): 5.9, (1, "builtin"): 9.9, (8, "default"): 7.9, (8, "builtin"): 9.9}
    together = {"parallel": "tp8", "all_reduce": "sglang"}
    filed("eight_gpus", "new", [row for (n, side), ms in whole.items() for row in served(cell(3, n, 300) | together, side, ms)])
    fp8 = {"kv": "fp8_e4m3"}
    ranks = [(1, {}, 9.75), (8, {}, 5.0), (1, fp8, 12.0)]
    sides = [served(cell(3, n, 300) | kv, *of) for n, kv, ms in ranks for of in (("default", ms), ("builtin", 10.0))]
    filed("ranks", "new", [row for rows in sides for row in rows])
    assert rank_tables.rank_rounds().splitlines()[2:5] == [
        "| DeepSeek-V3.2 on eight H200s | 40 % | 20 % | - | - |",
        "| a rank of DeepSeek-V3.2 | ~2 % | 50 % | - | - |",
        "| a rank of DeepSeek-V3.2, FP8 KV | -20 % | - | - | - |",
    ]
    assert rank_tables.eight_gpus().splitlines()[2:] == [
        "| 1 x 300 | 0.600 (6.00 / 10.00) | 0.60 (6 / 10) |",
        "| 8 x 300 | 0.800 (8.00 / 10.00) | 0.80 (8 / 10) |",
    ]
    assert rank_tables.eight_first_saved() == "20 to 40 %"


def test_experts_of_sglangs_option_stand_beside_the_default_without_it(filed):
    default = [row for side, ms in (("builtin", 12.0), ("default", 9.9)) for row in served(cell(3, 1, 300), side, ms)]
    filed("moe_configs", "new", default)
    filed("sglang_experts_fused", "new", served(cell(3, 1, 300), "sglang_experts_fused", 11.0))
    assert rank_tables.beside_experts_fused() == "10 %"
    assert row(rank_tables.rank(), "1 x 300") == ["0.826 (10.00)"]


def test_experts_of_few_tokens_are_by_tensor_cores_where_a_run_has_them(filed):
    """DeepSeek-V3.2's with its shared expert. In brackets is what does not serve, whatever it gains."""

    def older(rank: str, tokens: int, width: int) -> dict:
        us = {"sglang": 10.0, speed_tables.as_filed(speed_tables.tile_for(tokens)): 9.0}
        return {"rank": rank, "tokens": tokens, "width": width, "few_us": us}

    widths = {"v3.2-tp8": 256, "v3.2-tp16": 128, "v3.2-tp4": 512, "v3.2-ep8": 2048, "glm-5-tp8": 256}
    filed("few_tokens", "old", [older(rank, n, width) for rank, width in widths.items() for n in (1, 8)], topic="experts")
    times = {"few_us": {"sglang": 10.0, "by tensor cores": 5.0}}
    beside = {"beside_us": {"sglang": 10.0, "by tensor cores, shared among them": 4.0}}
    newer = [{"rank": rank, "tokens": n} | times for rank in ("v3.2-tp8", "glm-5-tp8") for n in (1, 8)]
    rows = [one | (beside if one["rank"] == "v3.2-tp8" else {}) for one in newer]
    filed("few_by_tensor_cores", "new", rows, topic="experts")
    assert speed_tables.few_experts().splitlines()[2:] == [
        "| DeepSeek-V3.2 | 0.40 | (0.40) |",
        "| 16 GPUs | 0.90 | 0.90 |",
        "| 4 GPUs | 0.90 | (0.90) |",
        "| EP 8 | (0.90) | (0.90) |",
        "| GLM-5 | 0.50 | (0.50) |",
    ]


def test_experts_are_told_by_rank(filed):
    """By the one launch where it was timed, else by tiles that win."""

    def measured(rank: str, tokens: int, us: float) -> dict:
        best = {"best": {"name": "way"}, "skewed_us": {"best": us, "sglang": 95.0}}
        return {"rank": rank, "tokens": tokens, "us": {"sglang": 100.0, "way": us}} | best

    slow = {512: 97.0, 8192: 90.0}  # of which the first loses with skewed choices
    for rank, name in (("v3.2-tp8", "v32_tp8"), ("glm-5-tp8", "glm_5_tp8")):
        rows = [measured(rank, tokens, slow.get(tokens, 75.0)) for tokens in speed_tables.EXPERT_TOKENS]
        filed(name, "new", rows, topic="experts")
    times = {"sglang": 80.0, "one launch": 40.0}
    filed(
        "one_launch_to_1024",
        "new",
        [
            *({"rank": "v3.2-tp8", "tokens": tokens, "between_us": times} for tokens in (8, 32)),
            {"rank": "v3.2-ep8", "tokens": 8, "between_us": {"sglang": 100.0, "one launch": 70.0}},
        ],
        topic="experts",
    )
    told = row(speed_tables.experts(), "DeepSeek-V3.2")
    assert told == ["0.50 (80)", "0.50 (80)", "0.75 (100)", "SGLang's (100)", "0.90 (100)"]
    assert row(speed_tables.experts(), "GLM-5")[:2] == ["0.75 (100)"] * 2
    assert speed_tables.experts_divided() == "0.70"


def test_newer_launches_are_told_with_those_before_them_up_to_the_rows_that_they_serve(filed):
    """A launch without the one before it is told nowhere."""
    both = {"product, cuda 16 128": 8.0, "product, old": 10.0}
    us = {4: {"cuda 16 128": 1.0, "old": 2.0}, 128: both, 256: both | {"product, cuda 16 128": 11.0}}
    rows = [{"kernel": "rope_quantise", "model": "v32", "rows": n, "us": each} for n, each in us.items()]
    store = {"kernel": "norm_rope_store", "model": "v32", "rows": 1, "us": {"product, cuda": 9.0, "product, old": 10.0}}
    filed("front_in_cuda", "new", [*rows, store], topic="attention")
    assert speed_tables.newest_front() == "0.80 to 0.90"


def test_launches_between_halves_of_a_layer_and_of_heads_are_told_beside_sglangs(filed):
    def measured(what: str, **ways: float) -> dict:
        return {"model": "GLM-5", "what": what, "rows": 8, "us": {"SGLang's": 10.0} | ways}

    rows = [
        measured("router", **{str(Division(2, 2)): 1.0, str(speed_tables.SERVED): 4.0}),
        measured("norm, router", **{"router": 7.0, "add_norm, router": 6.0}),
        *(measured("norm", **{"add_norm 1": 1.0, f"add_norm {speed_tables.EACH}": us}) for us in (8.0, 9.0)),
    ]
    filed("norms_and_routers_by_division", "new", rows, topic="experts")
    rows = [measured("values", value_products=1.0, head_values=5.0), measured("queries", head_queries=7.0)]
    filed("heads_beside_sglang", "new", rows, topic="attention")
    assert (speed_tables.routers(), speed_tables.routers_behind_norms()) == ("0.40", "0.60")
    assert speed_tables.norms_alone() == "0.80 to 0.90"
    assert (speed_tables.values_of_heads(), speed_tables.queries_of_heads()) == ("0.50", "0.70")


def test_experts_are_beside_what_only_reads_their_weights(filed):
    rows = [
        {"rank": "v3.2", "tokens": tokens, "bytes_us_4.0": 100.0, "rows 16": us} for tokens, us in ((8, 200.0), (16, 100.0))
    ]
    filed("one_launch_by_rows", "new", rows, topic="experts")
    filed("weights_read", "new", [{"what": "in a row", "tb_s": 4.51}, {"what": "tiles", "tb_s": 4.36}], topic="experts")
    assert speed_tables.experts_bandwidth() == "4.0"
    assert speed_tables.read_alone() == "4.5 in a row, 4.4 in tiles"
