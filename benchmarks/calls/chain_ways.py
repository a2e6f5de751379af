"""Every way to run the kernels of a layer's chain, and the check that none reads what is not there yet.

A dependent launch may begin before the kernels ahead of it have ended. The check therefore replays a way as it is timed, from a
captured graph, once its memory holds what must not be read: slots, parts, output, old KV of the new tokens. What it leaves
must equal, bit for bit, what attention gives afterwards on the slots that this replay chose: the top-k returns them in an order
that changes from call to call, and sums follow that order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nsa_backend.adapters.installed import adapter
from nsa_backend.benchmarks.calls.chain_case import Chain
from nsa_backend.benchmarks.calls.timing import captured_graph

Attend = Callable[[torch.Tensor], torch.Tensor]  # int32 [rows, TOPK] slots to bfloat16 [rows, heads, LATENT]


@dataclass(frozen=True)
class Way:
    """Top-k, KV write and attention in SGLang's order, or some of them."""

    chain: Chain
    attend: Attend
    afterwards: Attend  # the same attention, by launches that wait for all that is ahead of them where there is a choice
    topk: bool = True  # without it attention reads the slots of an earlier top-k
    write: bool = True

    def __call__(self, i: int) -> torch.Tensor:
        """What attention gives in call i, bfloat16 [rows, heads, LATENT]."""
        return self.run(i)[1]

    def run(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(slots that call i read, what attention gave)."""
        slots = self.chain.topk(i) if self.topk else self.chain.selected[i]
        if self.write:
            self.chain.write(i)
        return slots, self.attend(slots)

    def replayed(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of one replay that found slots, parts and output poisoned, and the KV of the new tokens not yet written."""
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        graph = captured_graph(lambda: found.append(self.run(i)))
        slots, out = found[-1]  # of the capture: where replays write
        if self.topk:
            slots.fill_(0)  # a slot that can be read
        if self.write:
            self.chain.restore()
        self.chain.forget()
        out.fill_(torch.nan)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        return slots.clone(), out.clone()


def ways(chain: Chain) -> dict[str, Way]:
    """All of them, by name; FA3's where it reads this cache and the release has a scheduler of its own."""
    as_served, ordinary = (functools.partial(chain.sparse_decode, dependent=dependent) for dependent in (True, False))
    sparse = functools.partial(Way, chain, afterwards=ordinary)
    found = {"sparse_decode": sparse(as_served, topk=False, write=False)}
    found |= {"chain": sparse(as_served), "chain, ordinary launches": sparse(ordinary)}
    found["chain without the KV write"] = sparse(as_served, write=False)
    found["chain without the top-k"] = sparse(as_served, topk=False)
    if chain.case.kv == "bf16" and adapter.fa3_scheduler() is not None:
        in_call = functools.partial(chain.fa3, schedule=None)
        once = functools.partial(chain.fa3, schedule=chain.fa3_schedule())
        found["fa3 chain, scheduled in the call"] = Way(chain, in_call, in_call)
        found["fa3 chain, scheduled once"] = Way(chain, once, once)
    return found


def check(found: dict[str, Way]) -> None:
    """Replay each way once; overwrites the KV of the new tokens of call 0.

    Raises:
        RuntimeError: a way reads what is not there yet, or its top-k chooses other slots than the one before.
    """
    for name, way in found.items():
        slots, out = way.replayed(0)
        if not torch.equal(slots.sort(-1).values, way.chain.selected[0].sort(-1).values):
            raise RuntimeError(f"{name}: its top-k chose other slots than an earlier one of the same scores, in whatever order")
        if not torch.equal(out, way.afterwards(slots)):
            raise RuntimeError(
                f"{name} reads what is not there yet: attention called afterwards on the same slots and KV gives other bits"
            )
