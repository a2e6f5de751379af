"""The registration of what the plugin puts in place of SGLang's: the backend, both draft backends, the start-up checks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from nsa_backend.adapters import experts, routers, sglang_types
from nsa_backend.adapters.installed import adapter
from nsa_backend.adapters.naive_eagle import switched_on_while_checked
from nsa_backend.adapters.shared import Takeover
from nsa_backend.backend import NativeSparseAttnBackend
from nsa_backend.environment import asked, switched_on
from nsa_backend.multi_step import NativeSparseAttnMultiStepBackend
from nsa_backend.releases import LAYER_FRONTS, installed, round_graph_problem
from nsa_backend.required import check_built
from nsa_backend.start_checks import check_options


def take_over() -> None:
    """Register everything; raises RuntimeError where SGLang did not take a hook."""
    adapter.take_over(OURS)
    if asked("NSA_BACKEND_ROUND_GRAPH") is not False and round_graph_problem() is None:
        adapter.take_rounds(OURS)
    if switched_on("NSA_BACKEND_REQUIRED"):
        adapter.watch_backends(partial(check_built, ours=(NativeSparseAttnBackend, NativeSparseAttnMultiStepBackend)))


def wants_layer_fronts() -> bool:
    """Whether two launches of ours are to stand in front of each layer that can have them."""
    answer = asked("NSA_BACKEND_LAYER_FRONT")
    return LAYER_FRONTS.get(installed(), False) if answer is None else answer


def create_backend(runner: sglang_types.ModelRunner) -> NativeSparseAttnBackend:
    """Build the backend of a target model, or of a draft model's prefill."""
    if wants_layer_fronts():
        demanded = switched_on("NSA_BACKEND_LAYER_FRONT") and not runner.is_draft_worker
        adapter.take_layer_fronts(runner, (NativeSparseAttnBackend,), demanded)
    adapter.take_context_parts(runner)
    backend = NativeSparseAttnBackend(runner)
    device_sm = backend.config.attention.device_sm
    adapter.score_at_once(device_sm)
    adapter.divide_indexer(device_sm)
    if experts.wanted(device_sm):
        experts.take()
        routers.take(runner.model)
    if asked("NSA_BACKEND_MOE_CONFIGS") is not False:
        adapter.take_moe_configs()
    adapter.clear_padding_on_resume(runner.token_to_kv_pool)
    if not runner.is_draft_worker:
        backend.log_start(adapter.settings(runner).num_steps)
    return backend


def create_multi_step_backend(factory: sglang_types.DraftBackendFactory) -> NativeSparseAttnMultiStepBackend:
    """Build the draft steps' backend, and make SGLang's draft side ready for it."""
    prepare_draft_side()
    shared = adapter.shares_selections(factory)
    return NativeSparseAttnMultiStepBackend(
        factory.draft_model_runner, factory.topk, factory.speculative_num_steps, shared=shared
    )


def create_draft_extend_backend(factory: sglang_types.DraftBackendFactory) -> NativeSparseAttnBackend:
    """Build the backend of the draft model's extend after a verify."""
    prepare_draft_side()
    adapter.keep_draft_kv(factory.draft_model_runner)
    return NativeSparseAttnBackend(factory.draft_model_runner, shares_selections=adapter.shares_selections(factory))


def check_server_args(original: Callable, server_args: sglang_types.ServerArgs) -> None:
    """Stop the server in its main process, before any GPU work or weights, for what the plugin does not serve."""
    original(server_args)
    with switched_on_while_checked(server_args):
        check_options(server_args, create_backend)


def prepare_draft_side() -> None:
    """Make SGLang's draft side ready; raises RuntimeError where the target's backend is not ours."""
    for name in adapter.BACKEND_NAMES:
        if sglang_types.ATTENTION_BACKENDS[name] is not create_backend:
            raise RuntimeError(
                "nsa_backend took over the draft side and not the target: another plugin registered the attention backend "
                f"{name}, or the log above says why this one did not load; to go on without it, {adapter.WAY_BACK}"
            )
    adapter.take_draft_side(OURS)


OURS = Takeover(
    backend_class=NativeSparseAttnBackend,
    multi_step_class=NativeSparseAttnMultiStepBackend,
    create_backend=create_backend,
    create_multi_step_backend=create_multi_step_backend,
    create_draft_extend_backend=create_draft_extend_backend,
    check_server_args=check_server_args,
)
