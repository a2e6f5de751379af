"""Weights of a layer's later projections, asked for once its first ones are multiplied, in captured forwards of few rows."""

from __future__ import annotations

from typing import Any

from nsa_backend.adapters.dsa.layer_front.streams import SideStream
from nsa_backend.environment import switched_on
from nsa_backend.kernels.weights_ahead import ask_for

SWITCH = "NSA_BACKEND_WEIGHTS_AHEAD"
MOST_ROWS = 16
"""Of more, products read their weights while they multiply."""


def ask_ahead(attention: Any, rows: int, side: SideStream) -> None:
    """Ask for what the query's projections, attention's values and o_proj of a DeepseekV2AttentionMLA multiply.

    The first products have the memory for themselves; the norms behind them, and attention, hardly need it.
    """
    if switched_on(SWITCH) and side.is_apart and 0 < rows <= MOST_ROWS:
        side.fork()
        with side.running():
            ask_for(attention.q_b_proj.weight, attention.w_kc, attention.w_vc, attention.o_proj.weight)
