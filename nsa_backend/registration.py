"""The registration of what the plugin puts in place of SGLang's: the backend, both draft backends, the start-up checks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from nsa_backend.adapters import sglang
from nsa_backend.adapters.installed import adapter
from nsa_backend.adapters.naive_eagle import switched_on_while_checked
from nsa_backend.adapters.shared import Takeover
from nsa_backend.backend import NativeSparseAttnBackend
from nsa_backend.environment import asked, switched_on
from nsa_backend.implementation_check import check_implementations
from nsa_backend.model_check import check_models
from nsa_backend.multi_step import NativeSparseAttnMultiStepBackend
from nsa_backend.refusals import asks_for_warm_up, refuse_unsupported
from nsa_backend.releases import LAYER_FRONTS, installed, round_graph_problem
from nsa_backend.required import check_built, check_names


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


def create_backend(runner: sglang.ModelRunner) -> NativeSparseAttnBackend:
    """Build the backend of a target model, or of a draft model's prefill."""
    if wants_layer_fronts():
        adapter.take_layer_fronts(runner, (NativeSparseAttnBackend,), not runner.is_draft_worker)
    backend = NativeSparseAttnBackend(runner)
    adapter.clear_padding_on_resume(runner.token_to_kv_pool)
    if not runner.is_draft_worker:
        backend.log_start(adapter.settings(runner).num_steps)
    return backend


def create_multi_step_backend(factory: sglang.DraftBackendFactory) -> NativeSparseAttnMultiStepBackend:
    """Build the draft steps' backend, and make SGLang's draft side ready for it."""
    _prepare_draft_side()
    shared = adapter.shares_selections(factory)
    return NativeSparseAttnMultiStepBackend(
        factory.draft_model_runner, factory.topk, factory.speculative_num_steps, shared=shared
    )


def create_draft_extend_backend(factory: sglang.DraftBackendFactory) -> NativeSparseAttnBackend:
    """Build the backend of the draft model's extend after a verify."""
    _prepare_draft_side()
    adapter.keep_draft_kv(factory.draft_model_runner)
    return NativeSparseAttnBackend(factory.draft_model_runner, shares_selections=adapter.shares_selections(factory))


def check_server_args(original: Callable, server_args: sglang.ServerArgs) -> None:
    """Stop the server in its main process, before any GPU work or weights, for what the plugin does not serve."""
    original(server_args)
    with switched_on_while_checked(server_args):
        _check(server_args)


def _check(server_args: sglang.ServerArgs) -> None:
    names = _backend_names(server_args)
    if switched_on("NSA_BACKEND_REQUIRED"):
        check_names(names, create_backend)
    if not set(adapter.BACKEND_NAMES).isdisjoint((names["prefill"], names["decode"])):
        check_models(server_args, names)  # first: SGLang fills other defaults in for a model that is not sparse
        refuse_unsupported(server_args)
        check_implementations(server_args)
        if asks_for_warm_up(adapter.resolved(server_args)):
            adapter.offer_warm_up()


def _backend_names(server_args: sglang.ServerArgs) -> dict[str, str | None]:
    """By part of the server, the attention backend that options name; drafts only where there are some."""
    args = adapter.resolved(server_args)
    names = dict(zip(("prefill", "decode"), adapter.served_backends(server_args), strict=True))
    if args.speculative_algorithm:
        names["drafts"] = args.speculative_draft_attention_backend or names["decode"]
    return names


def _prepare_draft_side() -> None:
    for name in adapter.BACKEND_NAMES:
        if sglang.ATTENTION_BACKENDS[name] is not create_backend:
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
