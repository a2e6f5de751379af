"""Options of older releases of SGLang that a newer one dropped: kept, so that a command line serves on all of them.

Apart from the adapters, which load SGLang's attention: the options stay where the plugin is disabled too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

ADD_OPTIONS = "sglang.srt.server_args.ServerArgs.add_cli_args"
ALIASES = {"--nsa-decode-backend": "--dsa-decode-backend", "--nsa-prefill-backend": "--dsa-prefill-backend"}
"""Dropped by 0.5.20, to the options that set the same."""


def add_aliases(original: Callable, parser: argparse.ArgumentParser) -> None:
    """Around `ServerArgs.add_cli_args`: add each old option that SGLang does not have next to its new one."""
    original(parser)
    options = parser._option_string_actions
    for old, new in ALIASES.items():
        if old not in options and new in options:
            same = options[new]
            parser.add_argument(old, dest=same.dest, choices=same.choices, default=argparse.SUPPRESS, help=f"the same as {new}")


def keep_without_the_plugin() -> None:
    """Leave the hook to SGLang's own registry, which logs a failure and goes on: nothing else of ours is loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(ADD_OPTIONS, add_aliases, HookType.AROUND)
