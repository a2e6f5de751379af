"""`--warmups round_graphs`, by which rounds in one graph were once captured before a server is ready: they are anyway."""

from __future__ import annotations

import logging
from typing import Any

from nsa_backend.releases import ROUND_WARM_UP

logger = logging.getLogger(__name__)


def offer() -> None:
    """Put the warm-up among SGLang's, so that servers whose commands name it start."""
    from sglang.srt.entrypoints.warmup import warmup

    warmup(ROUND_WARM_UP)(_nothing_to_do)


async def _nothing_to_do(disaggregation_mode: str, tokenizer_manager: Any) -> None:
    logger.info("nsa_backend: --warmups %s can be dropped: rounds are captured before a server is ready", ROUND_WARM_UP)
