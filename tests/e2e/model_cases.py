"""End-to-end cases of models other than DeepSeek-V3.2: GLM-5.1, whose drafts select for themselves, and GLM-5.2, which shares.

The recipe of GLM-5.2 on H200 has five draft steps, top-k 1 and six draft tokens: N = 5 here.
"""

from __future__ import annotations

from functools import partial

from case import Case

GLM_GRID = tuple(f"{batch}x{length}" for batch in (1, 8, 32) for length in (300, 3000, 6000))
GLM_ENGINE = {"cuda_graph_bs": [1, 2, 4, 8, 16, 32], "max_total_tokens": 262144}
GLM_FP8 = GLM_ENGINE | {"kv_cache_dtype": "fp8_e4m3", "nsa_prefill_backend": "flashmla_kv"}
SHARED_SINCE = ">=0.5.17"
"""Older releases know neither shared draft selections nor this pattern of layers."""
SEEDS_TURNED_SINCE = ">=0.5.23"
"""0.5.17 keeps rows of the dequantised KV as if they were slots; the releases between the two are not looked at."""

glm_51 = partial(Case, model="glm-5.1", engine=GLM_ENGINE, floor_of_all=0.95)
glm_52 = partial(Case, model="glm-5.2", engine=GLM_ENGINE, floor_of_all=0.95, releases=SHARED_SINCE)
LONG = ("8x300", "8x3000")

MODEL_CASES = [
    *(glm_51(f"glm-5.1 n{n} fa3", n, GLM_GRID) for n in (1, 3, 5)),
    *(glm_51(f"glm-5.1 n{n} fp8", n, GLM_GRID, decode="flashmla_kv", engine=GLM_FP8) for n in (1, 3, 5)),
    glm_51("glm-5.1 no speculation", 0, LONG, floor_of_all=0.0),
    *(glm_52(f"glm-5.2 n{n} fa3", n, GLM_GRID) for n in (1, 3, 5)),
    *(glm_52(f"glm-5.2 n{n} fp8", n, GLM_GRID, decode="flashmla_kv", engine=GLM_FP8) for n in (1, 3, 5)),
    glm_52("glm-5.2 n5 flashmla_sparse", 5, LONG, decode="flashmla_sparse"),
    glm_52(
        "glm-5.2 n5 fp8 after flashmla_sparse prefill",
        5,
        LONG,
        decode="flashmla_kv",
        engine=GLM_FP8 | {"nsa_prefill_backend": "flashmla_sparse"},
        floor_of_all=0.96,  # a first round with wrong slots alone costs more than 0.04
        releases=SEEDS_TURNED_SINCE,
    ),
    glm_52("glm-5.2 n5 unfused top-k", 5, LONG, environment={"SGLANG_DSA_FUSE_TOPK": "0"}),
    glm_52("glm-5.2 n5 without CUDA graphs", 5, LONG, engine=GLM_ENGINE | {"disable_cuda_graph": True}),
    glm_52("glm-5.2 n5 chunked prefill", 5, LONG, engine=GLM_ENGINE | {"chunked_prefill_size": 1024}),
    glm_52("glm-5.2 no speculation", 0, LONG, floor_of_all=0.0),
]
