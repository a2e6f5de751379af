"""The trained weights as a checkpoint that SGLang loads, and back again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from nsa_backend.benchmarks.faithful_checkpoint import stored
from nsa_backend.benchmarks.trained.model import TrainedModel
from nsa_backend.benchmarks.trained.shape import Shape, config


def tensors(model: TrainedModel) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint by name, in the dtype it is stored in.

    The MTP layer repeats embedding and head, which SGLang shares, and has routed experts that add nothing.
    """
    state = {name: value.detach().float().cpu() for name, value in model.state_dict().items()}
    shape, mtp = model.shape, f"model.layers.{model.shape.layers}."
    state[mtp + "embed_tokens.weight"] = state["model.embed_tokens.weight"].clone()
    state[mtp + "shared_head.head.weight"] = state["lm_head.weight"].clone()
    state[mtp + "mlp.gate.weight"] = torch.zeros(shape.experts, shape.hidden)
    state[mtp + "mlp.gate.e_score_correction_bias"] = torch.zeros(shape.experts)
    for expert in range(shape.experts):
        for part, size in (("gate_proj", (shape.expert_dim, shape.hidden)), ("up_proj", (shape.expert_dim, shape.hidden)),
                           ("down_proj", (shape.hidden, shape.expert_dim))):  # fmt: skip
            state[f"{mtp}mlp.experts.{expert}.{part}.weight"] = torch.zeros(size)
    return stored(state)


def write(model: TrainedModel, out: Path, tokenizer: Path | None = None) -> Path:
    """Write config.json, model.safetensors and a copy of the tokenizer into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors(model), str(out / "model.safetensors"), metadata={"format": "pt"})
    if tokenizer is not None:
        shutil.copy(tokenizer, out / "tokenizer.json")
        (out / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (out / "config.json").write_text(json.dumps(config(model.shape), indent=1))
    return out


def load(folder: Path, device: str, dtype: torch.dtype = torch.bfloat16) -> TrainedModel:
    """The trainer's model with the weights of a checkpoint that `write` made, rounded as they are served."""
    path = folder / "config.json"
    if not path.exists():
        raise FileNotFoundError(f"{folder} has no config.json: train a checkpoint with nsa_backend.benchmarks.train_checkpoint")
    read = json.loads(path.read_text())
    shape = Shape(
        vocab=read["vocab_size"], hidden=read["hidden_size"], layers=read["num_hidden_layers"],
        heads=read["num_attention_heads"], q_rank=read["q_lora_rank"], kv_rank=read["kv_lora_rank"],
        nope=read["qk_nope_head_dim"], rope=read["qk_rope_head_dim"], v_dim=read["v_head_dim"], mlp=read["intermediate_size"],
        index_heads=read["index_n_heads"], index_dim=read["index_head_dim"], index_topk=read["index_topk"],
        experts=read["n_routed_experts"], expert_dim=read["moe_intermediate_size"],
    )  # fmt: skip
    model = TrainedModel(shape, dtype)
    known = model.state_dict()
    state = {name: value.float() for name, value in load_file(str(folder / "model.safetensors")).items() if name in known}
    model.load_state_dict(state)
    return model.to(device).requires_grad_(False)
