"""Print the two best next tokens of each prompt, with log-probabilities, from one forward without speculation.

python tests/e2e/next_token.py CHECKPOINT PROMPTS.json OUT.json
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from run_case import engine_arguments
from workloads import Case


def main() -> None:
    checkpoint, prompts, out = sys.argv[1:]
    import sglang

    engine = sglang.Engine(**engine_arguments(Case("judge", 0, (), engine={"disable_cuda_graph": True}), checkpoint, 39000))
    sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
    best = []
    for prompt in json.loads(Path(prompts).read_text()):
        answer = engine.generate(input_ids=prompt, sampling_params=sampling, return_logprob=True, top_logprobs_num=2)
        best.append([[value, token] for value, token, _ in answer["meta_info"]["output_top_logprobs"][0]])
    Path(out).write_text(json.dumps(best))
    engine.shutdown()


if __name__ == "__main__":
    main()
