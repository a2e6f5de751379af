"""What the cases of several files share: workloads, lengths of answers, floors and options of engines."""

from __future__ import annotations

STANDARD = ("8x300", "4x3000")
FLOORS = {"8x300": 3.9 / 4, "4x3000": 3.85 / 4}
DEPLOYMENT_FLOORS = FLOORS | {"32x300": 3.9 / 4, "unequal ranks": 3.9 / 4}
GLM_52 = {"model": "glm-5.2", "floor_of_all": 0.95}
FP8 = {"kv_cache_dtype": "fp8_e4m3", "nsa_prefill_backend": "flashmla_kv"}
TWO_GPUS = {"tp_size": 2, "disable_custom_all_reduce": True, "enforce_disable_flashinfer_allreduce_fusion": True}
"""All-reduce through NCCL alone: SGLang's own may ask for NVLink multicast, which not every machine offers."""
DEFAULT_SUMS = {"disable_custom_all_reduce": False, "enforce_disable_flashinfer_allreduce_fusion": False}
"""All-reduce as SGLang has it by itself: with the residual and the norm in one launch where 0.5.23 and FlashInfer have that."""
BESIDE_OTHERS = {"mem_fraction_static": 0.8}
"""What other engines take while this one loads counts against its share; `max_total_tokens` says what its KV cache takes."""
FOUR_GPUS = TWO_GPUS | BESIDE_OTHERS | {"tp_size": 4}
EIGHT_GPUS = FOUR_GPUS | {"tp_size": 8}
PREFILL_CP = {"enable_prefill_cp": True, "cp_strategy": "interleave"}
"""Each GPU computes every other token of a prefill, and decodes all requests with all heads."""
DP_2 = {"dp_size": 2, "enable_dp_attention": True}
ONE_GRAPH = {
    "environment": {"NSA_BACKEND_ROUND_GRAPH": "1"},
    "builtin_environment": {},
    "says": "captured whole speculative rounds",
    "replays": "greedy requests",
}
"""Fields of a case whose rounds must be one graph: captured on every rank, and replayed."""
PREFILL_SIZES = {"cuda_graph_backend_prefill": "breakable", "cuda_graph_bs_prefill": [8, 32, 64, 96, 128, 320, 512, 4096]}
"""All of up to 512 tokens but 96 are captured whole too."""
SAVED = {"enable_memory_saver": True, "enable_weights_cpu_backup": True, "enable_draft_weights_cpu_backup": True}
"""SGLang gives weights back empty unless it keeps a copy of them, for which a trainer has no need."""
NAMES_NOTHING = {"nsa_decode_backend": None, "nsa_prefill_backend": None}
"""SGLang chooses, or this package by rows."""
BY_ROWS = NAMES_NOTHING | {"cuda_graph_bs": [1, 2, 4, 8, 32]}
"""Nothing named; 32 requests are captured, so that their rows are verified together."""
UP_TO_TWO = {"cuda_graph_bs": [1, 2]}
"""Captured sizes that most batches of "unequal ranks" exceed, on one rank or on both."""


def new_tokens(steps: int, most: int = 128) -> int:
    """Tokens to generate: at most `most`, and as many as whole rounds of N + 1 add up to after the first."""
    return 1 + (most - 1) // (steps + 1) * (steps + 1)


def with_an_empty_round(floors: dict[str, float], steps: int) -> dict[str, float]:
    """`floors` where one more round of every request has no draft: it gives one token, the others what they gave."""
    tokens = new_tokens(steps) - 1
    rounds = {name: 1 + (tokens - 1) / (floor * (steps + 1)) for name, floor in floors.items()}
    return {name: tokens / count / (steps + 1) for name, count in rounds.items()}
