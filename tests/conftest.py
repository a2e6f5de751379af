"""Rules for all tests: what is to run on a GPU is not run through Triton's interpreter, and properties are tried quickly."""

import gc
import os
import tempfile

import pytest
from hypothesis import settings

settings.register_profile("quick", deadline=None, max_examples=20)
settings.register_profile("full", deadline=None, max_examples=100)  # --hypothesis-profile=full: `make test-all`
if settings.get_current_profile_name() != "mutants":  # of tests/mutation, which runs tests in its own process
    settings.load_profile("quick")


@pytest.fixture(autouse=True, scope="session")
def temporary_files(tmp_path_factory):
    """What SGLang leaves for every server's command, a file a socket, goes with pytest's folders; a GPU's caches stay."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        os.environ["TMPDIR"] = tempfile.tempdir = str(tmp_path_factory.mktemp("left"))


@pytest.fixture
def make_runner():
    """Returns a function of (table_width, pool_size, num_steps, index_topk) that builds a CPU model runner."""
    from cpu_runner import build

    return build


def pytest_configure(config):
    """The conftests of the tests that need no GPU have been loaded by now, and choose the interpreter for the whole process."""
    if config.option.markexpr.strip() == "gpu" and os.environ.get("TRITON_INTERPRET") == "1":
        raise pytest.UsageError("-m gpu would run the kernels through Triton's interpreter here: run `make test-gpu` on a GPU")


def pytest_collection_finish():
    """What was imported stays: no collection walks SGLang's modules again, as those before captures of rounds would."""
    gc.collect()
    gc.freeze()
