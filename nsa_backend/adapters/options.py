"""The command line's options as servers of this package need them: old spellings kept, and our own kernels among the values.

What a newer release dropped stays where the plugin is disabled too, so nothing here loads SGLang's attention.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

from nsa_backend.adapters import alike_ranks

ADD_OPTIONS = "sglang.srt.server_args.ServerArgs.add_cli_args"
ALIASES = {"--nsa-decode-backend": "--dsa-decode-backend", "--nsa-prefill-backend": "--dsa-prefill-backend"}
"""Dropped by 0.5.20, to the options that set the same."""

DIVIDE = ("--enable-nsa-prefill-context-parallel", "--enable-dsa-prefill-context-parallel")
HOW_TO_DIVIDE = ("--nsa-prefill-cp-mode", "--dsa-prefill-cp-mode")
STRATEGIES = {"round-robin-split": "interleave", "in-seq-split": "zigzag"}
"""Prefill context parallel as public commands have it: deprecated in 0.5.17 and gone in 0.5.23, which has --enable-prefill-cp
and --cp-strategy for them. The first strategy was the default."""

DECODE_OPTIONS = ("--nsa-decode-backend", "--dsa-decode-backend")
PREFILL_OPTIONS = ("--nsa-prefill-backend", "--dsa-prefill-backend")
OWN_DECODE_VALUES = ("sparse_decode", "sparse_verify")
OWN_PREFILL_VALUES = ("sparse_prefill",)
"""What SGLang's closed lists of implementations do not have."""


class _Divide(argparse.Action):
    """Both options that a newer release has for one old one; a strategy that is given stays."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        namespace.enable_prefill_cp = True
        if getattr(namespace, "cp_strategy", None) is None:
            namespace.cp_strategy = next(iter(STRATEGIES.values()))


class _HowToDivide(argparse.Action):
    """The strategy by its old name."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: str, option_string: str | None = None) -> None:
        namespace.cp_strategy = STRATEGIES[values]


def add_aliases(original: Callable, parser: argparse.ArgumentParser) -> None:
    """Around `ServerArgs.add_cli_args`: add each old option that SGLang does not have next to its new one."""
    original(parser)
    options = parser._option_string_actions
    for old, new in ALIASES.items():
        if old not in options and new in options:
            same = options[new]
            parser.add_argument(old, dest=same.dest, choices=same.choices, default=argparse.SUPPRESS, help=f"the same as {new}")
    if not {"--enable-prefill-cp", "--cp-strategy"} <= options.keys():
        return
    for name in DIVIDE:
        if name not in options:
            say = f"--enable-prefill-cp with --cp-strategy {STRATEGIES['round-robin-split']}, where none is given"
            parser.add_argument(name, action=_Divide, nargs=0, dest="enable_prefill_cp", default=argparse.SUPPRESS, help=say)
    for name in HOW_TO_DIVIDE:
        if name not in options:
            say = "--cp-strategy by its old names: " + ", ".join(f"{old} is {new}" for old, new in STRATEGIES.items())
            choices = list(STRATEGIES)
            parser.add_argument(
                name, action=_HowToDivide, choices=choices, dest="cp_strategy", default=argparse.SUPPRESS, help=say
            )


def add_options(original: Callable, parser: argparse.ArgumentParser) -> None:
    """Around `ServerArgs.add_cli_args`: the aliases, and each of our own implementations as a value of its option."""
    add_aliases(original, parser)
    for names, values in ((DECODE_OPTIONS, OWN_DECODE_VALUES), (PREFILL_OPTIONS, OWN_PREFILL_VALUES)):
        for option in filter(None, map(parser._option_string_actions.get, names)):
            option.choices = [*option.choices, *values]  # SGLang's list is other options' too


def keep_when_disabled() -> None:
    """Hook what stays, and what tells the other ranks of the server, through SGLang's own registry: nothing else is loaded.

    It logs a failure and goes on.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(ADD_OPTIONS, add_aliases, HookType.AROUND)
    HookRegistry.register(alike_ranks.MEET, partial(alike_ranks.meet, alike_ranks.nobody_serves), HookType.AROUND)
