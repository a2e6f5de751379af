"""The rules about models trained on real text tell of every row, and of none what it does not say."""

import pytest
import rules_trained
import rules_trained_models
import rules_trained_rounds
import rules_trained_third


def gain(ratio: float) -> dict:
    return {"ratio": ratio, "standard_error": 0.004}


def speed_row(steps: int, batch: int, ours: float, builtin: float) -> dict:
    """A greedy row of bench_trained, with these tokens per second, one more and one less of them."""
    found = {"steps": steps, "batch": batch, "temperature": 0.0}
    for side, rate in (("ours", ours), ("builtin", builtin)):
        time = {"median": 100 / rate, "min_max": [99 / rate, 101 / rate]}
        rates = {"median": rate, "min_max": [rate - 1, rate + 1]}
        found[side] = {"tokens_per_s": rate, "tokens_per_s_spread": rates, "round_ms": time, "tpot_ms": time}
        found[side] |= {"ttft_ms": time, "accept": {"median": rate / 10}}
    return found


def test_a_trained_model_is_told_of_cell_by_cell():
    def side(accept: float) -> dict:
        return {"accept": accept, "standard_error": 0.0123}

    cell = {"length": 300, "temperature": 0.0, "requests": 384}
    report = {
        "accept": [
            cell | {"steps": 1, "ours": side(1.7), "builtin": side(1.7), "gain": gain(1.0)},
            cell | {"steps": 3, "ours": side(2.1), "shared": side(2.0), "builtin": side(2.0), "gain": gain(1.05)},
            cell | {"steps": 5, "ours": side(1.9), "shared": side(2.0), "builtin": side(2.0), "gain": gain(0.95)},
        ],
    }
    assert list(rules_trained.every_cell(report))[:2] == [
        "| 1 | 300 | 0 | 384 | 1.700 ± 0.012 | - | 1.700 ± 0.012 | 1.000 ± 0.004 |",
        "| 3 | 300 | 0 | 384 | 2.100 ± 0.012 | 2.000 ± 0.012 | 2.000 ± 0.012 | 1.050 ± 0.004 |",
    ]
    assert list(rules_trained.accept_sentences(report)) == [
        "0.950 to 1.050 times `shared`'s",
        "with one draft, where both sides do the same, 1.000 to 1.000",
        "at most 0.012 to N = 3",
        "at most 0.012 for N = 5 and 7",
    ]


def test_ranges_that_overlap_are_not_told_as_apart():
    apart = {"speed": [speed_row(n, batch, 12.0, 10.0 - 2 * (n == 7)) for n in (0, 1, 7) for batch in (1, 8, 32)]}
    with pytest.raises(AssertionError, match="one draft overlap"):
        list(rules_trained.speed_sentences({"speed": [*apart["speed"][:3], speed_row(1, 1, 11.0, 10.0), *apart["speed"][4:]]}))
    apart["speed"][3:6] = [speed_row(1, batch, 13.0, 10.0) for batch in (1, 8, 32)]
    assert next(iter(rules_trained.every_speed(apart))) == (
        "| 0 | 1 | 12 (11 to 13) | - | 10 (9 to 11) | 8.33 (8.25 to 8.42) | 10.00 (9.90 to 10.10) | "
        "8.33 (8.25 to 8.42) | 10.00 (9.90 to 10.10) |"
    )
    assert list(rules_trained.speed_sentences(apart)) == [
        "1.30, 1.30 and 1.30 times the tokens per second with one draft",
        "12 against 10 at batch 8",
        "12 against 10 at batch 32",
        "Of N = 0, 1 and 7 the most tokens per second come with 0 or 1",
        "a round with seven drafts takes 0.67 times the built-in's",
    ]


def test_a_speed_has_its_range_and_greedy_ranges_lie_apart():
    rows = [speed_row(steps, batch, 20.0, 10.0) for steps in (1, 3) for batch in (1, 8, 32)] + [speed_row(2, 1, 30.0, 10.0)]
    assert list(rules_trained_rounds.every_speed({"speed": rows[-1:]})) == [
        "| 2 | 0 | 1 | 30 (29 to 31) | 10 (9 to 11) | 3.33 (3.30 to 3.37) | 10.00 (9.90 to 10.10) | "
        "3.33 (3.30 to 3.37) | 10.00 (9.90 to 10.10) | 3.00 / 1.00 |"
    ]
    assert list(rules_trained_rounds.greedy_sentences({"speed": rows})) == [
        "2.00 / 2.00 / 2.00 times the built-in's tokens per second with three drafts",
        "2.00 / 2.00 / 2.00 times the built-in's tokens per second with one draft",
        "3.00 times with two, of which batch 1 alone was reached",
        "medians of the accept length are at most 2.00 apart",
    ]
    with pytest.raises(AssertionError, match="greedy ranges overlap"):
        list(rules_trained_rounds.greedy_sentences({"speed": [speed_row(3, 1, 12.0, 10.0), *rows[1:]]}))


def test_each_side_has_the_drafts_that_suit_it_best():
    def speed(temperature: float, fastest: float) -> list[dict]:
        rows = [speed_row(n, batch, 20.0 + n, 10.0 - n) for n in (0, 1, 2, 3, 5, 7) for batch in (1, 32)]
        rows += [speed_row(n, 8, fastest if n == 3 else 20.0 + n, 10.0 - n) for n in (0, 1, 2, 3, 5, 7)]
        return [row | {"temperature": temperature} for row in rows]

    found = rules_trained_third.best_of_each({"speed": speed(0.0, 40.0) + speed(1.0, 40.0)})
    assert [next(found) for _ in range(3)] == [
        "| ours | 0 | 27 / 40 / 27 | 7 / 3 / 7 | - | - | - |",
        "| built-in | 0 | 10 / 10 / 10 | 0 / 0 / 0 | all | all | all |",
        "| 27 / 40 / 27 | 10 / 10 / 10 |",
    ]
    assert next(found) == "2.70 / 4.00 / 2.70 times"
    found = rules_trained_third.best_of_each({"speed": speed(0.0, 23.0)})
    with pytest.raises(AssertionError, match="where the best N can be told"):
        list(found)


def test_rows_of_a_speed_table_that_ours_loses_are_named():
    rows = [speed_row(0, 1, 20.0, 10.0), speed_row(1, 8, 9.5, 10.0)]
    found = rules_trained_third.behind({"speed": rows})
    assert [next(found) for _ in range(3)] == [
        "fewer tokens per second: N = 1, T = 0, batch 8 (0.95)",
        "longer rounds: N = 1, T = 0, batch 8 (1.05)",
        "a later first token: N = 1, T = 0, batch 8 (1.05)",
    ]
    rows[1] = speed_row(1, 8, 5.0, 10.0)
    with pytest.raises(AssertionError, match="fewer tokens per second overlap"):
        list(rules_trained_third.behind({"speed": rows}))


def test_models_stand_beside_one_another():
    def cells(ratios: dict[float, float]) -> list[dict]:
        return [{"steps": 5, "temperature": t, "gain": gain(ratio)} for t, ratio in ratios.items()]

    reports = (
        {"accept": [*cells({0.0: 0.99, 0.7: 1.0, 1.0: 1.001}), {"steps": 1}]},
        {"accept": cells({0.0: 0.999, 0.7: 1.0, 1.0: 1.002})},
        {"accept": cells({0.0: 1.02, 0.7: 0.998, 1.0: 1.0})},
    )
    assert list(rules_trained_models.how_well_they_accept(reports)) == [
        "temperature 0 | temperature 0.7 | temperature 1",
        "| first | 3 | 0.990 to 1.001 | 0.997 | 0.990 | 1.000 | 1.001 | 1 / 0 |",
        "| second | 3 | 0.999 to 1.002 | 1.000 | 0.999 | 1.000 | 1.002 | 0 / 0 |",
        "| third | 3 | 0.998 to 1.020 | 1.006 | 1.020 | 0.998 | 1.000 | 0 / 1 |",
        "| all | 9 | 0.990 to 1.020 | 1.001 | 1.003 | 0.999 | 1.001 | 1 / 1 |",
        "0.990 to 1.020 times the built-in's",
        "over 9 cells, 1.001 on average",
        "1 of them are more than two standard errors below 1 and 1 above",
        "all greedy, where chance gives 0 in 3 greedy cells",
        "0.990 to 1.020 over greedy cells",
    ]
    reports[0]["accept"][2]["gain"] = gain(1.1)
    with pytest.raises(AssertionError, match="all of them are greedy"):
        list(rules_trained_models.how_well_they_accept(reports))
