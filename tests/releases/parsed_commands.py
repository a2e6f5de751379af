"""Parse server commands as the launcher of the installed release does, in a process of its own, with the plugin or without.

    python tests/releases/parsed_commands.py [--refusals] < COMMANDS.json > PARSED.json

A command is what follows `python -m sglang.launch_server`. Whether the plugin serves is up to NSA_BACKEND_DISABLE. One
that is refused ends the process with its error; with --refusals the answer for a command is that error, or null.
"""

from __future__ import annotations

import json
import sys

from nsa_backend.testing.process import start_process

start_process()

import torch  # noqa: E402
from sglang.srt.plugins import load_plugins  # noqa: E402
from sglang.srt.server_args import ServerArgs, prepare_server_args  # noqa: E402

from nsa_backend.adapters.installed import adapter  # noqa: E402
from nsa_backend.releases import round_graph_problem  # noqa: E402


def graphs(args: ServerArgs) -> dict[str, list[int] | None]:
    """Batch sizes of decode graphs, tokens of prefill graphs (None: the release captures none of this model)."""
    config = getattr(args, "cuda_graph_config", None)
    if config is None:
        return {"decode": args.cuda_graph_bs, "prefill": None if args.disable_piecewise_cuda_graph else []}
    return {"decode": config.decode.bs, "prefill": config.prefill.bs}


def attention_ranks(args: ServerArgs) -> int:
    """Ranks of DP attention, 1 without, by either of the names that releases have for them."""
    return getattr(args, "attn_dp_size", None) or (args.dp_size if args.enable_dp_attention else 1)


def against_one_graph(args: ServerArgs) -> list[str] | None:
    """What to change for rounds in one graph; None on a release that has none."""
    if round_graph_problem() is not None:
        return None
    from nsa_backend.adapters.dsa.rounds.served import changes_needed

    return changes_needed(args)


def checked(words: list[str]) -> ServerArgs:
    """Parsed, resolved and checked, as all of SGLang's processes are before weights load."""
    server_args = prepare_server_args([*words, "--device", "cuda"])
    if hasattr(server_args, "resolve_once"):
        server_args.resolve_once()
    server_args.check_server_args()
    return server_args


def refusal(words: list[str]) -> str | None:
    """What ends the start of this command, or None."""
    try:
        checked(words)
    except (ValueError, AssertionError) as error:
        return str(error)
    return None


def main() -> None:
    load_plugins()
    torch.cuda.get_device_capability = lambda *device: (9, 0)  # all that resolution asks of a GPU,
    torch.cuda.get_device_name = lambda *device: "NVIDIA H200"  # and the plugin of one that choices by rows may know
    commands = json.load(sys.stdin)
    if "--refusals" in sys.argv:
        json.dump([refusal(words) for words in commands], sys.__stdout__)
        return
    found = []
    for words in commands:
        server_args = checked(words)
        args = adapter.resolved(server_args)
        found.append(
            graphs(args)
            | {
                "backends": adapter.served_backends(server_args),
                "implementation": getattr(args, adapter.DECODE_ATTRIBUTE),
                "steps": args.speculative_num_steps,
                "max_total_tokens": args.max_total_tokens,
                "max_running_requests": args.max_running_requests,
                "tensor_parallel": args.tp_size,
                "attention_ranks": attention_ranks(args),
                "experts": args.ep_size,
                "stages": args.pp_size,
                "divided_prefill": getattr(args, "attn_cp_size", 1),
                "divided_context": adapter.context_ranks_of(args),
                "disaggregation": [
                    args.disaggregation_mode,
                    args.disaggregation_transfer_backend,
                    args.disaggregation_bootstrap_port,
                ],
                "first_gpu": args.base_gpu_id,
                "prefilled_at_once": args.chunked_prefill_size,
                "cache": not args.disable_radix_cache,
                "port": args.port,
                "against_one_graph": against_one_graph(args),
            }
        )
    json.dump(found, sys.__stdout__)


if __name__ == "__main__":
    main()
