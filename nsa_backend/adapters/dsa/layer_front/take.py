"""The decision, once a layer, whose front a model has; made when its backend is built, with the weights loaded."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from nsa_backend.adapters.dsa.layer_front import index_prefills, norms, prefill_rules, prefills, short
from nsa_backend.adapters.dsa.layer_front.front import LayerFront
from nsa_backend.adapters.dsa.layer_front.options import server_problems
from nsa_backend.adapters.dsa.layer_front.projections import scales_of
from nsa_backend.adapters.dsa.layer_front.rule import device_problem, layer_problem
from nsa_backend.adapters.dsa.layer_front.same_bits import ROWS, differing_parts
from nsa_backend.adapters.dsa.layer_front.values import LayerValues, values_problem
from nsa_backend.adapters.dsa.rounds.ranks import least_of_ranks
from nsa_backend.environment import switched_on

SWITCH = "NSA_BACKEND_LAYER_FRONT"

logger = logging.getLogger(__name__)


def take_layer_fronts(
    model: Any,
    kv_pool: Any,
    args: Any,
    backends: tuple[type, ...],
    demanded: bool,
    of_target: bool = True,
    *,
    prefill_named: bool = False,
) -> int:
    """Put our front before every layer of `model` that can have it; the log says of how many, and why not of the others.

    Args:
        model: SGLang's, loaded.
        kv_pool: of its KV and index keys.
        args: the server's resolved arguments.
        backends: our attention backends.
        demanded: whether a model without any such layer is refused.
        of_target: whether it is the target's, whose graphs may be captured for short requests too.
        prefill_named: whether the user named an implementation for prefill.

    Returns:
        How many layers have it.

    Raises:
        ValueError: none can, and that is demanded, or graphs of short requests or prefills are; says why.
    """
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

    layers = [module for module in model.modules() if isinstance(module, DeepseekV2AttentionMLA)]
    taken = sum(isinstance(layer.forward_absorb_prepare, LayerFront) for layer in layers)
    if taken or not (layers or demanded):  # the backends of a draft model come one after another
        return taken
    problem = next(iter(server_problems(args)), None) or device_problem()
    problem_of = {layer: problem or layer_problem(layer) for layer in layers}
    problems, served = Counter(problem_of.values()), [layer for layer in layers if problem_of[layer] is None]
    for layer in {layer.indexer is None: layer for layer in reversed(served)}.values():  # the first of either kind
        if layer.w_kc.is_cuda:
            looked_at = layer, kv_pool.get_key_buffer(layer.layer_id), scales_of(layer.q_b_proj)
            different = [part for rows in ROWS for part in differing_parts(*looked_at, rows)]
            if different:
                problems = Counter({f"this GPU writes other bits than SGLang's kernels ({different[0]})": len(layers)})
                served = []
    reasons = "; ".join(f"{why} ({count})" for why, count in problems.items() if why is not None)
    if not served and demanded:
        raise ValueError(f"{SWITCH}=1 and no layer can have its front in two launches: {reasons or 'it has none'}; unset it")
    selecting = [layer.indexer.index_topk for layer in served if layer.indexer is not None]
    if of_target and switched_on(short.SWITCH) and not selecting:
        raise ValueError(f"{short.SWITCH}=1 and no layer has our front: {reasons or 'it has none'}; unset it")
    if of_target and short.wanted(args) and least_of_ranks(bool(selecting)):  # ranks capture together, or none does
        short.offer(selecting[0], drafts=args.speculative_algorithm is not None)
    if of_target and prefill_rules.wanted(args, prefill_named):
        if least_of_ranks(bool(selecting) and len(served) == len(layers)):
            prefills.offer(model, served)
        elif switched_on(prefill_rules.SWITCH):
            raise ValueError(f"{prefill_rules.SWITCH}=1 and layers lack our front: {reasons or 'of another rank'}; unset it")
    every_token = short.EveryToken()
    for layer in served:
        layer.forward_absorb_prepare = LayerFront(layer, backends, every_token)
        if layer.w_kc.is_cuda:
            layer.forward_absorb_prepare.compile_ahead(kv_pool.get_key_buffer(layer.layer_id).dtype)
    norms.take(model)
    index_prefills.take(served, backends)
    values_problem_of = {layer: values_problem(layer) for layer in served}
    for layer, problem in values_problem_of.items():
        if problem is None:
            layer.forward_absorb_core = LayerValues(layer)
    logger.info(
        "nsa_backend: the front of %d of %d layers is two launches in captured forwards%s%s",
        len(served),
        len(layers),
        f"; SGLang's own serves the others: {reasons}" if reasons else "",
        "".join(
            f"; behind the attention of {count}, "
            + (f"SGLang serves, because {why}" if why else "values for o_proj are one launch")
            for why, count in Counter(values_problem_of.values()).items()
        ),
    )
    return len(served)
