"""Where a draft was rejected, from the chunks of a stream."""

import json
import threading

import pytest
from rejections import rejected_positions, streamed
from soak_traffic import Client
from stand_in_server import Handler


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


CHUNKS = [{"output_ids": list(range(n)), "meta_info": {"completion_tokens": n}} for n in (1, 5, 7)]
DATA = [f"data: {json.dumps(chunk)}" for chunk in CHUNKS]


def streaming(lines: list[str], hold: threading.Event | None = None) -> type[Handler]:
    """Answers every request with these lines."""

    class Streaming(Handler):
        def do_POST(self):
            assert self.body()["stream"]
            self.begin()
            for line in lines:
                self.wfile.write(f"{line}\n\n".encode())
            if hold:
                hold.wait(10)

    return Streaming


def test_a_stream_to_its_end(serving):
    port = serving(streaming([*DATA, "data: [DONE]"]))
    assert streamed(port, [3, 4], 7) == (CHUNKS[-1], [1, 5, 7])
    assert Client(port).stream({}, 5.0) == CHUNKS[-1]


def test_a_stream_that_breaks_off(serving):
    port = serving(streaming(DATA))
    with pytest.raises(RuntimeError, match=r"the stream ended without \[DONE\], status 200"):
        streamed(port, [3, 4], 7)


def test_a_stream_that_is_taken_back(serving):
    hold = threading.Event()
    assert Client(serving(streaming(DATA, hold))).stream({}, 0.3) is None
    hold.set()
