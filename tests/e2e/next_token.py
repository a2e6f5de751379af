"""The eight best next tokens of each prompt, with log-probabilities, from one forward without speculation.

    python tests/e2e/next_token.py CHECKPOINT CASE PROMPTS.json OUT.json [--port 31500]

Runs SGLang's built-in backend with the KV cache and the implementations of CASE, one prompt at a time.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from run_case import engine_arguments
from workloads import CASES, Case

OF_DECODE = ("cuda_graph_bs", "debug_cuda_graph", "max_total_tokens", "speculative_adaptive")

OF_SHARED_GPUS = (
    "attn_cp_size", "attn_dp_size", "cp_strategy", "dp_size", "enable_dp_attention", "enable_prefill_cp", "ep_size",
    "max_running_requests",
)  # fmt: skip

PLAIN = {"disaggregated": "", "action": "", "same": (), "dense_draft": False, "ranks_per_gpu": 1}


def question(case: Case) -> Case:
    """The case whose engine is asked about `case`: its prefill alone, so what only decoding reads is left out."""
    engine = {name: value for name, value in case.builtin_engine.items() if name not in OF_DECODE}
    if case.ranks_per_gpu > 1:  # one rank a GPU says as much of a prefill
        engine = {name: value for name, value in engine.items() if name not in OF_SHARED_GPUS} | {"tp_size": case.gpus}
    return replace(case, steps=0, engine=engine | {"disable_cuda_graph": True}, environment={}, **PLAIN)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("case", choices=[case.name for case in CASES])
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--port", type=int, default=31500)
    args = parser.parse_args()
    case = question(next(c for c in CASES if c.name == args.case))
    import sglang

    engine = sglang.Engine(**engine_arguments(case, args.checkpoint, args.port))
    sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
    best = []
    for prompt in json.loads(args.prompts.read_text()):
        answer = engine.generate(input_ids=prompt, sampling_params=sampling, return_logprob=True, top_logprobs_num=8)
        best.append([[value, token] for value, token, _ in answer["meta_info"]["output_top_logprobs"][0]])
    args.out.write_text(json.dumps(best))
    engine.shutdown()


if __name__ == "__main__":
    main()
