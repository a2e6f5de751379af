"""MoE kernel configs, tiles of SGLang's Triton experts, for shapes that SGLang has none of the installed Triton's for.

SGLang looks configs up by experts, width, GPU and Triton version, and falls back to those of an older Triton. It has a file of
256 experts as wide as one of eight ranks of DeepSeek-V3.2 has them, made for Triton 3.1, with tiles of 64 rows for decode. An
expert gets one or two rows there: tiles of 16, with bulk copies of the second product, take 0.66 to 0.91 of the time
(benchmarks/results/experts_0_5_23_h200.json). Its file of GLM-5's 257, made for Triton 3.5, has them: ours has its tiles where
none were faster. Those here are written by benchmarks/tuning/experts.py.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import triton

from nsa_backend.adapters.sglang_types import HookType
from nsa_backend.adapters.shared import hook

logger = logging.getLogger(__name__)

MODULE = "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config"
FILE = Path(__file__).with_name("moe_configs.json")
USERS_FOLDER = "SGLANG_MOE_CONFIG_DIR"
"""SGLang's variable of a folder that replaces its own files."""


def measured() -> dict[str, dict[str, dict]]:
    """Configs by number of tokens, by SGLang's name of their file, of the installed Triton; none where none were measured."""
    return json.loads(FILE.read_text()).get(triton.__version__, {})


def take() -> None:
    """Have SGLang's lookup answer with configs of this package too; once a process, and not where the user names a folder."""
    if measured() and USERS_FOLDER not in os.environ and offered():
        hook(f"{MODULE}.get_moe_configs", configs, HookType.AROUND)


def offered() -> bool:
    """Whether the installed release looks configs up there."""
    try:
        return find_spec(MODULE) is not None
    except ModuleNotFoundError:  # nor has it the folders around
        return False


def configs(original: Callable[..., dict | None], *arguments: Any, **options: Any) -> dict[int, dict] | None:
    """Around SGLang's lookup by experts, width, dtype and blocks, for both products or for the second alone."""
    own = _own(*arguments, **options)
    return original(*arguments, **options) if own is None else own


@functools.cache
def _own(
    E: int,
    N: int,
    dtype: str | None,
    block_n: int | None = 0,
    block_k: int | None = 0,
    per_channel_quant: bool = False,
    down_moe: bool = False,
) -> dict[int, dict] | None:
    """This package's configs where SGLang has none of the installed Triton's."""
    sglang = import_module(MODULE)
    name = sglang.get_config_file_name(E, N, dtype, [block_n, block_k], per_channel_quant, down_moe=down_moe)
    found = measured().get(name)
    folder = Path(sglang.__file__).parent / "configs" / f"triton_{triton.__version__.replace('.', '_')}"
    execution = sglang.get_exec()
    if found is None or (folder / name).exists() or execution.deterministic.enable_deterministic_inference:
        return None
    if execution.moe.enforce_shared_experts_fusion:  # a model's hidden size is then another than that of these
        return None
    logger.info(
        f"Using MoE kernel config {name} of nsa_backend, measured with Triton {triton.__version__}; NSA_BACKEND_MOE_CONFIGS=0 "
        "leaves it to SGLang"
    )
    return {int(tokens): config for tokens, config in found.items()}
