"""A small process in place of the prefill or the decode server of a pair: prints its options and what it is asked.

    python tests/support/stand_in_of_pair.py PORT OPTIONS...

More than 100 new tokens the prefill server refuses, and exactly 99 the decode server, while the other takes a minute.
"""

import json
import sys
import time
from itertools import pairwise

import stand_in_server

OPTION = dict(pairwise(sys.argv[2:]))
MODE = OPTION.get("--disaggregation-mode")


def say(row: dict) -> None:
    sys.stdout.write(f"{json.dumps(row)}\n")
    sys.stdout.flush()


class Handler(stand_in_server.Handler):
    def do_POST(self):
        body = self.body()
        say({"asked": body})
        tokens = body["sampling_params"]["max_new_tokens"]
        if tokens > 100 and MODE == "prefill":
            self.send_error(500)
            return
        if tokens == 99:
            if MODE == "decode":
                self.send_error(400)
                return
            time.sleep(60)
        answers = [{"index": i, "meta_info": {"completion_tokens": 7}} for i in range(len(body["input_ids"]))]
        if body.get("stream"):
            self.begin()
            self.wfile.write(b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in answers))
        else:
            self.answer(answers)


if __name__ == "__main__":
    say({"options": OPTION})
    stand_in_server.listening(int(sys.argv[1]), Handler).serve_forever()
