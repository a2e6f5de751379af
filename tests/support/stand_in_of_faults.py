"""A small process in place of a server that faults of a soak run are about: it has a rank, and ends with it.

python tests/support/stand_in_of_faults.py PORT
"""

import subprocess
import sys
import threading
import time

import stand_in_server


class Handler(stand_in_server.Handler):
    def do_POST(self):
        try:
            asked = self.body()
            count = asked["sampling_params"]["max_new_tokens"]
            if not 0 <= count < 10**6:
                raise ValueError
        except ValueError:
            self.send_response(400)
            self.end_headers()
            return
        if asked["rid"].startswith("fatal"):
            time.sleep(30)
        self.answer({"output_ids": [7] * count, "meta_info": {"finish_reason": {"type": "length"}}})


if __name__ == "__main__":
    rank = subprocess.Popen(["sglang::scheduler", "-c", "import time; time.sleep(60)"], executable=sys.executable)
    threading.Thread(target=stand_in_server.listening(int(sys.argv[1]), Handler).serve_forever, daemon=True).start()
    sys.stdout.write("serving\n")
    sys.stdout.flush()
    rank.wait()
