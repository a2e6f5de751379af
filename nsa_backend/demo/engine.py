"""Greedy decoding of several requests through SGLang's batches and pools: prefill, and one token a step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from nsa_backend.demo.model import ModelShape, TinySparseMla
from nsa_backend.registration import create_backend
from nsa_backend.testing.calls import calls
from nsa_backend.testing.pool import CpuKVPool, PageAllocator
from nsa_backend.testing.runner import make_runner
from nsa_backend.testing.shape import AttentionShape


class CpuGraph:
    """Stands in for a CUDA graph: `arm` is the capture call, and replaying runs again what the capture ran."""

    def __init__(self, arm: Callable[[], None], run: Callable[[], torch.Tensor]):
        self._arm, self._run = arm, run
        arm()
        run()

    def replay(self) -> torch.Tensor:
        self._arm()
        return self._run()


class Model:
    """One model with KV memory and an attention backend of its own: the target, or the draft."""

    def __init__(self, engine: Engine, is_draft_worker: bool):
        shape = engine.shape
        self.pool = CpuKVPool(engine.num_pages, shape.latent + shape.rope, shape.index_dim)
        self.net = TinySparseMla(shape, self.pool, RadixAttention, calls.attention_backend)
        self.runner = make_runner(
            AttentionShape(shape.heads, shape.latent, shape.rope, nope=shape.latent, index_topk=shape.index_topk),
            engine.req_to_token_pool,
            self.pool,
            num_steps=engine.num_steps,
            num_draft_tokens=engine.num_draft_tokens,
            is_draft_worker=is_draft_worker,
        )
        self.backend = create_backend(self.runner)

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        with calls.running(self.backend):
            return self.net.forward(batch.input_ids, batch.positions, batch)


class Engine:
    """A batch of prompts, prefilled at once, then decoded to `max_new_tokens`."""

    def __init__(self, prompts: list[list[int]], *, num_steps: int, padding: int = 1, multi_step=None, seed: int = 0):
        self.shape = ModelShape()
        self.num_steps, self.num_draft_tokens = num_steps, num_steps + 1
        self.prompts, self.num_requests = prompts, len(prompts)
        self.padded = self.num_requests + padding  # the captured batch is larger, as SGLang's often are
        width = max(len(p) for p in prompts) + 128
        self.num_pages = 2 + (-(-width // 64)) * self.num_requests
        self.req_to_token_pool = ReqToTokenPool(2 * self.num_requests, width, "cpu", enable_memory_saver=False)
        self.target, self.draft = Model(self, False), Model(self, True)
        self.multi_step = multi_step
        self._assign_slots(width, seed)

    def _assign_slots(self, width: int, seed: int) -> None:
        allocator = PageAllocator(self.num_pages, seed)
        slots = torch.randperm(2 * self.num_requests, generator=torch.Generator().manual_seed(seed))[: self.num_requests] + 1
        self.req_pool_indices = slots.to(torch.int64)
        for slot in slots.tolist():
            self.req_to_token_pool.write(slot, allocator.slots(width))

    def locations(self, starts: torch.Tensor, count: int) -> torch.Tensor:
        """Slots of `count` tokens from `starts` on, request-major; padding requests write to slot 0."""
        columns = starts[:, None] + torch.arange(count)
        real = self.req_to_token_pool.req_to_token[self.req_pool_indices[:, None], columns[: self.num_requests]]
        return torch.cat([real.flatten().long(), torch.zeros((len(starts) - self.num_requests) * count, dtype=torch.long)])

    def batch(self, mode: ForwardMode, model: Model, input_ids, positions, seq_lens, out_cache_loc, **fields) -> ForwardBatch:
        """SGLang's ForwardBatch over this engine's pools; `req_pool_indices` are padded with 0 like the graph runners'."""
        padding = torch.zeros(len(seq_lens) - self.num_requests, dtype=torch.int64)
        return ForwardBatch(
            forward_mode=mode,
            batch_size=len(seq_lens),
            input_ids=input_ids,
            req_pool_indices=torch.cat([self.req_pool_indices, padding]),
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens.clone(),
            seq_lens_sum=int(seq_lens.sum()),
            out_cache_loc=out_cache_loc,
            positions=positions,
            **calls.batch_fields(model),
            **fields,
        )

    def prefill(self, model: Model, tokens: list[list[int]]) -> torch.Tensor:
        """Run prompts eagerly in two chunks, the second on a cached prefix; returns the last logits of each request."""
        done = [0] * len(tokens)
        for share in (0.5, 1.0):
            ends = [max(1, int(share * len(t))) for t in tokens]
            new = [t[a:b] for t, a, b in zip(tokens, done, ends, strict=True)]
            positions = torch.cat([torch.arange(a, b) for a, b in zip(done, ends, strict=True)])
            lens = [b - a for a, b in zip(done, ends, strict=True)]
            request = torch.repeat_interleave(self.req_pool_indices, torch.tensor(lens))
            batch = self.batch(
                ForwardMode.EXTEND,
                model,
                torch.tensor([token for part in new for token in part]),
                positions,
                torch.tensor(ends),
                self.req_to_token_pool.req_to_token[request, positions].long(),
                extend_seq_lens=torch.tensor(lens, dtype=torch.int32),
                extend_seq_lens_cpu=lens,
                extend_prefix_lens_cpu=done,
                extend_num_tokens=sum(lens),
            )
            model.backend.init_forward_metadata(batch)
            logits = model.run(batch)
            done = ends
        return logits[torch.tensor(lens).cumsum(0) - 1]

    def pad(self, values: torch.Tensor, fill: int) -> torch.Tensor:
        return torch.nn.functional.pad(values, (0, self.padded - len(values)), value=fill)


def decode_plain(engine: Engine, max_new_tokens: int) -> list[list[int]]:
    """One token a step through a captured decode graph."""
    target, bs = engine.target, engine.padded
    tokens = [engine.prefill(target, engine.prompts).argmax(-1)]
    seq_lens = torch.ones(bs, dtype=calls.LENGTHS_DTYPE)  # the runner's static buffer
    batch = engine.batch(ForwardMode.DECODE, target, torch.zeros(bs).long(), torch.zeros(bs).long(), seq_lens, None)
    batch.out_cache_loc = torch.zeros(bs, dtype=torch.long)
    graph = capture(target, batch)
    length = torch.tensor([len(p) for p in engine.prompts])
    for _ in range(max_new_tokens - 1):
        batch.input_ids[: engine.num_requests] = tokens[-1]
        batch.positions[: engine.num_requests] = length
        seq_lens.copy_(engine.pad(length + 1, 1))
        batch.out_cache_loc.copy_(engine.locations(engine.pad(length, 0), 1))
        tokens.append(replay(target, graph, batch)[: engine.num_requests].argmax(-1))
        length = length + 1
    return torch.stack(tokens, 1).tolist()


def capture(model: Model, batch: ForwardBatch) -> CpuGraph:
    model.backend.init_cuda_graph_state(batch.batch_size, len(batch.positions))

    def forward() -> torch.Tensor:
        calls.at_graph_head(model.backend, batch)
        return model.run(batch)

    return CpuGraph(lambda: calls.before_capture(model.backend, batch), forward)


def replay(model: Model, graph: CpuGraph, batch: ForwardBatch) -> torch.Tensor:
    calls.before_replay(model.backend, batch)
    return graph.replay()
