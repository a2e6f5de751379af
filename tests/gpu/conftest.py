"""SGLang with the plugin on one H200, and the model runner of DeepSeek-V3.2's shape that the benchmarks use too."""

import pytest
import torch


@pytest.fixture(scope="session")
def make_runner():
    """Returns `make_gpu_runner(num_steps, context, ...)`: what the backends read from a ModelRunner, without a model."""
    from nsa_backend.testing.process import start_sglang
    from nsa_backend.testing.runner import make_gpu_runner

    start_sglang()
    return make_gpu_runner


@pytest.fixture
def side_stream():
    """A capture needs a stream that is not the default one; SGLang's forward stream is."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        yield
