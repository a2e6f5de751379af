"""The recipes of SGLang's own pages: its guide to DeepSeek-V3.2 and GLM-5, its cookbook, and its page on HiSparse."""

from __future__ import annotations

from recipes import (
    DIVIDES,
    DP,
    IN_TURN,
    NEW,
    NO_DP,
    OLD,
    TWO_NODES,
    Recipe,
    Refused,
    Served,
    Stopped,
    alike,
    drafts,
    older_divides,
    rounds,
)

GUIDE = "https://docs.sglang.io/basic_usage/deepseek_v32.html"
V32 = "https://docs.sglang.io/cookbook/autoregressive/DeepSeek/DeepSeek-V3_2"
GLM = "https://docs.sglang.io/cookbook/autoregressive/GLM/GLM-5"
RBG = "https://docs.sglang.io/docs/references/multi_node_deployment/rbg_pd/deepseekv32_pd"
HISPARSE = "https://docs.sglang.io/docs/advanced_features/hisparse_guide"

NO_EXPERTS = "pass --ep-size 1"
ASK = ", or set NSA_BACKEND_ROUND_GRAPH=1"
DEEPEP = f"{NO_EXPERTS} and drop --moe-a2a-backend"
SPARSE = {"decode": "flashmla_sparse", "prefill": "flashmla_sparse"}
ON_FP8 = {"decode": "flashmla_kv", "prefill": "flashmla_kv"}
INDEX_CACHE = "FFSFSSSFSSFFFSSSFFFSFSSSSSSFFSFFSFFSSFFFFFFSFFFFFSFFSSSSSSFSFFFSFSSSFSFFSFFSSS"

RECIPES = {
    "DeepSeek-V3.2, DP attention": Recipe(GUIDE, "8 H200", "DeepSeek-V3.2", DP, alike(Served())),
    "DeepSeek-V3.2, DP attention and expert parallel": Recipe(
        GUIDE, "8 H200", "DeepSeek-V3.2", f"{DP} --ep 8", alike(Served())
    ),
    "DeepSeek-V3.2, tensor parallel": Recipe(GUIDE, "8 H200", "DeepSeek-V3.2", "--tp 8", alike(Served())),
    "DeepSeek-V3.2, DP attention, MTP": Recipe(GUIDE, "8 H200", "DeepSeek-V3.2", DP + drafts(3), rounds(3, NO_DP)),
    "DeepSeek-V3.2, tensor parallel, MTP": Recipe(GUIDE, "8 H200", "DeepSeek-V3.2", "--tp 8" + drafts(3), rounds(3, "")),
    "DeepSeek-V3.2, tensor parallel, the least MTP": Recipe(
        GUIDE, "8 H200", "DeepSeek-V3.2", "--tp 8" + drafts(1), rounds(1, "")
    ),
    "DeepSeek-V3.2, DP attention, expert parallel, MTP": Recipe(
        V32,
        "8 H200",
        "DeepSeek-V3.2",
        f"{DP} --ep 8" + drafts(3),
        {NEW: Served(steps=3, three=NO_EXPERTS + ASK), OLD: Served(steps=3, three=f"{NO_EXPERTS} and {NO_DP}")},
    ),
    "DeepSeek-V3.2, prefill server of a pair": Recipe(
        GUIDE,
        "8 H200",
        "DeepSeek-V3.2",
        f"{DP} --disaggregation-mode prefill --disaggregation-bootstrap-port 8998 --trust-remote-code "
        "--mem-fraction-static 0.9",
        alike(Served()),
    ),
    "DeepSeek-V3.2, decode server of a pair": Recipe(
        GUIDE,
        "8 H200",
        "DeepSeek-V3.2",
        f"--disaggregation-mode decode {DP} --trust-remote-code --mem-fraction-static 0.9",
        alike(Served()),
    ),
    "DeepSeek-V3.2, prefill context parallel in blocks": Recipe(
        V32,
        "8 H200",
        "DeepSeek-V3.2",
        "--tp 8 --ep 8 --dp 2 --enable-dp-attention --enable-dsa-prefill-context-parallel --attn-cp-size 4 "
        "--dsa-prefill-cp-mode in-seq-split --max-running-requests 32",
        {
            NEW: Stopped("DeepSeek V3.2 prefill CP does not support --cp-strategy zigzag; use interleave."),
            OLD: older_divides(DIVIDES, "--attn-cp-size 4", "--dsa-prefill-cp-mode in-seq-split"),
        },
    ),
    "DeepSeek-V3.2, prefill context parallel, interleaved": Recipe(
        V32,
        "8 H200",
        "DeepSeek-V3.2",
        "--tp 8 --enable-dsa-prefill-context-parallel --attn-cp-size 8 --dsa-prefill-cp-mode round-robin-split "
        "--max-running-requests 32",
        {NEW: Served(), OLD: older_divides(DIVIDES, "--attn-cp-size 8", IN_TURN)},
    ),
    "DeepSeek-V3.2, two nodes, DP attention of eight GPUs each, MTP": Recipe(
        V32,
        "16 Hopper",
        "DeepSeek-V3.2",
        "--nccl-init 10.0.0.1:5000 --nnodes 2 --node-rank 0 --tp 16 --dp 2 --enable-dp-attention --page-size 64 "
        "--trust-remote-code --log-requests --context-length 65536 --max-running-requests 128 --allow-auto-truncate "
        "--enable-metrics" + drafts(2),
        rounds(2, NO_DP),
    ),
    "DeepSeek-V3.2, prefill context parallel, pipeline and expert parallel": Recipe(
        V32,
        "16 Hopper",
        "DeepSeek-V3.2",
        "--nccl-init 10.0.0.1:5000 --nnodes 2 --node-rank 0 --tp 8 --pp-size 2 --dp 1 --enable-dp-attention "
        "--moe-a2a-backend deepep --ep-size 16 --page-size 128 --chunked-prefill-size 16384 --attention-backend dsa "
        "--dsa-prefill-backend flashmla_sparse --dsa-decode-backend flashmla_sparse --enable-dsa-prefill-context-parallel "
        "--dsa-prefill-cp-mode round-robin-split --cuda-graph-max-bs 128 --max-running-requests 128 --trust-remote-code "
        "--log-requests --context-length 65536 --allow-auto-truncate --enable-metrics",
        {NEW: Served(**SPARSE), OLD: older_divides(DIVIDES, IN_TURN, then=Served(**SPARSE))},
    ),
    "DeepSeek-V3.2, prefill context parallel and pipeline parallel on FP8 KV": Recipe(
        V32,
        "16 Hopper",
        "DeepSeek-V3.2",
        "--nccl-init 10.0.0.1:5000 --nnodes 2 --node-rank 0 --tp 8 --pp-size 2 --pp-async-batch-depth 1 --dp 1 "
        "--enable-dp-attention --trust-remote-code --log-requests --context-length 65536 --max-running-requests 128 "
        "--enable-dsa-prefill-context-parallel --dsa-prefill-cp-mode round-robin-split --kv-cache-dtype fp8_e4m3 "
        "--allow-auto-truncate --enable-metrics",
        {NEW: Served(**ON_FP8), OLD: older_divides(DIVIDES, IN_TURN, then=Served(**ON_FP8))},
    ),
    "DeepSeek-V3.2 on Kubernetes, prefill server with DeepEP": Recipe(
        RBG,
        "8 Hopper",
        "DeepSeek-V3.2",
        "--trust-remote-code --disable-radix-cache --chunked-prefill-size 131072 --page-size 64 "
        "--ep-dispatch-algorithm dynamic --eplb-algorithm deepseek --enable-dp-lm-head --enable-dp-attention --dp-size 8 "
        "--moe-a2a-backend deepep --deepep-mode normal --disaggregation-mode prefill --mem-fraction-static 0.8 "
        "--max-prefill-tokens 32768 --context-length 32768 --tp 8 --ep-num-redundant-experts 32 --moe-dense-tp-size 1 "
        "--max-running-requests 1024",
        alike(Served()),
    ),
    "DeepSeek-V3.2 on Kubernetes, decode server with DeepEP": Recipe(
        RBG,
        "8 Hopper",
        "DeepSeek-V3.2",
        "--trust-remote-code --chunked-prefill-size 131072 --prefill-round-robin-balance --eplb-rebalance-layers-per-chunk "
        "29 --page-size 64 --enable-dp-attention --enable-dp-lm-head --dp-size 8 --moe-a2a-backend deepep "
        "--deepep-mode low_latency --disaggregation-mode decode --mem-fraction-static 0.8 --context-length 32768 "
        "--max-running-requests 2048 --tp-size 8 --cuda-graph-max-bs 16 --ep-num-redundant-experts 32 --moe-dense-tp-size 1",
        alike(Served()),
    ),
    "GLM-5, low latency": Recipe(
        GLM,
        "8 H200",
        "GLM-5",
        "--tp 8 --enable-flashinfer-allreduce-fusion --mem-fraction-static 0.85" + drafts(3),
        rounds(3, ""),
    ),
    "GLM-5, balanced": Recipe(
        GLM,
        "8 H200",
        "GLM-5",
        "--tp 8 --enable-flashinfer-allreduce-fusion --mem-fraction-static 0.85" + drafts(1),
        rounds(1, ""),
    ),
    "GLM-5 in bfloat16, two nodes": Recipe(
        GLM, "16 H200", "GLM-5", f"--tp 16 {TWO_NODES} --mem-fraction-static 0.85" + drafts(3), rounds(3, "")
    ),
    "GLM-5 in bfloat16, four nodes": Recipe(
        GLM,
        "32 H100",
        "GLM-5",
        "--tp 32 --nnodes 4 --node-rank 0 --dist-init-addr 10.0.0.1:5000 --mem-fraction-static 0.85" + drafts(3),
        rounds(3, ""),
    ),
    "GLM-5 with IndexCache": Recipe(
        GLM,
        "8 H200",
        "GLM-5",
        f"""--tp 8 --json-model-override-args '{{"index_topk_pattern": "{INDEX_CACHE}"}}'""" + drafts(3),
        rounds(3, ""),
    ),
    "GLM-5.1, low latency": Recipe(
        GLM + ".1",
        "8 H200",
        "GLM-5",
        "--tp 8 --mem-fraction-static 0.85" + drafts(3),
        rounds(3, ""),
        {"SGLANG_ENABLE_SPEC_V2": "1"},
    ),
    "GLM-5.1, high throughput": Recipe(
        GLM + ".1", "8 H200", "GLM-5", f"{DP} --mem-fraction-static 0.85" + drafts(3), rounds(3, NO_DP)
    ),
    "GLM-5.1 on H100, low latency": Recipe(
        GLM + ".1", "16 H100", "GLM-5", f"--tp 16 {TWO_NODES} --mem-fraction-static 0.85" + drafts(3), rounds(3, "")
    ),
    "GLM-5.1 on H100, high throughput": Recipe(
        GLM + ".1",
        "16 H100",
        "GLM-5",
        f"--tp 16 {TWO_NODES} --dp 16 --enable-dp-attention --mem-fraction-static 0.85" + drafts(3),
        rounds(3, NO_DP),
    ),
    "GLM-5.2 and GLM-5.3, low latency": Recipe(
        GLM + ".2", "8 H200", "GLM-5.2", "--tp 8 --mem-fraction-static 0.8" + drafts(5), rounds(5, "")
    ),
    "GLM-5.2 and GLM-5.3, balanced": Recipe(
        GLM + ".2",
        "8 H200",
        "GLM-5.2",
        f"{DP} --moe-a2a-backend deepep --mem-fraction-static 0.85 --chunked-prefill-size 32768 --max-running-requests 256"
        + drafts(1),
        {NEW: Served(steps=1, three=DEEPEP), OLD: Served(steps=1, three=f"{DEEPEP} and {NO_DP}")},
    ),
    "GLM-5.2 and GLM-5.3, high throughput": Recipe(
        GLM + ".2",
        "8 H200",
        "GLM-5.2",
        f"{DP} --moe-a2a-backend deepep --mem-fraction-static 0.85 --max-running-requests 256",
        alike(Served()),
    ),
    "GLM-5.2 in bfloat16, two nodes": Recipe(
        GLM + ".2", "16 H200", "GLM-5.2", f"--tp 16 {TWO_NODES} --mem-fraction-static 0.85" + drafts(5), rounds(5, "")
    ),
    "GLM-5.2, prefill context parallel": Recipe(
        GLM + ".2",
        "8 H200",
        "GLM-5.2",
        "--tp 8 --attn-cp-size 8 --enable-dsa-prefill-context-parallel --dsa-prefill-cp-mode round-robin-split",
        {NEW: Served(), OLD: older_divides(DIVIDES, "--attn-cp-size 8", IN_TURN)},
    ),
    "GLM-5.2, HiCache": Recipe(
        GLM + ".2",
        "8 H200",
        "GLM-5.2",
        "--tp 8 --mem-fraction-static 0.8 --enable-hierarchical-cache --hicache-ratio 2 --hicache-write-policy write_through"
        + drafts(5),
        rounds(5, ""),
    ),
    "decode server with HiSparse": Recipe(
        HISPARSE,
        "8 Hopper",
        "GLM-5",
        "--trust-remote-code --context-length 81920 --tp-size 8 --dp-size 8 --enable-dp-attention --mem-fraction-static 0.85 "
        "--disable-radix-cache --disaggregation-mode decode --enable-hisparse "
        """--hisparse-config '{"top_k": 2048, "device_buffer_size": 6144, "host_to_device_ratio": 10}'""",
        alike(Refused("does not serve --enable-hisparse: KV that has left the GPU", ("--enable-hisparse",), Served())),
    ),
}
