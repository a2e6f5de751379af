"""Where a draft was rejected, from the chunks of a stream."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from rejections import rejected_positions


@pytest.mark.parametrize(
    ("lengths", "histogram", "expected"),
    [
        ([1, 5, 9, 13], [0, 0, 0, 3], []),
        # After the prefill's token a round accepts 1 of 3: draft 2, at position 2, gave way to the target's token.
        ([1, 3, 7, 11], [0, 1, 0, 2], [2]),
        ([1, 2, 6, 9, 13], [1, 0, 1, 2], [1, 8]),
        # The last round accepted all, and the limit on new tokens cut it.
        ([1, 5, 7], [0, 0, 0, 2], []),
        ([1, 3, 5], [0, 1, 0, 1], [2]),
    ],
)
def test_positions(lengths, histogram, expected):
    assert rejected_positions(lengths, histogram, steps=3) == expected


@pytest.mark.parametrize(
    ("lengths", "histogram"),
    [
        ([1, 5, 13], [0, 0, 0, 3]),  # two rounds in one chunk
        ([5, 9], [0, 0, 0, 2]),  # the first round with the prefill's token
        ([1, 3, 7, 11], [0, 0, 1, 2]),  # as many rounds, others than SGLang counted
        ([1, 5, 5, 9], [0, 0, 0, 3]),  # a chunk without a token
        ([], []),
    ],
)
def test_chunks_that_are_not_the_rounds(lengths, histogram):
    assert rejected_positions(lengths, histogram, steps=3) is None
