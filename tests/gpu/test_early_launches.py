"""Fronts whose launches begin before the kernel ahead has ended: replayed in graphs, and equal to one launch after another."""

from __future__ import annotations

import pytest
import torch

from nsa_backend.benchmarks.calls import whole_front
from nsa_backend.benchmarks.calls.timing import captured_graph
from nsa_backend.kernels import projection_inputs
from nsa_backend.kernels.cuda_source import CudaKernel
from nsa_backend.releases import layer_front_problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(layer_front_problem() is not None, reason="the layers of this release are others"),
]
REPLAYS = 50


@pytest.mark.parametrize("model", whole_front.SHAPES)
@pytest.mark.parametrize("rows", [1, 4, 32, 128])
def test_replays_give_what_one_launch_after_another_gives(make_runner, monkeypatch, model, rows):
    """Every layer has other weights, so what a launch reads too early is another layer's."""
    make_runner(num_steps=1, context=64)
    with whole_front.fronts(model, "bf16", rows) as sides:
        calls = sides["ours"]
        replay, found = captured(calls)
        with monkeypatch.context() as apart:
            apart.setattr(projection_inputs, "early", lambda on_gpu: {})  # of the launch that quantises
            apart.setattr(CudaKernel, "launch", behind_another(CudaKernel.launch))
            replay_apart, wanted = captured(calls)
        replay_apart()
        torch.cuda.synchronize()
        kept = [[part.clone() for part in of_layer] for of_layer in wanted]
        for _ in range(REPLAYS):
            for of_layer in found:
                for part in of_layer[:2]:
                    part.fill_(float("nan"))
            replay()
        torch.cuda.synchronize()
    for one, other in zip(found, kept, strict=True):
        for ours, theirs in zip(one, other, strict=True):
            assert torch.equal(*(part.contiguous().view(torch.uint8) for part in (ours, theirs)))


def behind_another(launch):
    """`launch` behind a kernel of torch, which begins once all ahead has ended, and lets nothing begin before it has."""

    def launched(kernel, *arguments):
        torch.zeros(1, device="cuda")
        launch(kernel, *arguments)

    return launched


def captured(calls):
    """(what replays a graph of `calls`, what they return)."""
    outs = []
    graph = captured_graph(lambda: outs.append([call() for call in calls]))
    return graph.replay, outs[-1]
