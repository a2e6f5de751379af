"""What a server has compiled at its start is all that it needs: nothing is compiled in the way of a request."""

from __future__ import annotations

import pytest
from in_a_process import printed_by

KERNELS = {
    "metadata_kernel": 3,  # rows of decode, draft rounds, D rows a request
    "prefill_kernel": 1,
    "topk_slots_kernel": 1,
    "join_query_kernel": 1,
    "fill_inputs_kernel": 2,
    "store_results_kernel": 1,
    "join_kernel": 4,  # two tiles, with a log-sum-exp and without
    "local_slots_kernel": 1,
    "partial_lse_kernel": 2,  # in base 2 and in base e, whatever the strides
    "quantise_kernel": 2,
}


@pytest.fixture(scope="module")
def compiled() -> dict:
    return printed_by("launch_variants.py")


def test_serving_compiles_nothing_that_the_start_has_not(compiled):
    """Whatever the sizes of batches, the lengths of requests, and where in SGLang's tensors a batch begins."""
    assert {name: keys["serve"] for name, keys in compiled["keys"].items() if keys["serve"]} == {}


def test_each_kernel_has_the_forms_that_its_options_ask_for(compiled):
    forms = {name: len(keys["start"]) for name, keys in compiled["keys"].items()}
    assert forms == KERNELS | {"attend_kernel": 2 * compiled["forms_of_decode"]}  # of a rank's part too
