"""The entry point that SGLang's plugin loader calls in every process, before it reads the server's arguments."""

from __future__ import annotations

import logging
import os
from importlib.metadata import PackageNotFoundError, version

from nsa_backend import __version__

logger = logging.getLogger(__name__)

SUPPORTED_HOSTS = ("0.5.12.post1",)
"""SGLang releases whose attention and draft interfaces this package was written against and tested with."""


def register() -> None:
    """Take over the attention backend `nsa`, or say in one line why not and change nothing."""
    if os.environ.get("NSA_BACKEND_DISABLE", "0").lower() in ("1", "true"):
        logger.warning("nsa_backend %s: NSA_BACKEND_DISABLE is set, SGLang's built-in nsa backend serves", __version__)
        return
    host = _host_release()
    if host not in SUPPORTED_HOSTS:
        logger.warning(
            "nsa_backend %s supports SGLang %s, not %s: SGLang's built-in nsa backend serves",
            __version__,
            ", ".join(SUPPORTED_HOSTS),
            host,
        )
        return
    from nsa_backend.registration import take_over_nsa

    take_over_nsa()


def _host_release() -> str:
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "a source tree without a version"
