"""The recipes of others: of the model's makers, of benchmarks, of training frameworks that serve rollouts, of users."""

from __future__ import annotations

from recipes import NEW, NO_DP, OLD, Recipe, Refused, Served, alike, drafts, older_divides, rounds
from recipes_of_sglang import DEEPEP, ON_FP8, SPARSE

MAKERS = "https://github.com/zai-org/GLM-5"
INFERENCEX = "https://github.com/SemiAnalysisAI/InferenceX/blob/843c6254f/benchmarks"
SINGLE = f"{INFERENCEX}/single_node/fixed_seq_len/deprecated"
PAIR = f"{INFERENCEX}/multi_node/srt-slurm-recipes/sglang/glm5.2/agentic/disagg-h200-2p2d-pcp8-tp8-dp8-mtp.yaml"
SLIME = "https://github.com/THUDM/slime/blob/624b824a8/scripts"
MILES = "https://github.com/radixark/miles/blob/31f1ca961/scripts"
HICACHE = "https://github.com/sgl-project/sglang/issues/22757"

ROLLOUT = (
    "--tp-size 64 --nnodes 8 --node-rank 0 --dist-init-addr 10.0.0.1:5000 --mem-fraction-static 0.70 --enable-dp-attention "
    "--ep-size 64 --dp-size 64 --moe-dense-tp-size 1 --enable-dp-lm-head --moe-a2a-backend deepep --page-size 64 "
    "--attention-backend nsa --nsa-prefill-backend flashmla_sparse --watchdog-timeout 3600 --enable-memory-saver"
)
"""Of slime, whose engines span 64 GPUs and hand their memory back between rollouts."""
OF_A_PAIR = "--kv-cache-dtype fp8_e4m3 --nsa-decode-backend flashmla_kv --disable-overlap-schedule " + (
    "--disaggregation-transfer-backend mooncake --speculative-draft-attention-backend nsa"
)
FP8_AND_SPARSE = {"decode": "flashmla_kv", "prefill": "flashmla_sparse"}
FOR_ONE_GRAPH = f"{DEEPEP} and drop --moe-dense-tp-size"
INFX = (
    "--trust-remote-code --tp-size 8 --ep-size 1 --disaggregation-transfer-backend mooncake --kv-cache-dtype fp8_e4m3 "
    "--context-length 1048576 --max-total-tokens 1048576 --mem-fraction-static 0.85 --watchdog-timeout 86400 "
    "--stream-interval 60 --enable-metrics --enable-cache-report" + drafts(3)
)
IN_TRUE_LENGTH = {"SGLANG_OPT_USE_TOPK_V2": "1", "SGLANG_MOONCAKE_CUSTOM_MEM_POOL": "True"}
NOT_TURNED = (
    "SGLang 0.5.17 does not turn one that was made on dequantised FP8 KV into slots; pass --dsa-prefill-backend flashmla_kv"
)

RECIPES = {
    "GLM-5.1, by its makers": Recipe(
        MAKERS,
        "8 H200",
        "GLM-5",
        "--tp-size 8 --mem-fraction-static 0.85 --served-model-name glm-5.1-fp8" + drafts(3),
        rounds(3, ""),
        {"SGLANG_ENABLE_SPEC_V2": "1"},
    ),
    "GLM-5, benchmark of InferenceX": Recipe(
        f"{SINGLE}/glm5_fp8_h200.sh",
        "8 H200",
        "GLM-5",
        "--tp-size 8 --mem-fraction-static 0.85 --served-model-name glm-5-fp8 --trust-remote-code "
        "--enable-flashinfer-allreduce-fusion",
        alike(Served()),
    ),
    "GLM-5, benchmark of InferenceX, MTP": Recipe(
        f"{SINGLE}/glm5_fp8_h200_mtp.sh",
        "8 H200",
        "GLM-5",
        "--tp-size 8 --mem-fraction-static 0.85 --served-model-name glm-5-fp8 --trust-remote-code" + drafts(3),
        rounds(3, ""),
    ),
    "GLM-5.2, benchmark of InferenceX, prefill server": Recipe(
        PAIR,
        "16 H200",
        "GLM-5.2",
        f"--disaggregation-mode prefill --attn-cp-size 8 --enable-prefill-cp --cp-strategy interleave "
        f"--enable-dsa-cache-layer-split --chunked-prefill-size 32768 --max-running-requests 32 {INFX}",
        {
            NEW: Served(steps=3, **ON_FP8),
            OLD: older_divides(
                "--enable-prefill-cp",
                "--attn-cp-size 8",
                "--cp-strategy interleave",
                "--enable-dsa-cache-layer-split",
                then=Served(steps=3, **ON_FP8),
            ),
        },
        IN_TRUE_LENGTH,
    ),
    "GLM-5.2, benchmark of InferenceX, decode server": Recipe(
        PAIR,
        "16 H200",
        "GLM-5.2",
        f"--disaggregation-mode decode --dp-size 8 --enable-dp-attention --dsa-decode-backend flashmla_kv --page-size 64 "
        f"--disable-radix-cache --max-running-requests 200 {INFX}",
        {
            NEW: Served(steps=3, three="pass --no-enable-tp-lm-head-all-to-all, or set NSA_BACKEND_ROUND_GRAPH=1", **ON_FP8),
            OLD: Served(steps=3, three=f"drop --disaggregation-mode and {NO_DP}", **ON_FP8),
        },
        IN_TRUE_LENGTH,
    ),
    "GLM-5, rollouts of slime": Recipe(
        f"{SLIME}/run-glm5-744B-A40B.sh",
        "64 Hopper",
        "GLM-5",
        f"{ROLLOUT} --deepep-mode auto --nsa-decode-backend flashmla_sparse --cuda-graph-max-bs 8 --max-running-requests 512 "
        "--chunked-prefill-size 131072" + drafts(3),
        {
            NEW: Served(steps=3, three=f"{FOR_ONE_GRAPH} and drop --enable-memory-saver", **SPARSE),
            OLD: Served(steps=3, three=f"{FOR_ONE_GRAPH} and drop --enable-memory-saver and {NO_DP}", **SPARSE),
        },
        {"SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": "32"},
    ),
    "GLM-5.2, rollouts of slime, prefill server": Recipe(
        f"{SLIME}/run-glm5.2-744B-A40B.sh",
        "64 Hopper",
        "GLM-5.2",
        f"{ROLLOUT} {OF_A_PAIR} --disaggregation-mode prefill --deepep-mode auto --load-balance-method follow_bootstrap_room "
        "--chunked-prefill-size 131072 --max-running-requests 512 --cuda-graph-max-bs 8" + drafts(4),
        {NEW: Served(steps=4, **FP8_AND_SPARSE), OLD: Served(steps=4, three=None, **FP8_AND_SPARSE)},
        {"SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": "64"},
    ),
    "GLM-5.2, rollouts of slime, decode server": Recipe(
        f"{SLIME}/run-glm5.2-744B-A40B.sh",
        "64 Hopper",
        "GLM-5.2",
        f"{ROLLOUT} {OF_A_PAIR} --disaggregation-mode decode --deepep-mode low_latency --moe-runner-backend deep_gemm "
        "--load-balance-method round_robin --max-running-requests 768 --cuda-graph-max-bs 12" + drafts(4),
        {
            NEW: Served(
                steps=4,
                three=f"drop --disable-overlap-schedule and {FOR_ONE_GRAPH} and drop --enable-memory-saver",
                **FP8_AND_SPARSE,
            ),
            OLD: Served(
                steps=4,
                three=f"drop --disable-overlap-schedule and {FOR_ONE_GRAPH} and drop --disaggregation-mode and "
                f"drop --enable-memory-saver and {NO_DP}",
                **FP8_AND_SPARSE,
            ),
        },
        {"SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": "64"},
    ),
    "GLM-5.2, rollouts of miles, balanced": Recipe(
        f"{MILES}/run_glm5_2_744b_a40b.py",
        "4 Hopper",
        "GLM-5.2",
        "--tp-size 4 --mem-fraction-static 0.85 --ep-size 4 --enable-dp-attention --dp-size 4 --moe-a2a-backend deepep "
        "--kv-cache-dtype fp8_e4m3 --nsa-decode-backend flashmla_kv --nsa-prefill-backend flashmla_sparse "
        "--attention-backend nsa --page-size 64 --cuda-graph-max-bs 32 --max-running-requests 256 --chunked-prefill-size 32768 "
        "--watchdog-timeout 3600 --speculative-draft-attention-backend nsa" + drafts(1),
        {
            NEW: Served(steps=1, three=DEEPEP, **FP8_AND_SPARSE),
            OLD: Refused(
                NOT_TURNED, ("--nsa-prefill-backend flashmla_sparse",), Served(steps=1, three=f"{DEEPEP} and {NO_DP}", **ON_FP8)
            ),
        },
        {"SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": "256", "SGLANG_NSA_FORCE_MLA": "1"},
    ),
    "DeepSeek-V3.2, rollouts of miles": Recipe(
        f"{MILES}/run_deepseek_v32.py",
        "8 Hopper",
        "DeepSeek-V3.2",
        "--mem-fraction-static 0.8 --attention-backend nsa --nsa-decode-backend flashmla_sparse "
        "--nsa-prefill-backend flashmla_sparse --kv-cache-dtype bf16 --page-size 64 --moe-runner-backend triton --tp-size 8 "
        "--dp-size 8 --enable-dp-attention --enable-dp-lm-head --cuda-graph-max-bs 256",
        alike(Served(**SPARSE)),
    ),
    "DeepSeek-V3.2 on H20, HiCache with Mooncake": Recipe(
        HICACHE,
        "8 H20",
        "DeepSeek-V3.2",
        "--cuda-graph-bs 1 2 4 8 12 14 16 --max-running-requests 128 --tp 8 --dp 8 --enable-dp-attention "
        "--mem-fraction-static 0.85 --chunked-prefill-size 10240 --context-length 32000 --trust-remote-code "
        "--watchdog-timeout 3600 --kv-cache-dtype fp8_e4m3 --page-size 64 --enable-hierarchical-cache --hicache-size 60 "
        "--hicache-io-backend direct --hicache-mem-layout page_first_direct --hicache-storage-prefetch-policy timeout "
        "--hicache-storage-backend mooncake --enable-request-time-stats-logging --enable-cache-report --enable-metrics"
        + drafts(2),
        rounds(2, NO_DP, **ON_FP8),
    ),
}
