"""The command line's options as servers of this package need them: old spellings kept, and our own kernels among the values."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from nsa_backend.adapters.old_options import add_aliases

DECODE_OPTIONS = ("--nsa-decode-backend", "--dsa-decode-backend")
OWN_DECODE_VALUES = ("sparse_decode", "sparse_verify")
"""What SGLang's closed list of decode implementations does not have."""


def add_options(original: Callable, parser: argparse.ArgumentParser) -> None:
    """Around `ServerArgs.add_cli_args`: the aliases, and each of our own implementations as a value of the decode option."""
    add_aliases(original, parser)
    for name in DECODE_OPTIONS:
        if option := parser._option_string_actions.get(name):
            option.choices = [*option.choices, *OWN_DECODE_VALUES]  # SGLang's list is other options' too
