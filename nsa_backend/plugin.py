"""The entry point that SGLang's plugin loader calls in every process, before it reads the server's arguments."""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, version

from nsa_backend import __version__
from nsa_backend.switches import check_switches, switch

logger = logging.getLogger(__name__)

SUPPORTED_HOSTS = ("0.5.12.post1",)
"""SGLang releases whose attention and draft interfaces this package was written against and tested with."""


def register() -> None:
    """Take over the attention backend `nsa`, or say in one line why not and change nothing.

    SGLang's loader logs an exception and goes on with its built-in backend, so what must stop the server leaves as
    SystemExit: a bad value in one of our environment variables, and any reason not to serve under NSA_BACKEND_REQUIRED=1.
    """
    check_switches()
    required, disabled = switch("NSA_BACKEND_REQUIRED"), switch("NSA_BACKEND_DISABLE")
    reason = "NSA_BACKEND_DISABLE is set" if disabled else unsupported_host()
    if reason is None:
        try:
            from nsa_backend.registration import take_over_nsa

            take_over_nsa()
        except Exception as error:
            if not required:
                raise
            raise SystemExit(f"nsa_backend {__version__} did not load and NSA_BACKEND_REQUIRED=1: {error}") from error
    elif required:
        raise SystemExit(f"nsa_backend {__version__} does not serve and NSA_BACKEND_REQUIRED=1: {reason}")
    else:
        logger.warning("nsa_backend %s: %s, SGLang's built-in nsa backend serves", __version__, reason)


def unsupported_host() -> str | None:
    """Why this SGLang is not one we support, or None."""
    try:
        host = version("sglang")
    except PackageNotFoundError:
        host = "a source tree without a version"
    if host in SUPPORTED_HOSTS:
        return None
    return f"it supports SGLang {', '.join(SUPPORTED_HOSTS)} and this is {host}"
