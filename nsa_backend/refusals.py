"""Refusals of what SGLang's built-in backend can do and this one cannot yet: made at server start, one sentence an option."""

from __future__ import annotations

from typing import Any

from nsa_backend.adapters import sglang_types
from nsa_backend.adapters.installed import adapter
from nsa_backend.adapters.option_rules import Rule
from nsa_backend.attention.implementations import DECODE_VALUES, PREFILL_VALUES
from nsa_backend.environment import asked, switched_on
from nsa_backend.releases import ROUND_WARM_UP, few_experts_problem, installed, round_graph_problem

RULES = (
    Rule("device", "--device", "", ("cuda",), "use an NVIDIA GPU"),
    Rule(
        "kv_cache_dtype",
        "--kv-cache-dtype",
        "",
        ("auto", "bfloat16", "bf16", "fp8_e4m3"),
        "pass --kv-cache-dtype bfloat16 or fp8_e4m3",
    ),
    Rule("page_size", "--page-size", "", (64,), "pass --page-size 64"),
    Rule(
        adapter.DECODE_ATTRIBUTE,
        adapter.DECODE_OPTION,
        "",
        (None, *DECODE_VALUES),
        f"choose one of {', '.join(DECODE_VALUES)}",
    ),
    Rule(
        adapter.PREFILL_ATTRIBUTE,
        adapter.PREFILL_OPTION,
        "",
        (None, *PREFILL_VALUES),
        f"choose one of {', '.join(PREFILL_VALUES)}",
    ),
    Rule(
        "enable_hisparse",
        "--enable-hisparse",
        "KV that has left the GPU must be fetched between the top-k and the attention of every layer, and nothing here does",
    ),
    Rule(
        "enable_pdmux",
        "--enable-pdmux",
        "it runs prefill and decode on two streams at once, and captured graphs here share page tables that two streams would "
        "write",
    ),
    Rule(
        "enable_multi_layer_eagle",
        "--enable-multi-layer-eagle",
        "each draft step then has a model and an extend of its own, and one launch here writes the steps of one model",
    ),
    Rule(
        "enable_deterministic_inference",
        "--enable-deterministic-inference",
        "the top-k kernel returns slots in an order that changes from run to run, and sums follow it",
    ),
    Rule(
        "speculative_algorithm",
        "--speculative-algorithm",
        "",
        (None, "EAGLE", "EAGLE3", "NEXTN"),
        "choose EAGLE, which runs the model's MTP layer",
    ),
    Rule(
        "speculative_eagle_topk",
        "--speculative-eagle-topk",
        "a tree of drafts has more than one chain, and draft steps here are one chain",
        (None, 1),
        "pass --speculative-eagle-topk 1",
    ),
    *adapter.REFUSED,
)


def refusals(server_args: sglang_types.ServerArgs) -> list[str]:
    """One sentence for each option that is set to something this backend does not serve."""
    args = adapter.resolved(server_args)
    found = [rule.refusal(args) for rule in RULES]
    found += adapter.combination_problems(args)
    found += adapter.environment_problems()
    found += warm_up_problems(args)
    if switched_on("NSA_BACKEND_PAIRED_LOGITS"):
        found += paired_logits_problems(args)
    if switched_on("NSA_BACKEND_ROUND_GRAPH"):
        found += adapter.round_problems(args)
    elif switched_on("NSA_BACKEND_SAMPLED_ROUNDS"):
        found.append(round_graph_problem("NSA_BACKEND_SAMPLED_ROUNDS"))
        if asked("NSA_BACKEND_ROUND_GRAPH") is False:
            found.append(
                "NSA_BACKEND_SAMPLED_ROUNDS=1 is for rounds in one graph, and NSA_BACKEND_ROUND_GRAPH=0 leaves three: unset one"
            )
    if switched_on("NSA_BACKEND_LAYER_FRONT"):
        found += [f"NSA_BACKEND_LAYER_FRONT=1: {problem}" for problem in adapter.front_problems(args)]
    if switched_on("NSA_BACKEND_SHORT_GRAPHS"):
        found += [f"NSA_BACKEND_SHORT_GRAPHS=1: {problem}" for problem in adapter.short_problems(args)]
    if switched_on("NSA_BACKEND_SHORT_PREFILLS"):
        found += [f"NSA_BACKEND_SHORT_PREFILLS=1: {problem}" for problem in adapter.prefill_problems(args)]
    if switched_on("NSA_BACKEND_DIVIDED_INDEXER"):
        found += [f"NSA_BACKEND_DIVIDED_INDEXER=1: {problem}" for problem in adapter.divided_problems(args)]
    if switched_on("NSA_BACKEND_FEW_EXPERTS") and (problem := few_experts_problem(adapter.device_sm(args.device))):
        found.append(f"NSA_BACKEND_FEW_EXPERTS=1: {problem}")
    if adapter.is_rocm():
        found.append("nsa_backend does not serve ROCm: use an NVIDIA GPU, or " + adapter.WAY_BACK)
    return [sentence for sentence in found if sentence]


def paired_logits_problems(args: Any) -> list[str]:
    """Why the indexer cannot score rows two by two, where that is asked for."""
    found = []
    if not adapter.pairs_logits():
        found.append(
            "NSA_BACKEND_PAIRED_LOGITS=1 is for an indexer that hands DeepGEMM two rows at once, and SGLang "
            f"{installed()} has none as it is set up: unset it"
        )
    if (args.speculative_num_draft_tokens or 0) % 2:
        found.append(
            "NSA_BACKEND_PAIRED_LOGITS=1 takes the rows of a request two by two, and there are "
            f"{args.speculative_num_draft_tokens}: pass an even --speculative-num-draft-tokens, or unset it"
        )
    if (device_sm := adapter.device_sm(args.device)) not in (0, 90):
        found.append(f"NSA_BACKEND_PAIRED_LOGITS=1 is for Hopper (SM90) and this device is SM{device_sm}: unset it")
    return found


def asks_for_warm_up(args: Any) -> bool:
    """Whether resolved arguments name the warm-up that captures rounds in one graph."""
    return ROUND_WARM_UP in (args.warmups or "").split(",")


def warm_up_problems(args: Any) -> list[str]:
    """Why that warm-up would capture nothing, where these arguments name it."""
    if not asks_for_warm_up(args):
        return []
    found, name = [], f"--warmups {ROUND_WARM_UP}"
    if round_graph_problem() is not None:
        found.append(f"{name} captures rounds in one graph, and on SGLang {installed()} they are three: drop it")
    elif asked("NSA_BACKEND_ROUND_GRAPH") is False:
        found.append(f"{name} captures rounds in one graph, and NSA_BACKEND_ROUND_GRAPH=0 leaves three: drop one of the two")
    if args.tokenizer_worker_num > 1:
        found.append(f"{name} is not known to several tokenizer processes: pass --tokenizer-worker-num 1, or drop the warm-up")
    return found


def refuse_unsupported(server_args: sglang_types.ServerArgs) -> None:
    """Raise ValueError with every refusal, one a line."""
    found = refusals(server_args)
    if found:
        raise ValueError("\n".join(found))
