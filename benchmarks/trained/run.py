"""A training run: what it was asked for, its state on disk, and what it has logged."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from nsa_backend.benchmarks.report import environment, write_report
from nsa_backend.benchmarks.trained.model import TrainedModel
from nsa_backend.benchmarks.trained.optimizing import Budget
from nsa_backend.benchmarks.trained.shape import SHAPES
from nsa_backend.benchmarks.trained.tokens import Prepared

SAVE_EVERY = 240.0  # seconds


@dataclass(frozen=True)
class Settings:
    """What decides the result; a run goes on only with the settings it began with."""

    shape: str = "small"
    seed: int = 0
    language: Budget = field(default_factory=lambda: Budget(seconds=450))
    indexer: Budget = field(default_factory=lambda: Budget(seconds=60))
    context: int = 2048
    long_context: int = 4096
    long_from: float = 0.85  # share of the language stage after which contexts are long
    batch_tokens: int = 131072
    micro_tokens: int = 32768
    indexer_blocks: int = 4  # of long_context, a step
    indexer_rows: int = 256  # of each block, drawn anew in every step
    warmup_steps: int = 50  # of the language stage
    mtp_weight: float = 0.3  # of the MTP layer's loss
    mtp_depth: int = 1  # draft steps that the MTP layer is trained for
    corpus_bytes: int = 500_000_000

    def context_at(self, progress: float) -> int:
        return self.context if progress < self.long_from else self.long_context


@dataclass
class Progress:
    """Where a stage is. `seconds` are those of steps and of saving between them."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    blocks: dict[str, int] = field(default_factory=dict)  # taken so far, by context


@dataclass
class Run:
    """Everything of one run. `folder` has corpus/, state.pt, training.json and, in the end, checkpoint/."""

    folder: Path
    settings: Settings
    prepared: Prepared
    model: TrainedModel
    say: Callable[[str], None]
    stop: Callable[[int], bool] = lambda step: False  # asked before every step, with its number
    stage: str = "language"
    progress: Progress = field(default_factory=Progress)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    log: list[dict] = field(default_factory=list)
    results: dict = field(default_factory=dict)
    command: str = ""
    _saved: float = field(default_factory=time.monotonic)

    def save_sometimes(self) -> None:
        if time.monotonic() - self._saved > SAVE_EVERY:
            self.save()

    def save(self) -> None:
        """Write state.pt, whole or not at all, and training.json."""
        state = {
            "settings": json.dumps(asdict(self.settings)),
            "stage": self.stage,
            "progress": asdict(self.progress),
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "log": self.log,
            "results": self.results,
        }
        part = self.folder / "state.pt.part"
        torch.save(state, part)
        part.replace(self.folder / "state.pt")
        self.report()
        self._saved = time.monotonic()

    def restore(self) -> list[dict]:
        """Take up state.pt where there is one; returns the optimizers' state for the stage that is under way.

        Raises:
            ValueError: the folder's run has other settings.
        """
        path = self.folder / "state.pt"
        if not path.exists():
            return []
        state = torch.load(path, map_location=self.model.lm_head.weight.device, weights_only=True)
        began, now = json.loads(state["settings"]), json.loads(json.dumps(asdict(self.settings)))
        if began != now:
            differing = ", ".join(f"{k}: {began[k]} then, {now[k]} now" for k in now if began.get(k) != now[k])
            raise ValueError(f"{self.folder} has a run with other settings ({differing}): pass them again or another folder")
        self.model.load_state_dict(state["model"])
        self.stage, self.progress = state["stage"], Progress(**state["progress"])
        self.log, self.results = state["log"], state["results"]
        self.say(f"going on in stage {self.stage} after {self.progress.step} steps")
        return state["optimizers"]

    def report(self) -> None:
        """training.json: settings, losses, packages; what a result file says of the weights."""
        shape = SHAPES[self.settings.shape]
        head = {
            "environment": environment(),
            "command": self.command,
            "settings": asdict(self.settings),
            "shape": asdict(shape),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "stage": self.stage,
        }
        write_report(self.folder / "training.json", head | self.results | {"packages": self.prepared.packages, "log": self.log})


def began_with(folder: Path) -> Settings | None:
    """Settings of the run in `folder`, None where nothing of it was saved."""
    path = folder / "training.json"
    if not (folder / "state.pt").exists() or not path.exists():
        return None
    found = json.loads(path.read_text())["settings"]
    return Settings(**found | {name: Budget(**found[name]) for name in ("language", "indexer")})


def finite(name: str, value: float) -> float:
    """`value`; raises RuntimeError where it is not a number, which no later step mends."""
    if not math.isfinite(value):
        raise RuntimeError(f"{name} became {value}: start again in an empty folder with another --seed")
    return value
