"""What is done to an engine between two runs of the same workloads, after which it must give what it gave before."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

MEGABYTES_AT_ONCE = 512
BACKUP_SECONDS = 5.0
"""In which SGLang writes what a few prompts left in host memory to a folder, beside doing nothing."""

Part = list[tuple[str, torch.Tensor]]
"""Weights of one call, by name."""


def update_weights(engine: Any, checkpoint: Path) -> None:
    """Hand every weight of the checkpoint to the running engine as tensors, as a trainer does; graphs are not captured again.

    Zeros come first: a weight that SGLang does not take the second time, or a graph that reads old memory, then shows.
    Raises RuntimeError where SGLang reports that it does not take them.
    """
    parts = parts_of(checkpoint)
    with weight_update(engine):
        hand_over_zeros(engine, parts)
        for part in parts:
            hand_over(engine, part, flush_cache=part is parts[-1])


def load_weights_again(engine: Any, checkpoint: Path) -> None:
    """Zeros for every weight, then the checkpoint from its files; SGLang then captures the target's graphs again.

    The engine's own call does not ask for that, /update_weights_from_disk of a server can: `recapture_cuda_graph`.
    """
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    with weight_update(engine):
        hand_over_zeros(engine, parts_of(checkpoint))
    asked = UpdateWeightFromDiskReqInput(model_path=str(checkpoint), recapture_cuda_graph=True)
    done, message, _ = engine.loop.run_until_complete(engine.tokenizer_manager.update_weights_from_disk(asked, None))
    check((done, message), "load the checkpoint again")


def parts_of(checkpoint: Path) -> list[Part]:
    """All weights of the checkpoint, in the parts in which they are handed over."""
    return in_parts(
        {name: tensor for file in sorted(checkpoint.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    )


def hand_over_zeros(engine: Any, parts: list[Part]) -> None:
    for part in parts:
        hand_over(engine, [(name, torch.zeros_like(tensor)) for name, tensor in part], flush_cache=False)


def in_parts(tensors: dict[str, torch.Tensor]) -> list[Part]:
    """`tensors` in parts of at most MEGABYTES_AT_ONCE, and an attention's in one, however large.

    SGLang joins q_a_proj and kv_a_proj_with_mqa as they are loaded, and forgets one that comes without the other.
    """
    parts: list[Part] = [[]]
    room = MEGABYTES_AT_ONCE << 20
    for _, group in groupby(sorted(tensors.items()), lambda item: item[0].partition(".self_attn.")[0]):
        together = list(group)
        size = sum(tensor.nbytes for _, tensor in together)
        if room < size and parts[-1]:
            parts.append([])
            room = MEGABYTES_AT_ONCE << 20
        parts[-1] += together
        room -= size
    return parts


@contextmanager
def weight_update(engine: Any) -> Iterator[None]:
    """The session that SGLang takes tensors in, from 0.5.23 on; older releases have none.

    It is not closed behind an error: weights are then old in part, and nothing is to be served with them.
    """
    has_sessions = hasattr(engine, "begin_weight_update")
    if has_sessions:
        check(engine.begin_weight_update(), "begin a weight update")
    yield
    if has_sessions:
        check(engine.end_weight_update(), "end the weight update")


def hand_over(engine: Any, part: Part, flush_cache: bool) -> None:
    answer = engine.update_weights_from_tensor(part, flush_cache=flush_cache)
    check(answer, f"take {part[0][0]} and the {len(part) - 1} after it")


def check(answer: tuple[bool, str], what: str) -> None:
    """Raise RuntimeError unless SGLang's answer, whether it was done and a message, says that it was done."""
    done, message = answer
    if not done:
        raise RuntimeError(f"the engine did not {what}: {message}")


def release_and_resume(engine: Any, checkpoint: Path) -> None:
    """Give the GPU memory of weights, KV cache and, where it is saved, graphs back, and take it again."""
    engine.release_memory_occupation()
    engine.resume_memory_occupation()


def forget_caches(engine: Any, checkpoint: Path) -> None:
    """Once what was cached has gone on to storage, drop it on the GPU and in host memory."""
    time.sleep(BACKUP_SECONDS)
    answer = engine.flush_cache()
    check((answer.success, answer.message), "flush its caches")


ACTIONS: dict[str, Callable[[Any, Path], None]] = {
    "weights were updated": update_weights,
    "weights were loaded again": load_weights_again,
    "memory was released and resumed": release_and_resume,
    "caches were flushed": forget_caches,
}
