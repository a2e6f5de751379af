"""Every measured number in README and docs is what the result file that the text names gives, over all of its rows."""

import pytest
import rules_accept
import rules_kernels
import rules_serving
import rules_today
import rules_trained
from quoted import PAGES, RULES, SETTINGS, named, unexplained

MODULES = (rules_accept, rules_kernels, rules_serving, rules_today, rules_trained)  # importing them registers their rules


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

        gain = {"ratio": 1.05, "standard_error": 0.004}
        cell = {"length": 300, "temperature": 0.0, "requests": 384, "gain": gain}
        rate = {
            batch: {"batch": batch, "ours": {"tokens_per_s": 10.4 * batch}, "builtin": {"tokens_per_s": 10.0}}
            for batch in (1, 8, 32)
        }
        report = {
            "training": {"language": {"tokens": 110e6, "held_out": {"target": 1.234, "mtp": 1.5}}},
            "accept": [
                cell | {"steps": 1, "ours": side(1.7), "builtin": side(1.7)},
                cell | {"steps": 3, "ours": side(2.1), "shared": side(2.05), "builtin": side(2.0)},
            ],
            "speed": [rate[batch] | {"steps": steps} for steps in (0, 1, 3) for batch in rate],
        }
        assert list(rules_trained.says(report)) == [
            "| 0 | - | - | - | - | 10 / 10 | 83 / 10 | 333 / 10 |",
            "| 1 | 1.70 | - | 1.70 | 1.050 | 10 / 10 | 83 / 10 | 333 / 10 |",
            "| 3 | 2.10 | 2.05 | 2.00 | 1.050 | 10 / 10 | 83 / 10 | 333 / 10 |",
            "| 1 | 300 | 0 | 384 | 1.700 ± 0.012 | - | 1.700 ± 0.012 | 1.050 ± 0.004 |",
            "| 3 | 300 | 0 | 384 | 2.100 ± 0.012 | 2.050 ± 0.012 | 2.000 ± 0.012 | 1.050 ± 0.004 |",
            *(f"At batch {batch} the best N is 0 for ours and 0 for the built-in backend" for batch in (1, 8, 32)),
            "accept lengths are 1.050 to 1.050 times the built-in's for N above 1",
            "standard errors of accept lengths are at most 0.012",
            "110M tokens, held-out loss 1.23 nats a token of the target and 1.50 of the MTP layer",
        ]

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
