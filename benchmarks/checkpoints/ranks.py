"""One rank of a released model as a checkpoint: all its layers and its MTP layer, in the sizes that one GPU of eight serves.

`v3.2-tp8`, `glm-5.1-tp8` and `glm-5.2-tp8` are ranks of tensor parallel 8: heads, intermediate sizes and vocabulary are divided
by eight, while latent projections, router and indexer are whole on every rank. `v3.2-dp8` and `glm-5.1-dp8` are ranks of DP
attention with experts divided by eight: all heads, 32 experts of the full size, and the dense layers whole. A token chooses 8
of these 32, so that a batch gives the experts of the rank as many rows as eight such batches give them in a deployment.

What a rank lacks is what ranks do together: no all-reduce, no exchange between experts. Its weights are random (`rank_server`).
Several ranks of tensor parallel 8 are one checkpoint too, for a server of as many GPUs: the divided sizes times their number,
so that each GPU does what one of eight does, and the ranks exchange what they exchange. So are several of DP attention, whose
experts are divided among them: all eight are the released model.
`v3.2-tp8-20-layers` is a rank with its first 20 layers and the MTP layer, for a GPU that all of them do not fit.

Released sizes are those of `config.json` of deepseek-ai/DeepSeek-V3.2, zai-org/GLM-5.1-FP8 and zai-org/GLM-5.2-FP8;
transformers' `GlmMoeDsaConfig` has GLM-5's as its defaults. RoPE bases and context lengths are theirs too, and cost no time.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

MARK = "rank.json"
"""Beside config.json in the folder of a rank: its name."""

RANKS_OF_A_MODEL = 8
BLOCK = 128  # rows and columns of an 8-bit weight that share a scale
GIB = 1 << 30
RESERVED = 8 * GIB
"""CUDA context, activations of a prefill chunk, graphs, workspaces: what neither weights nor KV take."""

FP8_CONFIG = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK],
}  # fmt: skip

_BOTH = {
    "attention_bias": False, "bos_token_id": 0, "first_k_dense_replace": 3, "hidden_act": "silu", "index_head_dim": 128,
    "index_topk": 2048, "initializer_range": 0.02, "kv_lora_rank": 512, "moe_intermediate_size": 2048, "moe_layer_freq": 1,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1, "qk_rope_head_dim": 64, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "tie_word_embeddings": False, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
    "quantization_config": FP8_CONFIG,
}  # fmt: skip

_V32 = _BOTH | {
    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "eos_token_id": 1, "hidden_size": 7168,
    "index_n_heads": 64, "intermediate_size": 18432, "max_position_embeddings": 163840, "n_group": 8, "topk_group": 4,
    "num_attention_heads": 128, "num_hidden_layers": 61, "num_key_value_heads": 128, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000, "v_head_dim": 128, "vocab_size": 129280,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "quantization_config": FP8_CONFIG | {"scale_fmt": "ue8m0"},
}  # fmt: skip

_GLM_51 = _BOTH | {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "eos_token_id": [154820, 154827, 154829],
    "hidden_size": 6144, "index_n_heads": 32, "indexer_rope_interleave": True, "intermediate_size": 12288,
    "max_position_embeddings": 202752, "n_group": 1, "topk_group": 1, "num_attention_heads": 64, "num_hidden_layers": 78,
    "num_key_value_heads": 64, "q_lora_rank": 2048, "qk_nope_head_dim": 192, "rms_norm_eps": 1e-5, "rope_interleave": True,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "v_head_dim": 256, "vocab_size": 154880,
}  # fmt: skip

_GLM_52 = _GLM_51 | {
    "max_position_embeddings": 1048576, "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "index_topk_freq": 4, "index_skip_topk_offset": 3, "index_share_for_mtp_iteration": True,
}  # fmt: skip

_WITH_HEADS = ("num_attention_heads", "num_key_value_heads", "vocab_size")
_OF_TENSOR_PARALLEL = (*_WITH_HEADS, "intermediate_size", "moe_intermediate_size")
_OF_EXPERT_PARALLEL = ("n_routed_experts", "vocab_size")


@dataclass(frozen=True)
class Rank:
    """A released config.json, and the sizes that its ranks divide among them."""

    released: dict[str, Any]
    divided: tuple[str, ...]
    batches: tuple[int, ...] = (1, 8, 32)  # requests of one rank that are measured

    @property
    def config(self) -> dict[str, Any]:
        """config.json of the rank. The end of a text is token 1, which every vocabulary has."""
        return self.together(1)

    def together(self, count: int) -> dict[str, Any]:
        """config.json of `count` ranks, which tensor parallel divides among as many GPUs."""
        sizes = {name: count * (self.released[name] // RANKS_OF_A_MODEL) for name in self.divided}
        return self.released | sizes | {"eos_token_id": 1}

    @property
    def deployments(self) -> tuple[str, ...]:
        """Words of `--parallel` that divide `together` into ranks like this one; others would divide something else too."""
        return TOGETHER if self.divided == _OF_TENSOR_PARALLEL else WITH_EXPERTS_DIVIDED


RANKS = {
    "v3.2-tp8": Rank(_V32, _OF_TENSOR_PARALLEL),
    "v3.2-dp8": Rank(_V32, _OF_EXPERT_PARALLEL, (8, 64, 128)),
    "glm-5.1-tp8": Rank(_GLM_51, _OF_TENSOR_PARALLEL),
    "glm-5.1-dp8": Rank(_GLM_51, _OF_EXPERT_PARALLEL, (8, 64)),
    "glm-5.2-tp8": Rank(_GLM_52, _OF_TENSOR_PARALLEL),
}
"""By the name that `--checkpoint` takes; `named` takes one with fewer layers too."""

_FEWER_LAYERS = re.compile(r"(.+)-([1-9]\d*)-layers")

_SEVERAL = 2, 4, RANKS_OF_A_MODEL
TOGETHER = tuple(f"{kind}{count}" for kind in ("tp", "dcp") for count in _SEVERAL)
"""Words of `--parallel` that make several ranks of tensor parallel 8 one server."""
WITH_EXPERTS_DIVIDED = tuple(f"dp{count}-ep" for count in _SEVERAL)
"""The same of ranks of DP attention."""


def named(name: str) -> Rank | None:
    """The rank called `name`, of all its layers or of so many; None where `name` is no rank.

    Raises:
        SystemExit: the released model has fewer layers than `name` says.
    """
    if name in RANKS:
        return RANKS[name]
    found = _FEWER_LAYERS.fullmatch(name)
    if found is None or found[1] not in RANKS:
        return None
    whole, layers = RANKS[found[1]], int(found[2])
    if layers > (most := whole.released["num_hidden_layers"]):
        raise SystemExit(f"--checkpoint {name} has more layers than {found[1]}, which has {most}: name at most so many")
    return replace(whole, released=whole.released | {"num_hidden_layers": layers})


def check_release(name: str) -> None:
    """End where the installed release would serve another model than the rank's.

    Raises:
        SystemExit: layers share selections in another way there.
    """
    from sglang.srt.configs import model_config

    shared = named(name).released.get("index_topk_freq", 1) > 1
    if shared and not hasattr(model_config, "dsa_layer_skips_topk"):
        raise SystemExit(
            f"--checkpoint {name} has indexers in layers where SGLang {version('sglang')} has none: serve it with SGLang "
            "0.5.17 or newer, or take another rank"
        )


def write(out: Path, name: str, count: int = 1) -> Path:
    """Write config.json of `count` ranks into `out`, and no weights: SGLang draws them as it starts."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(named(name).together(count), indent=1))
    (out / MARK).write_text(json.dumps({"name": name}))
    return out


def rank_in(folder: Path) -> str | None:
    """Name of the rank in `folder`; None where a checkpoint brings its weights."""
    path = folder / MARK
    return json.loads(path.read_text())["name"] if path.exists() else None


def has_indexer(config: dict[str, Any], layer: int) -> bool:
    """Whether `layer` selects tokens; the MTP layer, which comes after the others, always does."""
    after = max(layer - config.get("index_skip_topk_offset", 2) + 1, 0)
    return layer >= config["num_hidden_layers"] or after % config.get("index_topk_freq", 1) == 0


def tensors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """(name in a released checkpoint, shape, whether it has 8 bits a value) of every weight; scales of 8-bit ones are left out.

    Of a released config these are the shapes of its safetensors, of a rank's the shapes that a rank keeps of them.
    """
    hidden, vocab, layers = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    yield "model.embed_tokens.weight", (vocab, hidden), False
    yield "model.norm.weight", (hidden,), False
    yield "lm_head.weight", (vocab, hidden), False
    for layer in range(layers + 1):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{norm}.weight", (hidden,), False
        for name, shape, eight_bit in _attention(config, has_indexer(config, layer)):
            yield f"{prefix}self_attn.{name}", shape, eight_bit
        for name, shape, eight_bit in _feed_forward(config, layer):
            yield f"{prefix}mlp.{name}", shape, eight_bit
    mtp = f"model.layers.{layers}."
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        yield f"{mtp}{norm}.weight", (hidden,), False
    yield f"{mtp}eh_proj.weight", (hidden, 2 * hidden), False
    yield f"{mtp}embed_tokens.weight", (vocab, hidden), False
    yield f"{mtp}shared_head.head.weight", (vocab, hidden), False


def _attention(config: dict[str, Any], selects: bool) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    hidden, heads, latent = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    query, rope, nope, value = (config[name] for name in ("q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    yield "q_a_proj.weight", (query, hidden), True
    yield "q_a_layernorm.weight", (query,), False
    yield "q_b_proj.weight", (heads * (nope + rope), query), True
    yield "kv_a_proj_with_mqa.weight", (latent + rope, hidden), True
    yield "kv_a_layernorm.weight", (latent,), False
    yield "kv_b_proj.weight", (heads * (nope + value), latent), True
    yield "o_proj.weight", (hidden, heads * value), True
    if selects:
        index, index_heads = config["index_head_dim"], config["index_n_heads"]
        yield "indexer.wq_b.weight", (index_heads * index, query), True
        yield "indexer.wk.weight", (index, hidden), True
        yield "indexer.k_norm.weight", (index,), False
        yield "indexer.k_norm.bias", (index,), False
        yield "indexer.weights_proj.weight", (index_heads, hidden), False


def _feed_forward(config: dict[str, Any], layer: int) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    hidden, wide, narrow = config["hidden_size"], config["intermediate_size"], config["moe_intermediate_size"]
    if layer < config["first_k_dense_replace"]:
        groups = {"": wide}
    else:
        yield "gate.weight", (config["n_routed_experts"], hidden), False
        yield "gate.e_score_correction_bias", (config["n_routed_experts"],), False
        groups = {f"experts.{expert}.": narrow for expert in range(config["n_routed_experts"])}
        groups["shared_experts."] = narrow * config["n_shared_experts"]
    for prefix, size in groups.items():
        yield f"{prefix}gate_proj.weight", (size, hidden), True
        yield f"{prefix}up_proj.weight", (size, hidden), True
        yield f"{prefix}down_proj.weight", (hidden, size), True


def scales(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the float32 scales of an 8-bit weight."""
    return tuple(-(-size // BLOCK) for size in shape)


def weight_bytes(config: dict[str, Any], context_ranks: int = 1) -> int:
    """Of all weights and scales, and of the copies of kv_b_proj in bfloat16 that the absorbed products read.

    Several `context_ranks` lay the query's projection of all of them on each, as SGLang does unless told otherwise.
    """
    total, copies = 0, context_ranks * (context_ranks > 1)
    for name, shape, eight_bit in tensors(config):
        size = math.prod(shape) + 4 * math.prod(scales(shape)) if eight_bit else 2 * math.prod(shape)
        total += size * (1 + copies * name.endswith("q_b_proj.weight"))
        if name.endswith("kv_b_proj.weight"):
            absorbed = config["num_attention_heads"] * config["qk_nope_head_dim"] * config["kv_lora_rank"]
            total += 2 * math.prod(shape) + copies * 2 * absorbed
    return total


def kv_bytes_a_token(config: dict[str, Any], context_ranks: int = 1) -> float:
    """Of the latent cache in bfloat16 and of index keys in 8 bits with a float32 scale, over all layers and the MTP layer.

    `context_ranks` divide the latent cache of the target; index keys and the MTP layer's cache lie whole on each of them.
    """
    layers = range(config["num_hidden_layers"] + 1)
    latent = 2 * (config["kv_lora_rank"] + config["qk_rope_head_dim"])
    index = config["index_head_dim"] + 4
    divided = latent * config["num_hidden_layers"] / context_ranks
    return divided + latent + index * sum(has_indexer(config, layer) for layer in layers)


def needed_bytes(name: str, tokens: int, context_ranks: int = 1) -> int:
    """Memory of each GPU of a server with room for so many tokens.

    However many ranks the server has, a GPU holds the weights of one. Tensor parallel divides no KV; `context_ranks` do.
    """
    kv = math.ceil(tokens * kv_bytes_a_token(named(name).config, context_ranks))
    return _weight_bytes_of(name, context_ranks) + kv + RESERVED


@cache
def _weight_bytes_of(name: str, context_ranks: int) -> int:
    return weight_bytes(named(name).config, context_ranks)


def check_fits(name: str, tokens: int, there: int, context_ranks: int = 1) -> None:
    """End before any weight is made where a GPU of `there` bytes is too small.

    Raises:
        SystemExit: with what the rank needs and what there is.
    """
    config, needed = named(name).config, needed_bytes(name, tokens, context_ranks)
    if needed > there:
        weights, kv = _weight_bytes_of(name, context_ranks), tokens * kv_bytes_a_token(config, context_ranks)
        raise SystemExit(
            f"--checkpoint {name} needs {needed / GIB:.1f} GiB, {weights / GIB:.1f} of them for weights and "
            f"{kv / GIB:.1f} for {tokens} tokens, and this GPU has {there / GIB:.1f} GiB: "
            "take fewer or shorter prompts, or a larger GPU"
        )
