"""Train a small DeepSeek-V3.2 with an MTP layer on the Python packages of this machine, and write a checkpoint for SGLang.

    python -m nsa_backend.benchmarks.train_checkpoint OUT [--whole-in 9.5] [--minutes 8.5]

OUT receives corpus/ (tokenizer, token ids, list of packages), state.pt, training.json and, in the end, checkpoint/. Walk and
tokenizer take one to two minutes, in which the model is compiled; then come a language stage (next-token loss of target and MTP
layer; contexts of 2048, for the last 15 % of 4096 tokens) and an indexer stage (KL against the dense attention of 4096 tokens).
--whole-in bounds all of it, checkpoint included: the language stage gets what the rest leaves of it. With --minutes a call
stops in time, and the same command goes on where it stopped. Exits with 0 when the checkpoint is written, 1 when it stopped
before. `--whole-in 4 --indexer-minutes 1 --corpus-mb 60` rehearses everything on a GPU, the size of the model included.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import torch

from nsa_backend.benchmarks.trained import distill, export, language
from nsa_backend.benchmarks.trained.bar import Clock
from nsa_backend.benchmarks.trained.model import TrainedModel
from nsa_backend.benchmarks.trained.optimizing import Budget
from nsa_backend.benchmarks.trained.run import Progress, Run, Settings, began_with
from nsa_backend.benchmarks.trained.shape import SHAPES
from nsa_backend.benchmarks.trained.tokens import Blocks, Prepared, prepare

SAVING = 20.0
"""Seconds to leave for writing the state before the bound of a call."""

ENDING = 20.0
"""Seconds that --whole-in leaves for held-out losses, saving and the checkpoint."""

STAGES = {"language": language.train_language, "indexer": distill.train_indexers}


def main() -> int:
    args = parsed()
    say = Clock()
    settings = Settings(
        shape=args.shape,
        seed=args.seed,
        language=Budget(seconds=60 * args.language_minutes),
        indexer=Budget(seconds=60 * args.indexer_minutes),
        corpus_bytes=int(1e6 * args.corpus_mb),
        mtp_depth=args.mtp_depth,
    )
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        corpus = pool.submit(corpus_of, args.out, settings, say)
        model = model_of(settings, args.device, say)
        if not args.no_compile and args.device == "cuda":
            model.compile_layers()
            with attention_of(args.device):
                language.warm_up(model, settings, say)
        prepared = corpus.result()
    if args.whole_in is not None:
        settings = settings_within(60 * args.whole_in - say.seconds, settings, began_with(args.out))
        say(f"the language stage steps for {settings.language.seconds:.0f} s")
    run = Run(args.out, settings, prepared, model, say)
    run.command = shlex.join(["python", "-m", "nsa_backend.benchmarks.train_checkpoint", *sys.argv[1:]])
    if args.minutes is not None:
        run.stop = lambda step: say.seconds > 60 * args.minutes - SAVING
    if not train(run):
        say(f"stopped in stage {run.stage}: run the same command again to go on")
        return 1
    say(f"{args.out / 'checkpoint'} is ready")
    return 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, help="bound on this call; the next one goes on")
    parser.add_argument("--whole-in", type=float, metavar="MINUTES", help="bound on everything, of a run that begins")
    parser.add_argument("--language-minutes", type=float, default=7.5, help="of stepping; what --whole-in leaves, if given")
    parser.add_argument("--indexer-minutes", type=float, default=1.0)
    parser.add_argument("--corpus-mb", type=float, default=500, help="most text to train on")
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument(
        "--mtp-depth", type=int, default=1,
        help="draft steps that the MTP layer is trained for: 1 as DeepSeek-V3.2's, 3 as GLM-5's, whose steps share weights",
    )  # fmt: skip
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile, where it does not work")
    args = parser.parse_args()
    if args.mtp_depth < 1:
        parser.error(f"--mtp-depth {args.mtp_depth}: the MTP layer is trained for one draft step at least")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU: train where there is one, or try --device cpu --shape tiny")
    return args


def settings_within(seconds: float, settings: Settings, before: Settings | None) -> Settings:
    """`settings` with a language stage that lets everything end in `seconds`; a run that goes on keeps the one of `before`."""
    if before is not None:
        return replace(settings, language=before.language)
    left = seconds - settings.indexer.seconds - ENDING
    if left < 10:
        raise SystemExit(f"--whole-in leaves {left:.0f} s for the language stage: give more minutes, or less to the indexers")
    return replace(settings, language=Budget(seconds=round(left, 1)))


def corpus_of(out: Path, settings: Settings, say: Callable[[str], None], **corpus) -> Prepared:
    """The run's corpus in `out`, prepared where it is not there; `corpus` goes to `prepare`."""
    vocab = SHAPES[settings.shape].vocab
    return prepare(out / "corpus", vocab, settings.seed, say, most_bytes=settings.corpus_bytes, **corpus)


def model_of(settings: Settings, device: str, say: Callable[[str], None]) -> TrainedModel:
    """The model with its first weights, on `device`."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = TrainedModel(SHAPES[settings.shape], dtype, settings.mtp_depth)
    model.initialize(settings.seed)
    model.to(device)
    say(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters")
    return model


def train(run: Run) -> bool:
    """All stages that are left; False where the run is to stop before. Saves in either case."""
    optimizer_states = run.restore()
    names = list(STAGES)
    with attention_of(run.model.lm_head.weight.device.type):
        while run.stage in STAGES:
            if not STAGES[run.stage](run, optimizer_states):
                run.save()
                return False
            optimizer_states = []
            run.results[run.stage] = {"steps": run.progress.step, "tokens": run.progress.tokens,
                                      "seconds": round(run.progress.seconds, 1)} | judge(run)  # fmt: skip
            run.say(f"stage {run.stage} ended: {run.results[run.stage]}")
            following = names.index(run.stage) + 1
            run.stage = names[following] if following < len(names) else "done"
            run.progress, run.optimizers = Progress(), []
            run.save()
    export.write(run.model, run.folder / "checkpoint", run.prepared.folder / "tokenizer.json")
    run.report()
    return True


def judge(run: Run) -> dict:
    """What the stage that ended is worth on held-out text."""
    ids, settings = run.prepared.load("held_out"), run.settings
    if run.stage == "indexer":
        return {"attention_kept": distill.attention_kept(run.model, Blocks(ids, settings.long_context, settings.seed))}
    blocks = Blocks(ids, settings.context, settings.seed, 1 + language.HELD_OUT_STEPS)
    return {"held_out": language.held_out(run.model, blocks)}


def attention_of(device: str) -> contextlib.AbstractContextManager[None]:
    """On a GPU, FlashAttention or an error: the plain kernel would be many times slower and not say so."""
    if device != "cuda":
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.FLASH_ATTENTION)


if __name__ == "__main__":
    sys.exit(main())
