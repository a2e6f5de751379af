"""The entry point that SGLang's plugin loader calls in every process, before it reads the server's arguments."""

from __future__ import annotations

import logging

from nsa_backend import __version__
from nsa_backend.adapters.options import keep_when_disabled
from nsa_backend.environment import check_switches, switched_on
from nsa_backend.releases import unsupported_host

logger = logging.getLogger(__name__)


def register() -> None:
    """Take over DeepSeek sparse attention, or say in one line why not and change nothing.

    Switched off, it still keeps the options of older releases: the command line that chose this backend goes on working. And it
    says so to the other ranks of its server, which would wait for it in vain.

    SGLang's loader logs an exception and goes on with its built-in backend, so what must stop the server leaves as
    SystemExit: a bad value in one of our environment variables, and any reason not to serve under NSA_BACKEND_REQUIRED=1.
    """
    check_switches()
    required, disabled = switched_on("NSA_BACKEND_REQUIRED"), switched_on("NSA_BACKEND_DISABLE")
    reason = "NSA_BACKEND_DISABLE is set" if disabled else unsupported_host()
    if reason is None:
        try:
            from nsa_backend.registration import take_over

            take_over()
        except Exception as error:
            if not required:
                raise
            raise SystemExit(f"nsa_backend {__version__} did not load and NSA_BACKEND_REQUIRED=1: {error}") from error
    elif required:
        raise SystemExit(f"nsa_backend {__version__} does not serve and NSA_BACKEND_REQUIRED=1: {reason}")
    else:
        if disabled and unsupported_host() is None:
            keep_when_disabled()
        logger.warning("nsa_backend %s: %s, SGLang's built-in backend serves", __version__, reason)
