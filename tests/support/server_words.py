"""Words of server commands that many tests type."""

from nsa_backend.adapters.installed import adapter

OWN = ("--attention-backend", adapter.BACKEND_NAMES[0])
SPECULATIVE = (
    *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
)
"""Three drafts in a chain."""
