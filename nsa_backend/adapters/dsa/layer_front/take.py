"""The decision, once a layer, whose front a model has; made when its backend is built, with the weights loaded."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from nsa_backend.adapters.dsa.layer_front.front import LayerFront
from nsa_backend.adapters.dsa.layer_front.options import server_problems
from nsa_backend.adapters.dsa.layer_front.projections import scales_of
from nsa_backend.adapters.dsa.layer_front.rule import device_problem, layer_problem
from nsa_backend.adapters.dsa.layer_front.same_bits import differing_parts

SWITCH = "NSA_BACKEND_LAYER_FRONT"

logger = logging.getLogger(__name__)


def take_layer_fronts(model: Any, kv_pool: Any, args: Any, backends: tuple[type, ...], demanded: bool) -> int:
    """Put our front before every layer of `model` that can have it; the log says of how many, and why not of the others.

    Args:
        model: SGLang's, loaded.
        kv_pool: of its KV and index keys.
        args: the server's resolved arguments.
        backends: our attention backends.
        demanded: whether a model without any such layer is refused.

    Returns:
        How many layers have it.

    Raises:
        ValueError: none can, and it is demanded; says why.
    """
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

    layers = [module for module in model.modules() if isinstance(module, DeepseekV2AttentionMLA)]
    taken = sum(isinstance(layer.forward_absorb_prepare, LayerFront) for layer in layers)
    if taken or not (layers or demanded):  # the backends of a draft model come one after another
        return taken
    problem = next(iter(server_problems(args)), None) or device_problem()
    problems = Counter(problem or layer_problem(layer) for layer in layers)
    served = [layer for layer in layers if problem is None and layer_problem(layer) is None]
    first = served[0] if served else None
    if first is not None and first.w_kc.is_cuda:
        different = differing_parts(first, kv_pool.get_key_buffer(first.layer_id), scales_of(first.indexer.wq_b))
        if different:
            problems, served = Counter({f"this GPU writes other bits than SGLang's kernels ({different[0]})": len(layers)}), []
    reasons = "; ".join(f"{why} ({count})" for why, count in problems.items() if why is not None)
    if not served and demanded:
        raise ValueError(f"{SWITCH}=1 and no layer can have its front in two launches: {reasons or 'it has none'}; unset it")
    for layer in served:
        layer.forward_absorb_prepare = LayerFront(layer, backends)
    logger.info(
        "nsa_backend: the front of %d of %d layers is two launches in captured forwards%s",
        len(served),
        len(layers),
        f"; SGLang's own serves the others: {reasons}" if reasons else "",
    )
    return len(served)
