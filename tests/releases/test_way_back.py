"""NSA_BACKEND_DISABLE=1: the command line that this backend served goes on working, with SGLang's own backend."""

import argparse
import inspect
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from sglang.srt.server_args import ServerArgs

from nsa_backend.adapters.installed import adapter

pytestmark = pytest.mark.slow

PARSE = """
import argparse, sys
if {release!r}:
    from nsa_backend import releases
    releases.version = lambda name: {release!r}
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
args = parser.parse_args(sys.argv[1:])
print("parsed", getattr(args, {decode!r}), getattr(args, {prefill!r}))
ours = ("nsa_backend.adapters.installed", "nsa_backend.adapters.nsa", "nsa_backend.adapters.dsa", "nsa_backend.backend")
print("ours loaded", [name for name in sys.modules if name.startswith(ours)])
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
print("modules", {{ATTENTION_BACKENDS[name].__module__ for name in ("nsa", "dsa") if name in ATTENTION_BACKENDS}})
"""

README = "--model-path m --attention-backend nsa --nsa-decode-backend fa3 --nsa-prefill-backend flashmla_sparse"


OTHER_RELEASE = "0.6.0"


@pytest.fixture(scope="module")
def disabled() -> dict[str, subprocess.CompletedProcess]:
    """What comes of the README's command where the plugin is off, by a release that is not served or "" for the installed one.

    Both are started at once: each loads SGLang.
    """

    def parsed(release: str) -> subprocess.CompletedProcess:
        code = PARSE.format(release=release, decode=adapter.DECODE_ATTRIBUTE, prefill=adapter.PREFILL_ATTRIBUTE)
        return subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code, *README.split()],
            env=os.environ | {"NSA_BACKEND_DISABLE": "1"}, capture_output=True, text=True, check=False,
        )  # fmt: skip

    releases = ("", OTHER_RELEASE)
    with ThreadPoolExecutor() as pool:
        return dict(zip(releases, pool.map(parsed, releases), strict=True))


def test_a_disabled_plugin_keeps_the_options_of_older_releases(disabled):
    done = disabled[""]
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-3:] == [
        "parsed fa3 flashmla_sparse",
        "ours loaded []",
        "modules {'sglang.srt.layers.attention.attention_registry'}",
    ]
    assert "unrecognized arguments" not in done.stderr


def test_an_unsupported_release_keeps_its_own_options_alone(disabled):
    """There nothing is changed: the release says itself what it no longer knows."""
    done = disabled[OTHER_RELEASE]
    plain = argparse.ArgumentParser()
    inspect.unwrap(ServerArgs.add_cli_args)(plain)
    dropped = "--nsa-decode-backend" not in plain._option_string_actions
    assert ("unrecognized arguments: --nsa-decode-backend" in done.stderr) == dropped
    assert (done.returncode != 0) == dropped
