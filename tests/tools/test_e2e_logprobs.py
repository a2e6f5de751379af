"""Log-probabilities of an end-to-end run: that they are of the tokens they stand beside, and how two sides are compared."""

import pytest
import reports
from logprobs import apart, far_apart, told
from workloads import CASES

CASE = next(case for case in CASES if case.name == "n3 fa3, log-probabilities, one graph a round")


def answer(ids: list[int], of: list[int] | None = None, meta: dict | None = None) -> dict:
    pairs = [(-0.5 * n, token, None) for n, token in enumerate(ids if of is None else of)]
    return {"output_ids": ids, "meta_info": {"output_token_logprobs": pairs} | (meta or {})}


@pytest.mark.parametrize("of", [[7], [8, 7]])
def test_those_of_other_tokens(of):
    with pytest.raises(RuntimeError, match=f"log-probabilities of {len(of)} tokens are not those of 2"):
        told([answer([7, 8], of)])


def side(shift: float, ids: tuple[int, ...] = (1, 2, 3)) -> dict:
    return {"output_ids": [list(ids), [4]], "logprobs": [[-1.0 - shift, -2.0, -3.0][: len(ids)], [-4.0]]}


def test_sides_are_compared_up_to_where_they_part():
    assert apart(side(0.25), side(0)) == {"positions": 4, "mean": 0.0625, "largest": 0.25}
    assert apart(side(0.25), side(0, (1, 9, 3))) == {"positions": 2, "mean": 0.125, "largest": 0.25}


@pytest.mark.parametrize(
    ("shift", "problem"),
    [(0.1, None), (4.0, "1.0 apart in the mean and 4.0 at most"), (1.5, "0.375 apart in the mean and 1.5 at most")],
)
def test_what_is_too_far(shift, problem):
    result = side(shift) | {key: [] for key in ("histograms", "cached_tokens", "host_tokens", "storage_tokens")}
    result |= {"accept": [3.9], "seconds": 1.0}
    given = {name: {w: result | only for w in CASE.measured()} for name, only in (("ours", {}), ("builtin", side(0)))}
    row = reports.row_of(CASE, given)
    assert row["logprobs"].keys() == set(CASE.measured())
    wanted = [f"{CASE.name}, {w}: log-probabilities are {problem}, above 0.05 or 1.0" for w in CASE.measured() if problem]
    assert far_apart(row) == wanted
    rare = {"positions": 1000, "mean": 0.002, "largest": 2.0}
    assert len(far_apart({"case": "x", "logprobs": {"8x300": rare}})) == 1
    assert "logprobs" not in reports.row_of(CASE, {"ours": given["ours"]})
