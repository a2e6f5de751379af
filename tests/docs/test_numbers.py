"""Every measured number in README and docs is what the result file that the text names gives, over all of its rows."""

import pytest
import rules_accept
import rules_deployments
import rules_gained
import rules_kernels
import rules_more
import rules_rounds
import rules_sampled
import rules_serving
import rules_today
import rules_trained
import rules_trained_rounds
import rules_variants
from quoted import PAGES, RULES, SETTINGS, named, unexplained

# Importing them registers their rules.
MODULES = (
    rules_accept,
    rules_deployments,
    rules_gained,
    rules_kernels,
    rules_more,
    rules_rounds,
    rules_sampled,
    rules_serving,
    rules_today,
    rules_trained,
    rules_trained_rounds,
    rules_variants,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{'+'.join(rule.files)} {rule.says.__name__}")
def test_what_the_files_give_is_what_the_text_says(rule):
    sentences = rule.sentences()
    assert sentences
    assert [s for s in sentences if not any(s in text for text in PAGES.values())] == []


def test_every_file_that_the_text_names_has_a_rule():
    with_rules = {file for rule in RULES for file in rule.files}
    assert named() - with_rules == set()
    assert with_rules - named() == set()


@pytest.mark.parametrize("page", PAGES)
def test_every_number_in_the_text_comes_from_a_rule(page):
    sentences = [sentence for rule in RULES for sentence in rule.sentences()]
    assert unexplained(PAGES[page], sentences) == []


def test_every_setting_stands_in_the_text():
    assert [s for s in SETTINGS if not any(s in text for text in PAGES.values())] == []


def gain(ratio: float) -> dict:
    return {"ratio": ratio, "standard_error": 0.004}


def speed_row(steps: int, batch: int, ours: float, builtin: float) -> dict:
    """A greedy row of bench_trained, with these tokens per second, one more and one less of them."""
    found = {"steps": steps, "batch": batch, "temperature": 0.0}
    for side, rate in (("ours", ours), ("builtin", builtin)):
        time = {"median": 100 / rate, "min_max": [99 / rate, 101 / rate]}
        rates = {"median": rate, "min_max": [rate - 1, rate + 1]}
        found[side] = {"tokens_per_s": rate, "tokens_per_s_spread": rates, "round_ms": time, "tpot_ms": time}
        found[side]["accept"] = {"median": rate / 10}
    return found


class TestTheRulesThemselves:
    ROWS = (
        {"case": "grid fa3", "steps": 3, "decode": "fa3", "workloads": {"8x300": {"ours": {"mean": 3.95}}}},
        {"case": "grid fa3", "steps": 3, "decode": "fa3", "workloads": {"8x3000": {"ours": {"mean": 3.9}}}},
    )

    def test_a_rerun_stands_beside_the_first_run(self):
        report = {"rows": [self.ROWS[1]], "rerun": {"rows": [self.ROWS[0]]}}
        assert rules_accept.means(report, "ours", 3, "fa3") == [3.9, 3.95]

    def test_the_worst_row_is_in_the_range(self):
        (row,) = rules_accept.complete("e2e_new", {"rows": list(self.ROWS)})
        assert row == "| `benchmarks/results/e2e_new_h200.json` | 3 | fa3 | 2 | 3.90 to 3.95 | - |"

    def test_a_trained_model_is_told_of_cell_by_cell(self):
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
            "0.950 to 1.050 times the built-in's",
            "over 2 cells, 1.000 on average",
            "1 are more than two standard errors below 1, 1 of them greedy, and 1 above",
            "the furthest of them 0.950",
            "0.950 to 1.050 times `shared`'s",
            "with one draft, where both sides do the same, 1.000 to 1.000",
            "at most 0.012 to N = 3",
            "at most 0.012 for N = 5 and 7",
        ]

    def test_ranges_that_overlap_are_not_told_as_apart(self):
        apart = {"speed": [speed_row(n, batch, 12.0, 10.0 - 2 * (n == 7)) for n in (0, 1, 7) for batch in (1, 8, 32)]}
        with pytest.raises(AssertionError, match="one draft overlap"):
            list(
                rules_trained.speed_sentences(
                    {"speed": [*apart["speed"][:3], speed_row(1, 1, 11.0, 10.0), *apart["speed"][4:]]}
                )
            )
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

    def test_a_speed_has_its_range_and_greedy_ranges_lie_apart(self):
        rows = [speed_row(steps, batch, 20.0, 10.0) for steps in (1, 3) for batch in (1, 8, 32)] + [speed_row(2, 1, 30.0, 10.0)]
        assert list(rules_trained_rounds.every_speed({"speed": rows[-1:]})) == [
            "| 2 | 0 | 1 | 30 (29 to 31) | 10 (9 to 11) | 3.33 (3.30 to 3.37) | 10.00 (9.90 to 10.10) | "
            "3.33 (3.30 to 3.37) | 10.00 (9.90 to 10.10) | 3.00 / 1.00 |"
        ]
        assert list(rules_trained_rounds.greedy_sentences({"speed": rows})) == [
            "2.00 to 3.00 times the built-in's tokens per second, greedy",
            "2.00 / 2.00 / 2.00 times the built-in's tokens per second with three drafts",
            "2.00 / 2.00 / 2.00 times the built-in's tokens per second with one draft",
            "3.00 times with two, of which batch 1 alone was reached",
            "medians of the accept length are at most 2.00 apart",
        ]
        with pytest.raises(AssertionError, match="greedy ranges overlap"):
            list(rules_trained_rounds.greedy_sentences({"speed": [speed_row(3, 1, 12.0, 10.0), *rows[1:]]}))
        with pytest.raises(AssertionError):  # the README says that both sides accept alike
            list(rules_trained_rounds.gained({"speed": rows}))

    def test_engines_that_failed_are_told(self):
        rows = [{"case": "one", "steps": 3, "decode": "fa3", "workloads": {"8x300": {"builtin": {"mean": 2.3}}}}]
        (row,) = rules_accept.complete("e2e_new", {"rows": rows})
        assert row == "| `benchmarks/results/e2e_new_h200.json` | 3 | fa3 | 1 | - | 2.30 |"
        (row,) = rules_accept.parted("e2e_new", {"rows": rows, "differences": []})
        assert row == "| `benchmarks/results/e2e_new_h200.json` | none compared | - | - |"

    def test_cells_that_lose_are_named(self):
        def row(batch: int, ours: float, builtin: float) -> dict:
            sides = {side: {"tokens_per_s": {"median": rate}} for side, rate in (("ours", ours), ("builtin", builtin))}
            return {"checkpoint": "wide", "batch": batch, "length": 300} | sides

        assert (
            rules_more.behind([row(1, 12.0, 10.0), row(8, 9.0, 10.0)], "ours", "builtin", "tokens_per_s")
            == "wide 8 x 300 (0.900)"
        )

    @pytest.mark.parametrize(("chi_square", "freedom", "share"), [(3.84, 1, 0.05), (18.31, 10, 0.05), (249.4, 200, 0.01)])
    def test_how_often_chance_exceeds_a_chi_square(self, chi_square, freedom, share):
        assert rules_sampled.beyond(chi_square, freedom) == pytest.approx(share, rel=0.1)

    def test_rows_that_only_a_figure_shows_count(self):
        rows = [{"ours": {"gpu_us": n}, "floor_us": 1.0} for n in (1, 2)]
        assert rules_kernels.every_shape({"rows": rows[:1], "growth": rows[1:]}) == rows

    @pytest.mark.parametrize(
        ("text", "left"),
        [
            ("accept length 3.94 of 4", 0),
            ("accept length 3.94 of 4, and once 3.80", 1),
            ("2.11 of 4", 1),
            ("a launch of 12 us", 1),
            ("up to 40 % more", 1),
            ("SGLang 0.5.23 with 300 tokens", 0),
            ("within two steps of a bfloat16 logit (0.0626)", 0),
        ],
    )
    def test_a_number_that_no_rule_yields_is_found(self, text, left):
        assert len(unexplained(text, ["accept length 3.94 of 4"])) == left
