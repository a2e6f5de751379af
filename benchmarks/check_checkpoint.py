"""Do SGLang and the trainer compute the same? Target and MTP layer of a trained checkpoint, on held-out text.

    python -m nsa_backend.benchmarks.check_checkpoint RUN --out OUT.json [--steps 3] [--port 18000]

Target: log-probabilities of every prompt token by the server, against the trainer's float32 forward over the stored weights.
Its own bfloat16 forward says what rounding does; the server may be three times as far. Beyond index_topk tokens the trainer
selects by its indexers too. MTP layer: the trainer predicts along each greedy output how many drafts every round accepts, with
draft steps that see what each side lets them see; the server's accept length must be that within 0.05. Exits with 1 where
something differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import ExitStack
from itertools import product, zip_longest
from pathlib import Path

import torch

from nsa_backend.benchmarks.generation import accept_length
from nsa_backend.benchmarks.report import environment, write_report
from nsa_backend.benchmarks.trained.bar import Clock
from nsa_backend.benchmarks.trained.export import load
from nsa_backend.benchmarks.trained.gpu_lock import busy
from nsa_backend.benchmarks.trained.model import TrainedModel
from nsa_backend.benchmarks.trained.prompts import held_out_prompts
from nsa_backend.benchmarks.trained.serving import SIDES, SideServer, started
from nsa_backend.benchmarks.trained.simulate import accepted

LENGTHS, PROMPTS = (300, 1500, 3500), 4
DRAFT_PROMPTS, DRAFT_TOKENS = 24, 256
TIMES_ROUNDING, ACCEPT_TOLERANCE = 3.0, 0.05


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder that train_checkpoint wrote to")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3, help="N")
    parser.add_argument("--sides", choices=SIDES, nargs="+", default=list(SIDES))
    parser.add_argument("--port", type=int, default=18000)
    parser.add_argument("--logs", type=Path, default=None, help="folder for the servers' logs")
    args = parser.parse_args()
    report = {"environment": environment(), "steps": args.steps, "target": [], "drafts": []}
    say = Clock()
    with ExitStack() as stack:
        stack.enter_context(busy())
        wanted = [("ours", 0), *((side, args.steps) for side in args.sides if args.steps > 1 or side != "shared")]
        found = started(stack, args.run, wanted, args.port, args.logs or Path(tempfile.mkdtemp(prefix="nsa-check-")), say, 32)
        report["problems"] = found.problems
        models = {dtype: load(args.run / "checkpoint", "cuda", dtype) for dtype in (torch.float32, torch.bfloat16)}
        for plain, length in product(found.of(0), LENGTHS):
            report["target"].append(compare_target(plain, models, held_out_prompts(args.run, length, PROMPTS, seed=1)))
            say(str(report["target"][-1]))
            write_report(args.out, report)
        asked = held_out_prompts(args.run, 300, DRAFT_PROMPTS, seed=1)
        for server in found.of(args.steps):
            report["drafts"].append(compare_drafts(server, models[torch.bfloat16], asked))
            say(str(report["drafts"][-1]))
            write_report(args.out, report)
    write_report(args.out, report)
    rows = report["target"] + report["drafts"]
    return 0 if len(rows) == len(LENGTHS) + len(wanted) - 1 and all(row["agrees"] for row in rows) else 1


def compare_target(server: SideServer, models: dict[torch.dtype, TrainedModel], prompts: list[list[int]]) -> dict:
    """Mean and largest distance in log-probability of the server and of the trainer's bfloat16 from the trainer's float32."""
    served, rounded = [], []
    for prompt in prompts:
        exact = log_probabilities(models[torch.float32], prompt)
        served.append((torch.tensor(server.log_probabilities(prompt)) - exact).abs())
        rounded.append((log_probabilities(models[torch.bfloat16], prompt) - exact).abs())
    distances = {"server": torch.cat(served), "rounding": torch.cat(rounded)}
    means = {name: float(values.mean()) for name, values in distances.items()}
    return {
        "length": len(prompts[0]),
        "tokens": len(distances["server"]),
        "mean": {name: round(value, 5) for name, value in means.items()},
        "largest": {name: round(float(values.max()), 4) for name, values in distances.items()},
        "agrees": means["server"] <= TIMES_ROUNDING * means["rounding"],
    }


@torch.no_grad()
def log_probabilities(model: TrainedModel, prompt: list[int]) -> torch.Tensor:
    """float32 [tokens - 1] on the CPU, of every token but the first, with attention as sparse as a server's."""
    ids = torch.tensor([prompt], device=model.lm_head.weight.device)
    logits = model.lm_head(model.hidden(ids[:, :-1], sparse=True)).float().log_softmax(-1)
    return logits.gather(-1, ids[:, 1:, None]).flatten().cpu()


def compare_drafts(server: SideServer, model: TrainedModel, prompts: list[list[int]]) -> dict:
    """The server's accept length on greedy outputs beside the one that the trainer's MTP layer predicts along them."""
    answers = server.sampled(prompts, DRAFT_TOKENS, 0.0)
    measured = [answer["meta_info"]["spec_correct_drafts_histogram"] for answer in answers]
    predicted = [
        accepted(model, prompt, answer["output_ids"], server.steps, server.side)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    histograms = {
        name: [sum(counts) for counts in zip_longest(*found, fillvalue=0)]
        for name, found in (("server", measured), ("trainer", predicted))
    }
    accept = {name: accept_length(histogram) for name, histogram in histograms.items()}
    return {
        "side": server.side,
        "accept": {name: round(value, 4) for name, value in accept.items()},
        "histograms": histograms,
        "agrees": abs(accept["server"] - accept["trainer"]) <= ACCEPT_TOLERANCE,
    }


if __name__ == "__main__":
    sys.exit(main())
