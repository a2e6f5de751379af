"""Device memory that captured metadata takes, ours beside SGLang's, for the same captures in one process.

    python benchmarks/bench_memory.py OUT.json

A target backend (target_verify), N - 1 draft steps and a draft-extend backend, for max_bs 64, context 163840, N = 4, D = 4,
captured for batch sizes 1 to 64, as SGLang's graph runners do.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import torch

from nsa_backend.benchmarks import entry_points
from nsa_backend.benchmarks.bench_common import environment, fake_runner, print_table, start_host

SIZES, CONTEXT, NUM_STEPS, NUM_DRAFT_TOKENS = (1, 2, 4, 8, 16, 32, 64), 163_840, 4, 4


def capture_all(module_backend, module_multi_step, runner) -> list:
    """What a server keeps after capturing; returns it, so that it stays alive."""
    modes = entry_points.modes()
    max_bs = max(SIZES)
    static = entry_points.static_batch(
        torch.ones(max_bs, device="cuda"), torch.zeros(max_bs, dtype=torch.int64, device="cuda"), NUM_DRAFT_TOKENS
    )
    target, extend, draft = module_backend(runner), module_backend(runner), module_multi_step(runner, 1, NUM_STEPS)
    for backend in (target, extend):
        backend.init_cuda_graph_state(max_bs, max_bs * NUM_DRAFT_TOKENS)
    draft.init_cuda_graph_state(max_bs, max_bs)
    for bs in reversed(SIZES):
        batch = SimpleNamespace(**vars(static))
        batch.batch_size, batch.seq_lens, batch.req_pool_indices = bs, static.seq_lens[:bs], static.req_pool_indices[:bs]
        batch.spec_info = SimpleNamespace(num_accept_tokens=static.spec_info.num_accept_tokens[:bs])
        for backend, mode in ((target, modes["target_verify"]), (extend, modes["draft_extend"])):
            entry_points.Captured(backend, batch, mode, bs * NUM_DRAFT_TOKENS)
        entry_points.CapturedRound(draft, batch)
    return [target, extend, draft]


def measured(module_backend, module_multi_step) -> int:
    runner = fake_runner(num_steps=NUM_STEPS, num_draft_tokens=NUM_DRAFT_TOKENS, context=CONTEXT, max_requests=max(SIZES))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    kept = capture_all(module_backend, module_multi_step, runner)
    torch.cuda.synchronize()
    taken = torch.cuda.memory_allocated() - before
    del kept
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    start_host()
    from nsa_backend.backend import NativeSparseAttnBackend
    from nsa_backend.multi_step import NativeSparseAttnMultiStepBackend

    taken = {
        "builtin": measured(*entry_points.builtin()),
        "ours": measured(NativeSparseAttnBackend, NativeSparseAttnMultiStepBackend),
    }
    share = taken["ours"] / taken["builtin"]
    setting = {"max_bs": max(SIZES), "sizes": SIZES, "context": CONTEXT, "N": NUM_STEPS, "D": NUM_DRAFT_TOKENS}
    args.out.write_text(
        json.dumps({"environment": environment(), "setting": setting, "bytes": taken, "share": round(share, 4)}, indent=1)
    )
    print_table(("", "MiB"), [(name, value / 2**20) for name, value in taken.items()])
    print(f"ours is {100 * share:.1f} % of the built-in")


if __name__ == "__main__":
    main()
