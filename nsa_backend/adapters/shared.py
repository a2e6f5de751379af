"""The part of the boundary that every supported release of SGLang has alike: hooks, pins, facts about the GPU."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

import torch
from packaging.requirements import Requirement
from sglang.srt.environ import envs

from nsa_backend.adapters import sglang_types

__all__ = [
    "WAY_BACK",
    "Settings",
    "Takeover",
    "batch_sizes_chosen_with",
    "count_draft_extend_in_tokens",
    "deep_gemm_num_sms",
    "deep_gemm_schedule",
    "device_sm",
    "flashinfer_workspace_bytes",
    "hook",
    "is_hooked",
    "is_rocm",
    "package_problem",
    "register_under",
]

WAY_BACK = "set NSA_BACKEND_DISABLE=1 to serve with SGLang's built-in backend"
FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory"
CHECK = "sglang.srt.server_args.ServerArgs.check_server_args"
EXTEND_RUNNER = "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner.__init__"

_HOOKED: set[str] = set()
"""What `hook` has wrapped in this process."""


@dataclass(frozen=True)
class Settings:
    """What the user chose, as SGLang resolved it."""

    decode: str  # implementation of decode, target_verify and draft_extend
    prefill: str
    num_steps: int  # N; 0 without speculative decoding
    num_draft_tokens: int  # D; 0 without speculative decoding
    overlaps_batches: bool = False  # whether the halves of a batch run interleaved (--enable-two-batch-overlap)
    splits_prefill: bool = False  # whether ranks may divide the rows of a prefill among them (--enable-prefill-cp)
    context_ranks: int = 1  # that divide the KV of every request (--dcp-size)
    context_rank: int = 0  # this one of them
    disaggregated: bool = False  # whether the server is one of a pair (--disaggregation-mode)
    decode_by_user: bool = True  # whether the user named `decode`, or a release cannot tell
    prefill_by_user: bool = True  # likewise


@dataclass(frozen=True)
class Takeover:
    """What the plugin puts in place of SGLang's."""

    backend_class: type[sglang_types.AttentionBackend]
    multi_step_class: type
    create_backend: Callable[[sglang_types.ModelRunner], sglang_types.AttentionBackend]
    create_multi_step_backend: Callable[[sglang_types.DraftBackendFactory], Any]
    create_draft_extend_backend: Callable[[sglang_types.DraftBackendFactory], sglang_types.AttentionBackend]
    check_server_args: Callable[
        [Callable, sglang_types.ServerArgs], None
    ]  # (original, server_args), around ServerArgs.check_server_args


def hook(target: str, function: Callable, kind: sglang_types.HookType) -> None:
    """Hook `target`, a dotted path, now and only once; raises RuntimeError where that did not take.

    SGLang's registry logs a failure and goes on, which would leave the built-in backend serving in part. It also patches a
    target once, so applying it while plugins are being loaded would shut out what the plugins after this one register
    (0.5.12 to 0.5.23): its wrapper is used here, and its list left alone.
    """
    if target in _HOOKED:
        return
    try:
        sglang_types.HookRegistry._apply_target(
            target, [(kind, function, sglang_types.HookSource("nsa_backend", "sglang-nsa-backend"))]
        )
    except Exception as error:
        raise RuntimeError(f"nsa_backend could not hook {target}: {error}; to go on without it, {WAY_BACK}") from error
    _HOOKED.add(target)


def is_hooked(target: str) -> bool:
    """Whether `hook` has wrapped `target` in this process."""
    return target in _HOOKED


def register_under(names: tuple[str, ...], create_backend: Callable) -> None:
    """Take `names` in SGLang's registry of attention backends."""
    for name in names:
        sglang_types.register_attention_backend(name)(create_backend)


@contextlib.contextmanager
def batch_sizes_chosen_with(**keywords: int) -> Iterator[None]:
    """While a draft-extend graph runner is built, pass these to SGLang's choice of the batch sizes to capture.

    A captured batch must hold a multiple of the attention TP size in tokens. SGLang tells its target runner that a request has
    D of them and does not tell the draft-extend runner (0.5.12.post1 to 0.5.23), which then leaves out sizes that would do.
    """
    from sglang.srt.speculative import eagle_draft_extend_cuda_graph_runner as module

    original = module.get_batch_sizes_to_capture
    module.get_batch_sizes_to_capture = functools.partial(original, **keywords)
    try:
        yield
    finally:
        module.get_batch_sizes_to_capture = original


def count_draft_extend_in_tokens(ours: Takeover, sizes_in_tokens: Callable) -> None:
    """Hook the draft-extend graph runner so that its batch sizes count D tokens a request, where the backend is ours."""

    def build(
        original: Callable,
        runner: Any,
        worker: Any,
        *,
        draft_extend_attn_backend: Any = None,
        speculative_num_steps: int | None = None,
    ) -> None:
        """Around the runner's `__init__`."""
        passed = {"draft_extend_attn_backend": draft_extend_attn_backend, "speculative_num_steps": speculative_num_steps}
        if not isinstance(draft_extend_attn_backend or worker.draft_extend_attn_backend, ours.backend_class):
            original(runner, worker, **passed)
            return
        with sizes_in_tokens((speculative_num_steps or worker.speculative_num_steps) + 1):
            original(runner, worker, **passed)

    hook(EXTEND_RUNNER, build, sglang_types.HookType.AROUND)


@functools.cache
def _pins() -> dict[str, Requirement]:
    """What the installed SGLang requires without condition, by distribution name with dashes."""
    found = (Requirement(line) for line in requires("sglang") or ())
    return {requirement.name.replace("_", "-"): requirement for requirement in found if requirement.marker is None}


def package_problem(distribution: str) -> str | None:
    """Why `distribution` cannot be relied on, or None: it is missing, or not the release that the installed SGLang pins."""
    pin = _pins().get(distribution.replace("_", "-"))
    wanted = f"SGLang {version('sglang')} needs {pin or distribution}: pip install '{pin or distribution}'"
    try:
        found = version(distribution)
    except PackageNotFoundError:
        return f"{distribution} is not installed and {wanted}"
    if pin is not None and not pin.specifier.contains(found, prereleases=True):
        return f"{distribution} {found} is installed and {wanted}"
    return None


def flashinfer_workspace_bytes() -> int:
    """Size of the workspace that flashinfer's kernels share (SGLANG_FLASHINFER_WORKSPACE_SIZE)."""
    return envs.SGLANG_FLASHINFER_WORKSPACE_SIZE.get()


def deep_gemm_num_sms() -> int:
    """SMs that DeepGEMM's paged-MQA logits kernel schedules for on this GPU."""
    import deep_gemm

    return deep_gemm.get_num_sms()


def deep_gemm_schedule(lens: torch.Tensor, next_n: int = 1) -> torch.Tensor:
    """DeepGEMM's own schedule, int32 [num_sms + 1, 2], of rows with lengths `lens`, int32 [rows] on the GPU.

    `next_n` rows are taken together, which its kernels for Hopper do with one and with two.
    """
    import deep_gemm

    return deep_gemm.get_paged_mqa_logits_metadata(lens.view(-1, next_n), 64, deep_gemm.get_num_sms())


def is_rocm() -> bool:
    return torch.version.hip is not None


def device_sm(device: torch.device | str) -> int:
    """Compute capability of a CUDA device as one number, 90 for Hopper; 0 without a GPU."""
    if torch.device(device).type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
