"""The indexer stage: every indexer learns where its layer's dense attention looks, as in V3.2's dense warm-up.

The language model is frozen; the loss of a layer is KL(attention summed over heads and normalised || softmax of its index
scores), over rows drawn at random. No sparse stage follows: the language model never trains on what its indexers select.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from nsa_backend.benchmarks.trained.bar import Bar
from nsa_backend.benchmarks.trained.indexer import attention_shares, divergence, selected
from nsa_backend.benchmarks.trained.layers import Layer
from nsa_backend.benchmarks.trained.model import TrainedModel
from nsa_backend.benchmarks.trained.optimizing import indexer_optimizers, rate, step_all
from nsa_backend.benchmarks.trained.run import Run, finite
from nsa_backend.benchmarks.trained.tokens import Blocks

LOG_EVERY = 50
WARMUP_STEPS = 20


def attention_inputs(model: TrainedModel, blocks: Tensor) -> Iterator[tuple[Layer, Tensor]]:
    """Every layer, the MTP layer last, with the input of its attention [B, T, hidden]; `blocks` as in `TrainedModel.losses`."""
    ids = blocks[:, :-2]
    rope, x = model.rope(ids.shape[1]), model.embed(ids)
    for layer in model.layers:
        yield layer, layer.input_layernorm(x)
        x = layer(x, rope)
    combined = model.mtp.combined(model.embed(blocks[:, 1:-1]), model.model.norm(x))
    yield model.mtp, model.mtp.input_layernorm(combined)


def index_and_attention(model: TrainedModel, layer: Layer, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """(index scores, attention shares), float32 [B, rows, T]; gradients reach the indexer alone."""
    rope = model.rope(x.shape[1])
    with torch.no_grad():
        q, k, _, latent = layer.self_attn.queries_keys_values(x, rope)
        shares = attention_shares(q, k, rows, model.shape.qk_dim**-0.5)
    return layer.self_attn.indexer.scores(x, latent, rope, rows), shares


def train_indexers(run: Run, optimizer_states: list[dict]) -> bool:
    """Step until the budget is spent (True) or the run is to stop (False)."""
    settings, progress = run.settings, run.progress
    run.optimizers = indexer_optimizers(run.model)
    for optimizer, state in zip(run.optimizers, optimizer_states, strict=False):
        optimizer.load_state_dict(state)
    source = Blocks(run.prepared.load("train"), settings.long_context, settings.seed + 1)
    with Bar("indexer") as bar, torch.compiler.set_stance("force_eager"):
        while (done := settings.indexer.progress(progress.seconds, progress.step)) < 1:
            if run.stop(progress.step):
                return False
            began = time.perf_counter()
            loss = _step(run, source, rate(done, progress.step, WARMUP_STEPS))
            progress.step += 1
            progress.tokens += settings.indexer_blocks * settings.long_context
            bar.show(done, f"step {progress.step}  KL {loss:.4f}")
            if progress.step % LOG_EVERY == 1 or settings.indexer.steps is not None:
                run.log.append({"stage": "indexer", "step": progress.step, "kl": round(loss, 5)})
                run.say(f"step {progress.step}: KL {loss:.4f}, {done:.0%}")
            run.save_sometimes()
            progress.seconds += time.perf_counter() - began
    return True


def _step(run: Run, source: Blocks, factor: float) -> float:
    """One optimizer step; the mean divergence of all layers."""
    settings, model = run.settings, run.model
    device = model.lm_head.weight.device
    first = run.progress.step * settings.indexer_blocks
    blocks = source.batch(first, settings.indexer_blocks).to(device)
    generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + run.progress.step)
    rows = torch.randperm(source.length, generator=generator)[: settings.indexer_rows].sort().values.to(device)
    total = torch.zeros((), device=device)
    with torch.no_grad():
        for layer, x in attention_inputs(model, blocks):
            with torch.enable_grad():
                scores, shares = index_and_attention(model, layer, x, rows)
                loss = divergence(shares, scores, rows)
                loss.backward()
            total += loss.detach()
    for group in run.optimizers[0].param_groups:
        nn.utils.clip_grad_norm_(group["params"], 1.0)
    step_all(run.optimizers, factor)
    return finite("the indexers' loss", float(total) / (model.shape.layers + 1))


@torch.no_grad()
def attention_kept(model: TrainedModel, blocks: Blocks, most: int = 8) -> list[dict]:
    """By layer, the share of its attention that index_topk selected tokens hold, on held-out rows that see more than that.

    Beside it the most that as many tokens could hold, and what the newest ones do.
    """
    topk, device = model.shape.index_topk, model.lm_head.weight.device
    rows = torch.arange(topk, blocks.length, device=device)[:: max(1, (blocks.length - topk) // 64)]
    found: list[list[list[float]]] = []
    with torch.compiler.set_stance("force_eager"):
        for number in range(min(most, blocks.count)):
            values = []
            for layer, x in attention_inputs(model, blocks.batch(number, 1).to(device)):
                scores, shares = index_and_attention(model, layer, x, rows)
                ages = torch.arange(blocks.length, device=device, dtype=torch.float32).expand_as(scores)
                chosen = [selected(by, rows, topk) for by in (scores, shares, ages)]
                values.append([float((shares * kept).sum(-1).mean()) for kept in chosen])
            found.append(values)
    means = torch.tensor(found).mean(0).tolist()
    return [
        {"layer": number, "indexer": round(indexer, 5), "best": round(best, 5), "newest": round(newest, 5)}
        for number, (indexer, best, newest) in enumerate(means)
    ]
