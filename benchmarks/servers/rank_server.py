"""SGLang's server for a rank without weights: `--load-format dummy`, with weights that make a forward do what a trained one
does.

    python -m nsa_backend.benchmarks.servers.rank_server --model-path RANK --load-format dummy ...

SGLang draws every weight from +-1e-3, norms and the router's bias too. In 8 bits that is zero; and as the router's scores are
smaller than its bias then, all tokens go to the same eight experts, so that a batch of 32 reads a fraction of the weights that
it reads of a trained model. Here 8-bit weights are never zero, norms are one, matrices keep the size of what they multiply, and
the router decides by the token. Every rank of a server draws the same numbers, for its own part of a matrix. Only this module
does so, in the processes of its own server, with our backend or without."""

from __future__ import annotations

import math
import runpy
import zlib

import torch

SMALLEST, LARGEST = 2.0**-8, 2.0**-5
"""Magnitudes of 8-bit weights: from a quarter of e4m3's smallest normal number to where 7168 of them add up to 1.5."""


def draw_weights(model: torch.nn.Module, low: float = 0.0, high: float = 0.0, seed: int = 1234) -> None:
    """In place of SGLang's `initialize_dummy_weights`: the same for every process, other values for every layer.

    Args:
        model: whose floating-point parameters and buffers are written in place.
        low, high: SGLang's range, which is not used.
        seed: of all draws, with the name of a weight.
    """
    for name, weight in model.state_dict().items():
        if torch.is_floating_point(weight):
            generator = torch.Generator(device=weight.device).manual_seed(seed + zlib.crc32(name.encode()))
            _draw(name, weight.data, generator)


def _draw(name: str, weight: torch.Tensor, generator: torch.Generator) -> None:
    """One weight, by its name in SGLang's model."""
    kind = name.rsplit(".", 1)[-1]
    if "scale" in kind:
        weight.fill_(1.0)
    elif weight.ndim < 2:
        weight.fill_(1.0 if kind == "weight" else 0.0)  # of a norm; a bias, the router's too
    elif weight.element_size() == 1:
        for part in weight if weight.ndim > 2 else (weight,):  # an expert at a time, as this needs twice its memory
            magnitudes = torch.empty(part.shape, dtype=torch.float16, device=part.device)
            magnitudes.uniform_(SMALLEST, LARGEST, generator=generator)
            signs = torch.empty_like(magnitudes).uniform_(-1, 1, generator=generator)
            part.copy_(magnitudes.copysign_(signs))
    else:
        size = math.sqrt(3.0) if "embed_tokens" in name else math.sqrt(3.0 / weight.shape[-1])
        weight.uniform_(-size, size, generator=generator)


def take_over() -> None:
    """SGLang's loader of dummy weights calls `draw_weights` from now on, in this process."""
    from sglang.srt.model_loader import loader

    loader.initialize_dummy_weights = draw_weights


if __name__ == "__mp_main__":  # a process that the server spawns, which imports the server's main module first
    take_over()

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
