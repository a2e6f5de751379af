"""The real SGLang package in this process, with the plugin loaded, on a machine without a GPU."""

import pytest

from nsa_backend.testing.process import start_process

start_process()


@pytest.fixture
def make_runner():
    """Returns a function of (table_width, pool_size, num_steps, index_topk) that builds a CPU model runner."""
    from cpu_runner import build

    return build
