"""SGLang's decisions while it starts: the backends that options name, the configs of its models, the backends it builds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from nsa_backend.adapters.option_rules import nested
from nsa_backend.adapters.sglang_types import HookType
from nsa_backend.adapters.shared import FACTORY, hook

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

SCHEDULER = "sglang.srt.managers.scheduler"
RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
INIT_BACKENDS = ("init_attention_backends", "init_attention_backend")
"""Where a model runner builds its backend; the name of newer releases first."""


TARGET = "target model"
Check = Callable[[str, Any], None]  # (whose backend, backend)

_SEEN: set[str] = set()
"""Whose backends the scheduler that is being constructed has built."""


def target_model(server_args: ServerArgs) -> Any:
    """SGLang's ModelConfig of the target, which it has read and kept when it resolved its arguments."""
    if hasattr(server_args, "get_model_config"):
        return server_args.get_model_config()
    from sglang.srt.arg_groups.model_override_base import model_config_of

    return model_config_of(server_args)


def draft_config(server_args: ServerArgs, args: Any) -> Any | None:
    """The HF config of the draft model; None where it comes from the target's own checkpoint. `args` are the resolved ones."""
    if args.speculative_draft_model_path in (None, args.model_path):
        return None
    from sglang.srt.configs.model_config import ModelConfig

    return ModelConfig.from_server_args(
        server_args,
        model_path=args.speculative_draft_model_path,
        model_revision=args.speculative_draft_model_revision,
        is_draft_model=True,
    ).hf_config


def drafts_are_dense(server_args: Any) -> bool:
    """Whether a dense model makes the drafts, which no backend of sparse attention serves."""
    return nested(server_args, "speculative_algorithm") == "EAGLE3"


def attention_tp_size_of(args: Any) -> int:
    """Ranks that share the heads of a request's attention, by resolved arguments."""
    # 0.5.23 resolves --enable-dp-attention to the first, and turns it off.
    dp = getattr(args, "attn_dp_size", None) or (args.dp_size if args.enable_dp_attention else 1)
    return max(args.tp_size // dp // (getattr(args, "attn_cp_size", None) or 1), 1)


def context_ranks_of(args: Any) -> int:
    """Of those, ranks that divide the KV of a request; by resolved arguments too."""
    return getattr(args, "dcp_size", None) or 1


def watch_backends(check: Check) -> None:
    """Call `check(part, backend)` on each attention backend that the scheduler of this process builds, before it is used.

    The modules of model runners are heavy and a scheduler loads them anyway, so they are hooked when it is constructed.
    Processes without one have no backends.
    """
    if SCHEDULER in sys.modules:
        hook(f"{SCHEDULER}.Scheduler.__init__", partial(_start, check), HookType.AROUND)


def _start(check: Check, original: Callable, scheduler: Any, *args: Any, **options: Any) -> None:
    """Around `Scheduler.__init__`. A target that no hook has seen was built in a way unknown here: it is not taken for ours."""
    _SEEN.clear()
    watch_runners(check)
    original(scheduler, *args, **options)
    if TARGET not in _SEEN:
        check(TARGET, None)


def watch_runners(check: Check) -> None:
    """Hook where model runners and the factory of draft backends build theirs."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    method = next(name for name in INIT_BACKENDS if hasattr(ModelRunner, name))
    hook(f"{RUNNER}.{method}", partial(_runner_built, check), HookType.AROUND)
    for method, part in (("create_decode_backend", "draft steps"), ("create_draft_extend_backend", "draft-extend")):
        hook(f"{FACTORY}.{method}", partial(_draft_built, check, part), HookType.AROUND)


def _runner_built(check: Check, original: Callable, runner: Any) -> None:
    original(runner)
    part = "draft model" if runner.is_draft_worker else TARGET
    if part == TARGET or not drafts_are_dense(nested(runner, "server_args")):
        check(part, runner.attn_backend)
    _SEEN.add(part)


def _draft_built(check: Check, part: str, original: Callable, factory: Any) -> Any:
    """None stands for the draft model's own backend, or for one draft step, which needs none."""
    backend = original(factory)
    if backend is not None and not drafts_are_dense(nested(factory, "draft_model_runner.server_args")):
        check(part, backend)
    return backend
