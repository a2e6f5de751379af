"""SGLang with the plugin on one H200, and the model runner of DeepSeek-V3.2's shape that the benchmarks use too."""

import pytest


@pytest.fixture(scope="session")
def make_runner():
    """Returns `fake_runner(num_steps, context, ...)`: what the backends read from a ModelRunner, without a model."""
    from nsa_backend.benchmarks.bench_common import fake_runner, start_host

    start_host()
    return fake_runner
