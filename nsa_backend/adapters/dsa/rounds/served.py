"""Which servers and which of their batches are served with rounds in one graph, and what to change for the others."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

from sglang.srt.environ import envs

from nsa_backend.adapters.dsa.rounds.by_release import release
from nsa_backend.adapters.option_rules import Rule
from nsa_backend.environment import asked, switched_on
from nsa_backend.releases import round_graph_problem

logger = logging.getLogger(__name__)

SWITCH = "NSA_BACKEND_ROUND_GRAPH"
SAMPLED_SWITCH = "NSA_BACKEND_SAMPLED_ROUNDS"


class Kind(NamedTuple):
    """What the batches of a kind ask of their rounds, which have graphs of their own; cheap ones come first in order."""

    sampled: bool = False  # some of their requests sample; greedy ones among them have temperature 1 and top-k 1
    logprobs: bool = False  # some of them want the log-probabilities of their tokens
    short: bool = False  # none can come to more than index_topk tokens, so no row's selection leaves any out

    @classmethod
    def of(cls, batch: Any) -> Kind:
        """That of SGLang's ScheduleBatch, whatever its lengths.

        A batch is told by the requests that it still has: SGLang goes on to sample for a batch of which the last request that
        asked for it has ended, and draws among tokens that tie for the best of a greedy one.
        """
        sampled = not batch.sampling_info.is_all_greedy
        if sampled and batch.reqs:  # what a round is captured of has none
            sampled = any(one.sampling_params.top_k > 1 for one in batch.reqs)
        return cls(sampled, batch.return_logprob)

    def __str__(self) -> str:
        """Of their requests, for the log."""
        told = f"{'sampled' if self.sampled else 'greedy'} requests{' with log-probabilities' * self.logprobs}"
        return f"{'short ' * self.short}{told}"

    @property
    def of_any_length(self) -> Kind:
        """The kind whose graphs serve these batches too."""
        return self._replace(short=False)


KINDS = tuple(
    Kind(sampled, logprobs, short) for short in (False, True) for sampled in (False, True) for logprobs in (False, True)
)


def needed(attribute: str, option: str, served: tuple, advice: str | None = None, *, everywhere: bool = True) -> Rule:
    """What a round graph asks of an option; `advice` says what a user changes."""
    return Rule(attribute, option, "", served, advice or f"drop {option}", everywhere and "." not in attribute)


NEEDED = (
    needed("speculative_algorithm", "--speculative-algorithm", ("EAGLE", "NEXTN"), "pass --speculative-algorithm EAGLE"),
    needed("disable_overlap_schedule", "--disable-overlap-schedule", (False,)),
    needed("disable_cuda_graph", "--disable-cuda-graph", (False,)),
    # A round of one graph pads a batch to the next captured size.
    needed("disable_cuda_graph_padding", "--disable-cuda-graph-padding", (False,)),
    needed("attn_cp_size", "--attn-cp-size", (1,), "drop --enable-prefill-cp or --attn-cp-size"),
    needed("dcp_size", "--dcp-size", (None, 1), everywhere=False),
    needed("enable_two_batch_overlap", "--enable-two-batch-overlap", (False,)),
    needed("pp_size", "--pp-size", (1,), "pass --pp-size 1"),
    needed("ep_size", "--ep-size", (1,), "pass --ep-size 1"),
    # SGLang tells DeepEP's buffers before each graph which mode they are in, on one GPU too, whose EP size is 1.
    needed("moe_a2a_backend", "--moe-a2a-backend", ("none",)),
    needed("speculative_moe_a2a_backend", "--speculative-moe-a2a-backend", (None, "none")),
    # The ranks then tell one another their sizes before every batch, as with DP attention.
    needed("moe_dense_tp_size", "--moe-dense-tp-size", (None,)),
    # The others draw random numbers inside graphs, and torch writes their offset when it replays the graph itself.
    needed("ep_dispatch_algorithm", "--ep-dispatch-algorithm", (None, "static")),
    needed("disaggregation_mode", "--disaggregation-mode", ("null",)),
    # The ranks of DP attention then exchange logits inside the graphs: SGLang's default on the decode server of a pair.
    needed(
        "enable_tp_lm_head_all_to_all",
        "--enable-tp-lm-head-all-to-all",
        (None, False),
        "pass --no-enable-tp-lm-head-all-to-all",
        everywhere=False,
    ),
    needed("speculative_adaptive", "--speculative-adaptive", (False,)),
    needed("speculative_use_rejection_sampling", "--speculative-use-rejection-sampling", (False,)),
    needed("enable_lora", "--enable-lora", (None, False)),
    # Memory that a server gives back comes back where it was, and SGLang's own graphs go on reading there.
    needed("enable_memory_saver", "--enable-memory-saver", (False,)),
    needed("enable_eplb", "--enable-eplb", (False,)),
    needed("elastic_ep_backend", "--elastic-ep-backend", (None,)),
    needed("expert_distribution_recorder_mode", "--expert-distribution-recorder-mode", (None,)),
    needed("enable_return_routed_experts", "--enable-return-routed-experts", (False,)),
    needed("enable_return_indexer_topk", "--enable-return-indexer-topk", (False,)),
    needed("kv_canary", "--kv-canary", ("none",)),
    needed("msprobe_dump_config", "--msprobe-dump-config", (None,)),
    needed("debug_tensor_dump_output_folder", "--debug-tensor-dump-output-folder", (None,)),
    needed(
        "cuda_graph_config.decode.backend", "--cuda-graph-backend-decode", ("full",), "pass --cuda-graph-backend-decode full"
    ),
)
"""Options under whose values nothing happens on the host, or across ranks, between the graphs of a round."""

DP_ATTENTION = (
    needed("enable_dp_attention", "--enable-dp-attention", (False,)),
    # 0.5.23 resolves that option to this one, and turns it off.
    needed("attn_dp_size", "--attn-dp-size", (None, 1), "drop --enable-dp-attention or --attn-dp-size", everywhere=False),
)
"""Options of DP attention."""

_SWITCHES = {
    "SGLANG_ENABLE_ASYNC_ASSERT": "which in a round of one graph would hold for padding too, whose numbers nobody reads",
    "SGLANG_ENABLE_NAN_LOGITS_CHECK": "which in a round of one graph would check padding too, whose numbers nobody reads",
    "SGLANG_LOG_DECODE_GRAPH_KEY": "which logs every replay",
    "SGLANG_SANITIZE_NAN_LOGITS": "which looks on the host at what rounds found",
    "SGLANG_KV_CANARY_ENABLE_TOKEN_ORACLE": "which hashes the names of a batch's requests on the host",
    "SGLANG_KV_CANARY_ENABLE_VERIFY_TOKEN_ASSERT": "which collects the tokens of a batch's requests on the host",
}
ON_THE_HOST = {name: does for name, does in _SWITCHES.items() if hasattr(envs, name)}
"""Switches of the installed SGLang that must be off, and what they do in every round."""

CONFIDENTIAL = (
    "the GPU is in confidential computing mode, where what it writes to memory of the host passes through a bounce buffer, and "
    "SGLang reads results in a thread of its own"
)


def switches_on(args: Any) -> dict[str, str]:
    """Environment switches that leave a server of these resolved arguments no room for round graphs, and what each does."""
    found = {name: does for name, does in ON_THE_HOST.items() if getattr(envs, name).get()}
    ranks = not all(rule.serves(args) for rule in DP_ATTENTION)
    if ranks and envs.SGLANG_SCHEDULER_SKIP_ALL_GATHER.get():
        found["SGLANG_SCHEDULER_SKIP_ALL_GATHER"] = "under which ranks of DP attention do not tell one another what they have"
    if switched_on("NSA_BACKEND_CHECK"):
        found["NSA_BACKEND_CHECK"] = "which looks at every replay on the host"
    return found


def server_problems(args: Any) -> list[str]:
    """One sentence for each reason why a server of these resolved arguments that asks for round graphs can have none."""
    problem = round_graph_problem()
    if problem is not None:
        return [problem]
    if not decodes(args):
        return []
    asking = f"{SWITCH}=1, which NAIVE_EAGLE sets,"
    if computes_confidentially():
        return [f"{asking} cannot be served here: {CONFIDENTIAL}; unset it and choose EAGLE"]
    options = [
        f"{asking} cannot be served with these options: {way}, or unset it and choose EAGLE" for way in options_to_change(args)
    ]
    return options + [f"{SWITCH}=1 and {name}=1, {does}, cannot both be: unset one" for name, does in switches_on(args).items()]


def computes_confidentially() -> bool:
    """Whether SGLang takes the GPU for one in confidential computing mode; releases before 0.5.23 do not ask."""
    from sglang.srt.utils import common

    return getattr(common, "is_confidential_compute", bool)()


def decodes(args: Any) -> bool:
    """Whether a server of these resolved arguments has rounds at all: the prefill server of a pair has none."""
    return args.disaggregation_mode != "prefill" or "disaggregation_mode" not in release().beside


def unmet(args: Any) -> list[Rule]:
    """The rules that these resolved arguments do not meet, and the release's defaults and the switch do not lift."""
    lifted = {option for option, when in release().beside.items() if when.served(SWITCH)}
    found = [rule for rule in (*NEEDED, *DP_ATTENTION) if not rule.serves(args)]
    if asked(SWITCH) is None:
        used = {rule.attribute for rule in found}
        lifted -= {first for first, second in release().apart if {first, second} <= used}
    return [rule for rule in found if rule.attribute not in lifted]


def options_to_change(args: Any) -> list[str]:
    """What to change of these resolved arguments for round graphs."""
    return list(dict.fromkeys(rule.advice for rule in unmet(args)))


def changes_needed(args: Any) -> list[str]:
    """What to change on a server of these resolved arguments for round graphs; nothing where it can have them.

    Where it would be enough to ask for them, that too.
    """
    options, switches = options_to_change(args), [f"unset {name}" for name in switches_on(args)]
    if options and not switches and all(rule.attribute in release().beside for rule in unmet(args)):
        return [f"{' and '.join(options)}, or set {SWITCH}=1"]
    return options + switches


def has_rounds(args: Any, serving: Iterable[str | None], ours: Iterable[str]) -> bool:
    """Whether the rounds of a server are to be one graph; where they could be after a change of its options, the log says so.

    Args:
        args: its resolved arguments.
        serving: attention backends of prefill and decode, by name.
        ours: the names that this package serves.
    """
    if set(ours).isdisjoint(serving) or not decodes(args):
        return False
    changes = changes_needed(args)
    if changes:
        logger.info("nsa_backend: speculative rounds are three CUDA graphs; for one, %s", " and ".join(changes))
    return not changes


def worker_problem(worker: Any, backends: tuple[type, ...]) -> str | None:
    """Why a worker that SGLang has built can have no round graphs, or None; options alone do not tell.

    `backends` are our attention backends, which plan nothing on the host.
    """
    from sglang.srt.debug_utils.dumper import dumper
    from sglang.srt.managers import overlap_utils
    from sglang.srt.speculative import spec_utils

    target, draft = worker.target_worker.model_runner, worker.draft_worker
    if not all(isinstance(backend, backends) for backend in worker.spec_v2_attn_backends if backend is not None):
        return "another attention backend serves the target or the drafts"
    if computes_confidentially():
        return CONFIDENTIAL
    if overlap_utils._DEBUG_ASSERT:
        return "SGLang checks what rounds leave to one another (SGLANG_IS_IN_CI)"
    if spec_utils.SIMULATE_ACC_LEN > 0:
        return "SGLang draws accept lengths on the host (SGLANG_SIMULATE_ACC_LEN)"
    if dumper.may_enable:
        return "SGLang dumps tensors by the number of the forward (DUMPER_ENABLE or DUMPER_SERVER_PORT)"
    if target.decode_cuda_graph_runner is None:
        return "SGLang captured no graph of target-verify"
    if draft.cuda_graph_runner_for_draft_extend is None:
        return "SGLang captured no graph of draft-extend"
    if any(runner.device_timer is not None for runner in (target, draft.draft_runner)):
        return "SGLang times every forward on the GPU"
    if target.model_config.model_is_mrope:
        return "the model's positions have several parts"
    return None


def serves_sampled(batch: Any) -> bool:
    """Whether a sampled round of this batch is one graph where a greedy one is."""
    ranks = batch.global_num_tokens is not None
    return (release().sampled_of_ranks if ranks else release().sampled).served(SAMPLED_SWITCH)


def asks_for_others(batch: Any) -> bool:
    """Whether a request wants log-probabilities of the likeliest tokens, or of some that it names."""
    return any(batch.top_logprobs_nums or ()) or any(ids is not None for ids in batch.token_ids_logprobs or ())


def is_decode(batch: Any) -> bool:
    """Whether this batch decodes and no rank's prefills beside it."""
    return batch.forward_mode.is_decode() and not batch.is_extend_in_batch


def batch_problem(batch: Any) -> str | None:
    """Why SGLang's own path runs this decode batch of a server that has round graphs, or None where one graph does.

    Args:
        batch: SGLang's ScheduleBatch, as its scheduler hands it to the forward.
    """
    sampling, draft, mark = batch.sampling_info, batch.spec_info, release().mark
    kind = Kind.of(batch)
    found = {
        f"a request samples, which {SAMPLED_SWITCH}=1 makes one graph": kind.sampled and not serves_sampled(batch),
        "requests sample from seeds of their own": kind.sampled and sampling.sampling_seed is not None,
        "a request has a grammar": batch.has_grammar,
        f"a request asks for log-probabilities, which {SWITCH}=1 makes one graph": kind.logprobs
        and not release().logprobs.served(SWITCH),
        "a request asks for log-probabilities of other tokens than its own": kind.logprobs and asks_for_others(batch),
        "a request asks for hidden states": batch.return_hidden_states,
        "a request has penalties": sampling.penalizer_orchestrator.is_required,
        "a request biases its logits": sampling.logit_bias is not None,
        "a request brings a logit processor of its own": sampling.has_custom_logit_processor,
        "a request is watermarked": mark(sampling, "has_watermark_candidates"),
        "a request has images": any(found is not None for found in batch.multimodal_inputs or ()),
        "requests search by beams": mark(batch, "beam_tail") is not None,
        "its drafts are not ready": draft is None
        or draft.future_indices is None
        or mark(draft, "cuda_graph_compatible") is False,
    }
    return next((why for why, holds in found.items() if holds), None)


class Reasons:
    """Why batches of a server with round graphs were left to SGLang's own path: the log has each reason once."""

    def __init__(self):
        self._told: set[str] = set()

    def tell(self, problem: str) -> None:
        """Of a batch."""
        if problem not in self._told:
            self._told.add(problem)
            logger.info("nsa_backend: three CUDA graphs instead of one for the rounds of some batches: %s", problem)
