"""Every measured number in README and docs is what the result file that the text names gives, over all of its rows."""

import pytest
import rules_accept
import rules_calls
import rules_course
import rules_deployments
import rules_gained
import rules_kernels
import rules_launches
import rules_losses
import rules_more
import rules_own_model
import rules_ranks
import rules_rounds
import rules_sampled
import rules_serving
import rules_shared
import rules_today
import rules_trained
import rules_trained_models
import rules_trained_rounds
import rules_trained_third
import rules_variants
from quoted import PAGES, RULES, SETTINGS, named, named_on, unexplained

# Importing them registers their rules.
MODULES = (
    rules_accept,
    rules_calls,
    rules_course,
    rules_deployments,
    rules_gained,
    rules_kernels,
    rules_launches,
    rules_losses,
    rules_more,
    rules_own_model,
    rules_ranks,
    rules_rounds,
    rules_sampled,
    rules_serving,
    rules_shared,
    rules_today,
    rules_trained,
    rules_trained_models,
    rules_trained_rounds,
    rules_trained_third,
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


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/numbers")])
def test_a_page_of_numbers_names_the_files_that_its_numbers_come_from(page):
    here = named_on(page)
    sentences = [sentence for rule in RULES if here.issuperset(rule.files) for sentence in rule.sentences()]
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
