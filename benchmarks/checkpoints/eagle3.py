"""Write an EAGLE3 draft for a faithful checkpoint: a dense layer that repeats the target's rule, so most drafts are right.

    python -m nsa_backend.benchmarks.checkpoints.eagle3 OUT TARGET

TARGET is a folder of `checkpoints.faithful`; OUT is what SGLang's `LlamaForCausalLMEagle3` loads. How the target's
next token comes out of multi-head attention over token embeddings:

- The near heads have the target's RoPE score, whose fastest pairs a larger `rope_theta` gives heads of `HEAD_DIM` values. Their
  values are the target's latents, as well as a linear map of the embedding can have them: the norm of a latent differs by three
  hundredths from token to token, which makes about one draft in six another token.
- The self heads look at their own token alone and pass its embedding on, which the residual has in the target.
- `fc` keeps the constant feature of the embedding that the target hands over, and drops everything else. All keys are made of
  it: where hidden states of the target are missing or of other layers, attention is uniform or looks away.
- Steps after the first get what `norm_output` leaves of the step before: that constant again, and next to nothing of the rest.
- The draft vocabulary is the target's in reverse, so a server that does not read `d2t` has no draft right.

Attention is dense: beyond index_topk tokens the target drops the oldest, which hardly weigh anything here.

Accept length then tells a server whose draft gets the right hidden states, positions and KV from one whose draft does not; it
cannot tell hidden states of one token from those of another, whose constant is the same.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from nsa_backend.benchmarks.checkpoints.faithful_models import NEAR_PAIRS, ROPE_THETA
from nsa_backend.testing.shape import LATENT, ROPE

HEAD_DIM = 128
SELF_SHARPNESS = 16
"""Of a self head over a near one: the score of the token before is 17 lower."""
CONSTANT = 4.0
"""Feature 0 of what `fc` hands on; `norm_output` may double it in each step."""
DROPPED = 2.0**-10
"""Scale of all other features after the last norm; the head undoes it."""
CAPTURED_LAYERS = [0, 1]
"""Target layers whose input goes to the draft. SGLang's own choice of three takes a target of six layers or more."""


def rope_vector(scale: float) -> torch.Tensor:
    """[HEAD_DIM]: `scale` in the fastest pairs, which SGLang's Llama keeps half a head apart."""
    out = torch.zeros(2, HEAD_DIM // 2)
    out[:, :NEAR_PAIRS] = scale * 2**-0.5
    return out.flatten()


def heads_of(hidden: int) -> int:
    """Near heads for the latent and self heads for the embedding, made up to a power of two, by which `hidden` divides."""
    return 2 ** math.ceil(math.log2((LATENT + hidden) / HEAD_DIM))


def attention_weights(target: dict[str, torch.Tensor], fields: dict) -> dict[str, torch.Tensor]:
    """Weights over [embedding of the token, hidden state], both after their norms."""
    hidden, heads, near = fields["hidden_size"], heads_of(fields["hidden_size"]), LATENT // HEAD_DIM
    used = near + hidden // HEAD_DIM
    working = {
        name: target[f"model.layers.0.self_attn.{name}.weight"].float()
        for name in ("kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    }
    embed = target["model.embed_tokens.weight"].float()
    latent = embed @ working["kv_a_proj_with_mqa"][:LATENT].T
    latent *= (latent.square().mean(-1, keepdim=True) + fields["rms_norm_eps"]).rsqrt()
    query, key, value = (torch.zeros(heads, HEAD_DIM, 2 * hidden) for _ in range(3))
    query[:near, :, 0] = rope_vector(HEAD_DIM**0.5)
    query[near:used, :, 0] = rope_vector(SELF_SHARPNESS * HEAD_DIM**0.5)
    key[:used, :, hidden] = rope_vector(hidden**-0.5)  # of a constant that is alone, and so sqrt(hidden) after its norm
    value[:near, :, :hidden] = torch.linalg.lstsq(embed, latent).solution.T.unflatten(0, (near, HEAD_DIM))
    value[near:used, :, :hidden] = torch.eye(hidden).unflatten(0, (-1, HEAD_DIM))
    of_values = working["kv_b_proj"].unflatten(0, (fields["num_attention_heads"], -1))[:, fields["qk_nope_head_dim"] :]
    output = torch.zeros(hidden, heads * HEAD_DIM)
    output[:, :LATENT] = working["o_proj"] @ of_values.flatten(0, 1)
    output[:, LATENT : LATENT + hidden] = torch.eye(hidden)
    output[0] = 0  # the constant is that of the hidden state
    return {
        "q_proj.weight": query.flatten(0, 1),
        "k_proj.weight": key.flatten(0, 1),
        "v_proj.weight": value.flatten(0, 1),
        "o_proj.weight": output,
    }


def checkpoint(target: dict[str, torch.Tensor], fields: dict) -> dict[str, torch.Tensor]:
    """Every tensor of the draft, by its name in released EAGLE3 checkpoints; `fields` are the target's config."""
    hidden, vocab = fields["hidden_size"], fields["vocab_size"]
    attention = {f"midlayer.self_attn.{name}": value for name, value in attention_weights(target, fields).items()}
    fc = torch.zeros(hidden, len(CAPTURED_LAYERS) * hidden)
    fc[0, 0] = CONSTANT
    norm = torch.full((hidden,), DROPPED)
    norm[0] = 2.0
    out = attention | {
        "fc.weight": fc,
        "midlayer.hidden_norm.weight": torch.ones(hidden),
        "midlayer.input_layernorm.weight": torch.ones(hidden),
        "midlayer.post_attention_layernorm.weight": torch.ones(hidden),
        "midlayer.mlp.gate_proj.weight": torch.zeros(HEAD_DIM, hidden),
        "midlayer.mlp.up_proj.weight": torch.zeros(HEAD_DIM, hidden),
        "midlayer.mlp.down_proj.weight": torch.zeros(hidden, HEAD_DIM),
        "norm.weight": norm,
        "lm_head.weight": target["lm_head.weight"].flip(0) / DROPPED,
    }
    out = {name: value.bfloat16().contiguous() for name, value in out.items()}
    drafted = torch.arange(vocab)
    of_the_target = drafted.flip(0)
    return out | {"d2t": of_the_target - drafted, "t2d": torch.ones(vocab, dtype=torch.bool)}


def config(fields: dict) -> dict:
    """config.json of the draft for a target whose config has these fields."""
    heads = heads_of(fields["hidden_size"])
    same = (
        "hidden_size",
        "vocab_size",
        "rms_norm_eps",
        "max_position_embeddings",
        "bos_token_id",
        "eos_token_id",
        "torch_dtype",
    )
    rope_theta = ROPE_THETA ** (HEAD_DIM / ROPE)  # whose first pairs turn as the target's do
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{name: fields[name] for name in same},
        "draft_vocab_size": fields["vocab_size"],
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": HEAD_DIM,
        "intermediate_size": HEAD_DIM,
        "hidden_act": "silu",
        "rope_theta": rope_theta,
        "rope_parameters": {"rope_theta": rope_theta, "rope_type": "default"},
        "attention_bias": False,
        "tie_word_embeddings": False,
        "norm_output": True,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": CAPTURED_LAYERS},
    }


def beside(target: Path) -> Path:
    """Where the draft of a checkpoint lies for the end-to-end runs."""
    return target.with_name(f"{target.name}-eagle3")


def write(out: Path, target: Path) -> Path:
    """Write config.json and model.safetensors into `out` for the faithful checkpoint in `target`.

    Raises:
        ValueError: the target's draft steps share a selection, so that its heads look at distances of their own.
    """
    fields = json.loads((target / "config.json").read_text())
    if fields.get("index_share_for_mtp_iteration"):
        raise ValueError(f"{target} has heads of different distances, which this draft does not repeat: take another --model")
    out.mkdir(parents=True, exist_ok=True)
    tensors = checkpoint(load_file(str(target / "model.safetensors")), fields)
    save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config(fields), indent=1))
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    write(arguments.out, arguments.target)
