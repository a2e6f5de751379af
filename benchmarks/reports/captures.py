"""What a server's log tells of its captures: SGLang's, our rounds in one graph and our prefills in one."""

from __future__ import annotations

import re

OF_SGLANG = re.compile(r"Capture ?(.*?) cuda graph end\..*?elapsed[=:] ?([\d.]+) s.*?mem usage=(-?[\d.]+) GB", re.IGNORECASE)
OF_ROUNDS = re.compile(r"captured whole speculative rounds of \[(.*?)\] (.+?) in ([\d.]+) s, (-?\d+) MiB")
OF_PREFILLS = re.compile(r"captured prefills of \[(.*?)\] tokens whole, (.+?), in ([\d.]+) s, (-?\d+) MiB")
OURS = {"whole rounds": OF_ROUNDS, "whole prefills": OF_PREFILLS}


def captures(log: str) -> list[dict]:
    """What a server's log tells of each capture, in its order: seconds, GiB, and of what is ours how many sizes.

    Whole prefills are captured within SGLang's of the target's prefills, whose seconds and GiB have theirs too.
    """
    found = []
    for line in log.splitlines():
        for what, said in OURS.items():
            if of_ours := said.search(line):
                sizes, kind, seconds, mib = of_ours.groups()
                found.append({"what": f"{what}, {kind}", "sizes": sizes.count(",") + 1})
                found[-1] |= {"seconds": float(seconds), "gib": round(int(mib) / 1024, 3)}
        if of_sglang := OF_SGLANG.search(line):
            what, seconds, gib = of_sglang.groups()
            found.append({"what": what or "target", "seconds": float(seconds), "gib": float(gib)})
    return found
