"""One rule for all tests: what is to run on a GPU is not run through Triton's interpreter."""

import os

import pytest


def pytest_configure(config):
    """The conftests of the tests that need no GPU have been loaded by now, and choose the interpreter for the whole process."""
    if config.option.markexpr.strip() == "gpu" and os.environ.get("TRITON_INTERPRET") == "1":
        raise pytest.UsageError("-m gpu would run the kernels through Triton's interpreter here: run `make test-gpu` on a GPU")
