"""What the plugin puts in place of SGLang's: the backend, both draft backends, the start-up checks and the draft round."""

from __future__ import annotations

from collections.abc import Callable

from nsa_backend import host
from nsa_backend.backend import NativeSparseAttnBackend
from nsa_backend.draft_round import build_draft_extend_runner, capture_draft_extend, run_draft_round
from nsa_backend.multi_step import NativeSparseAttnMultiStepBackend
from nsa_backend.refusals import refuse_unsupported

FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory"


def take_over_nsa() -> None:
    """Register everything; raises RuntimeError where SGLang did not take a hook."""
    host.hook(f"{FACTORY}._create_nsa_decode_backend", create_multi_step_backend, host.HookType.REPLACE)
    host.hook(f"{FACTORY}._create_nsa_prefill_backend", create_draft_extend_backend, host.HookType.REPLACE)
    host.hook("sglang.srt.server_args.ServerArgs.check_server_args", check_server_args, host.HookType.AROUND)
    host.register_attention_backend("nsa")(create_backend)  # last: nothing is taken over by halves


def create_backend(runner: host.ModelRunner) -> NativeSparseAttnBackend:
    """Build the backend of a target model, or of a draft model's prefill."""
    backend = NativeSparseAttnBackend(runner)
    if not runner.is_draft_worker:
        backend.log_start(runner.server_args.speculative_num_steps or 0)
    return backend


def create_multi_step_backend(factory: host.DraftBackendFactory) -> NativeSparseAttnMultiStepBackend:
    """Build the draft steps' backend and hook the worker that will run them."""
    _hook_draft_workers()
    return NativeSparseAttnMultiStepBackend(factory.draft_model_runner, factory.topk, factory.speculative_num_steps)


def create_draft_extend_backend(factory: host.DraftBackendFactory) -> NativeSparseAttnBackend:
    """Build the backend of the draft model's extend after a verify."""
    _hook_draft_workers()
    return NativeSparseAttnBackend(factory.draft_model_runner)


def check_server_args(original: Callable, server_args: host.ServerArgs) -> None:
    """Stop the server in its main process, before any GPU work, for what the plugin does not serve."""
    original(server_args)
    if "nsa" in server_args.get_attention_backends():
        refuse_unsupported(server_args)


def _hook_draft_workers() -> None:
    if host.ATTENTION_BACKENDS["nsa"] is not create_backend:
        raise RuntimeError(
            "nsa_backend took over the draft side and not the target: another plugin registered the attention backend nsa, "
            f"or the log above says why this one did not load; to go on without it, {host.WAY_BACK}"
        )
    host.hook_draft_workers("draft_forward", run_draft_round)
    host.hook_draft_workers("init_cuda_graphs", capture_draft_extend)
    host.hook_draft_extend_runner(build_draft_extend_runner)
