"""Optimizers, learning rate, and how far a stage is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from nsa_backend.benchmarks.trained.model import TrainedModel

MATRIX_LR, OTHER_LR, INDEXER_LR = 2e-3, 2e-3, 2e-3
DECAY_FROM, LAST = 0.5, 0.02
"""Share of a stage after which the learning rate falls linearly, and what is left of it at the end."""


@dataclass(frozen=True)
class Budget:
    """How long a stage lasts: seconds of stepping, or steps (which makes a run repeatable)."""

    seconds: float | None = None
    steps: int | None = None

    def __post_init__(self):
        if (self.seconds is None) == (self.steps is None):
            raise ValueError(f"a budget is either seconds or steps, got {self}")

    def progress(self, seconds: float, steps: int) -> float:
        """0 at the start, 1 or more when the stage is over."""
        return seconds / self.seconds if self.steps is None else steps / self.steps


def rate(progress: float, step: int, warmup: int) -> float:
    """Factor of the learning rate: up within `warmup` steps, level, then down in a straight line."""
    down = 1 - (1 - LAST) * max(0.0, min(progress, 1.0) - DECAY_FROM) / (1 - DECAY_FROM)
    return min((step + 1) / warmup, 1.0) * down


def language_optimizers(model: TrainedModel) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, scaled to AdamW's steps; AdamW for embedding, head and norms."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        if ".indexer." in name:
            continue
        inside = parameter.ndim == 2 and ".layers." in name
        (matrices if inside else others).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=MATRIX_LR, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        adamw(others, OTHER_LR),
    ]


def indexer_optimizers(model: TrainedModel) -> list[torch.optim.Optimizer]:
    """AdamW over the indexers alone."""
    return [adamw([p for name, p in model.named_parameters() if ".indexer." in name], INDEXER_LR)]


def adamw(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def step_all(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    """One step of every optimizer at `factor` of its own learning rate, then no gradients."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.setdefault("full_lr", group["lr"])
            group["lr"] = group["full_lr"] * factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
