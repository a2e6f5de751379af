"""The language stage: next-token loss of the target and of the MTP layer, contexts of 2048 and then of 4096 tokens."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from nsa_backend.benchmarks.trained.bar import Bar
from nsa_backend.benchmarks.trained.model import TrainedModel, parameters_of
from nsa_backend.benchmarks.trained.optimizing import language_optimizers, rate, step_all
from nsa_backend.benchmarks.trained.run import Run, Settings, finite
from nsa_backend.benchmarks.trained.tokens import Blocks

LOG_EVERY = 10
FIRST = (2, 5, 20, 50)
"""Steps that are told of besides every hundredth: they say early whether a run is as fast as it should be."""
HELD_OUT_BLOCKS = 64
HELD_OUT_STEPS = 3


def train_language(run: Run, optimizer_states: list[dict]) -> bool:
    """Step until the budget is spent (True) or the run is to stop (False)."""
    settings, progress = run.settings, run.progress
    run.optimizers = language_optimizers(run.model)
    for optimizer, state in zip(run.optimizers, optimizer_states, strict=False):
        optimizer.load_state_dict(state)
    ids, more = run.prepared.load("train"), 1 + settings.mtp_depth
    sources = {n: Blocks(ids, n, settings.seed, more) for n in (settings.context, settings.long_context)}
    with Bar("language") as bar:
        while (done := settings.language.progress(progress.seconds, progress.step)) < 1:
            if run.stop(progress.step):
                return False
            began = time.perf_counter()
            source = sources[settings.context_at(done)]
            target, mtp = _step(run, source, rate(done, progress.step, settings.warmup_steps))
            seconds = time.perf_counter() - began
            progress.step += 1
            progress.tokens += settings.batch_tokens
            speed = settings.batch_tokens / seconds
            bar.show(done, f"step {progress.step}  target {target:.3f}  MTP {mtp:.3f}  {speed / 1e3:.0f}K tokens/s")
            if progress.step % LOG_EVERY == 1 or settings.language.steps is not None:
                run.log.append(
                    {"stage": "language", "step": progress.step, "tokens": progress.tokens, "context": source.length,
                     "target": round(target, 4), "mtp": round(mtp, 4), "tokens_per_s": round(speed)}
                )  # fmt: skip
            if progress.step in FIRST or progress.step % (10 * LOG_EVERY) == 1:
                losses = f"target {target:.3f}, MTP {mtp:.3f}"
                run.say(f"step {progress.step}: {losses}, {speed / 1e3:.0f}K tokens/s, {used()}{done:.0%}")
            run.save_sometimes()
            progress.seconds += time.perf_counter() - began
    return True


def used() -> str:
    """The most memory that was in use on the GPU, as part of a line; nothing where there is none."""
    return f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, " if torch.cuda.is_available() else ""


def warm_up(model: TrainedModel, settings: Settings, say: Callable[[str], None]) -> None:
    """Compile for the shapes of both contexts, on random tokens; changes no weight."""
    device = model.lm_head.weight.device
    for length in (settings.context, settings.long_context):
        for doing in ("compiled in", "then a forward and backward pass takes"):
            began = time.perf_counter()
            size = (max(1, settings.micro_tokens // length), length + 1 + model.mtp_depth)
            blocks = torch.randint(model.shape.vocab, size, device=device)
            target, mtp = model.losses(blocks)
            (target + settings.mtp_weight * mtp).backward()
            model.zero_grad(set_to_none=True)
            finite("the loss of an untrained model", float(target.detach()))
            say(f"{blocks.shape[0]} x {length}: {doing} {time.perf_counter() - began:.2f} s")


def _step(run: Run, source: Blocks, factor: float) -> tuple[float, float]:
    """One optimizer step; (target's, MTP layer's) mean loss in nats."""
    settings, model = run.settings, run.model
    key = str(source.length)
    device = model.lm_head.weight.device
    sequences, micro = settings.batch_tokens // source.length, max(1, settings.micro_tokens // source.length)
    total = torch.zeros(2, device=device)
    for first in range(0, sequences, micro):
        size = min(micro, sequences - first)
        blocks = source.batch(run.progress.blocks.get(key, 0) + first, size).to(device)
        losses = torch.stack(model.losses(blocks)) * (size / sequences)
        (losses[0] + settings.mtp_weight * losses[1]).backward()
        total += losses.detach()
    run.progress.blocks[key] = run.progress.blocks.get(key, 0) + sequences
    nn.utils.clip_grad_norm_(parameters_of(model)[0], 1.0)
    step_all(run.optimizers, factor)
    target, mtp = total.tolist()
    return finite("the target's loss", target), finite("the MTP layer's loss", mtp)


@torch.no_grad()
def held_out(model: TrainedModel, blocks: Blocks, most: int = HELD_OUT_BLOCKS) -> dict:
    """Losses on held-out text, and how often the MTP layer's best token is the target's best one for the same place.

    `mtp_by_step` has the MTP layer's losses in the first HELD_OUT_STEPS steps of drafting, whatever it was trained for.
    Blocks have 1 + HELD_OUT_STEPS tokens more than their length.
    """
    device = model.lm_head.weight.device
    rows = []
    with torch.compiler.set_stance("force_eager"):
        for number in range(min(most, blocks.count)):
            block = blocks.batch(number, 1).to(device)
            states = model.states(block, HELD_OUT_STEPS)
            best, drafts = (model.lm_head(state).argmax(-1) for state, _ in states[:2])
            agree = float((best[:, 1:] == drafts[:, :-1]).float().mean())
            rows.append([agree, *(float(model.head_loss(*pair)) for pair in states)])
    agree, target, *mtp = (round(value, 4) for value in torch.tensor(rows).mean(0).tolist())
    return {"target": target, "mtp": mtp[0], "drafts_equal_to_target": agree, "mtp_by_step": mtp}
