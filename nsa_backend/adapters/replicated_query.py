"""What --dcp-replicate-q-proj lays on every rank, after weights were updated in a running server.

SGLang 0.5.23 gathers the query's projection of all ranks once, as its backend is built. An update of weights leaves the copies
as they were, and decode and target_verify would go on with old ones. They are written again in place, as captured graphs read
them, and a layer at a time, as one takes up to 71 MB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel

from nsa_backend.adapters.sglang_types import HookType
from nsa_backend.adapters.shared import hook

UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"


def renew_after_updates() -> None:
    """From now on, every update of weights that SGLang's updater ends renews the copies of its runner's model."""
    for name in ("end_weight_update", "update_weights_from_disk", "update_weights_from_ipc"):
        hook(f"{UPDATER}.{name}", _updated, HookType.AROUND)


def _updated(original: Callable, updater: Any, *args: Any, **kwargs: Any) -> Any:
    answer = original(updater, *args, **kwargs)
    # Experts of a rank that failed are loaded by their names, on the ranks that take them alone: nobody else would gather.
    if kwargs.get("weight_name_filter") is None:
        renew(updater.get_model())
    return answer


def renew(model: Any) -> None:
    """Write the copies of each layer of `model` that has them from the weights of all ranks; all of them call this.

    Args:
        model: SGLang's.
    """
    from sglang.srt.model_executor.model_runner import _gather_block_fp8_linear
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

    layers = [one for one in model.modules() if isinstance(one, DeepseekV2AttentionMLA) and one.w_kc_qrep is not None]
    with torch.no_grad():
        for layer in layers:
            group = get_parallel().dcp_group
            if layer.q_b_proj_qrep is None:
                layer.q_b_proj_qrep_weight.copy_(group.all_gather(layer.q_b_proj.weight.data, dim=0))
            else:
                fresh = dict(_gather_block_fp8_linear(layer.q_b_proj, group).named_parameters())
                for name, parameter in layer.q_b_proj_qrep.named_parameters():
                    parameter.copy_(fresh[name])
            layer.w_kc_qrep.copy_(group.all_gather(layer.w_kc.contiguous(), dim=0))
