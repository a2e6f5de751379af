"""A small process in place of a server of a soak run; what it is asked goes to the file `asked` of its folder.

    python tests/support/stand_in_of_soak.py PORT SECONDS SIDE

Every answer is sevens, SECONDS before its first token and after it, unless an abort has come meanwhile.
"""

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import stand_in_server

PORT, DELAY, SIDE = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
aborted = set()


class Handler(stand_in_server.Handler):
    def do_GET(self):
        state = {"nsa_backend_rounds": {"greedy requests": 9}} if SIDE == "ours" else {}
        self.answer({"internal_states": [state]})

    def event(self, reason: str | None, ids: list[int], **meta) -> None:
        data = {"output_ids": ids, "meta_info": {"finish_reason": reason and {"type": reason}} | meta}
        self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())

    def do_POST(self):
        asked = self.body()
        with Path("asked").open("a") as seen:
            seen.write(f"{json.dumps([PORT, asked])}\n")
        if "sampling_params" not in asked:
            aborted.add(asked["rid"])
            self.begin()
            return
        count = asked["sampling_params"]["max_new_tokens"]
        meta = {"spec_correct_drafts_histogram": [0, 0, 0, (count + 3) // 4]}
        meta |= {"output_top_logprobs": [[[-1.0, 7, None], [-1.01, 8, None]]]}
        if not asked.get("stream"):
            self.answer({"output_ids": [7] * count, "meta_info": meta | {"finish_reason": {"type": "length"}}})
            return
        self.begin()
        time.sleep(DELAY)
        self.event(None, [7])
        time.sleep(DELAY)
        if asked["rid"] in aborted:
            self.event("abort", [7])
        else:
            self.event("length", [7] * count, **meta)
        self.wfile.write(b"data: [DONE]\n\n")

    def handle(self):
        with suppress(BrokenPipeError, ConnectionResetError):  # the stream was closed
            super().handle()


if __name__ == "__main__":
    if SIDE == "ours":
        os.write(1, b"nsa_backend 0.1.0 is active\n")  # at once: two servers have one log
    os.write(1, b"KV cache pool is full. Retract requests. #retracted_reqs: 2,\n")
    stand_in_server.listening(PORT, Handler).serve_forever()
