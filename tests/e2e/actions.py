"""What is done to an engine between two runs of the same workloads, after which it must give what it gave before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

MEGABYTES_AT_ONCE = 512


def update_weights(engine: Any, checkpoint: Path) -> None:
    """Hand every weight of the checkpoint to the running engine as tensors, as a trainer does; graphs are not captured again.

    Raises RuntimeError where SGLang does not take them.
    """
    tensors = [item for file in sorted(checkpoint.glob("*.safetensors")) for item in load_file(file).items()]
    parts: list[list] = [[]]
    room = MEGABYTES_AT_ONCE << 20
    for name, tensor in tensors:
        if room < tensor.nbytes and parts[-1]:
            parts.append([])
            room = MEGABYTES_AT_ONCE << 20
        parts[-1].append((name, tensor))
        room -= tensor.nbytes
    for part in parts:
        done, message = engine.update_weights_from_tensor(part, flush_cache=part is parts[-1])[:2]
        if not done:
            raise RuntimeError(f"the engine did not take {part[0][0]} and the {len(part) - 1} after it: {message}")


def release_and_resume(engine: Any, checkpoint: Path) -> None:
    """Give the GPU memory of weights, KV cache and, where it is saved, graphs back, and take it again."""
    engine.release_memory_occupation()
    engine.resume_memory_occupation()


ACTIONS: dict[str, Callable[[Any, Path], None]] = {
    "weights were updated": update_weights,
    "memory was released and resumed": release_and_resume,
}
