"""The defect the package exists for, to show what it costs: every draft step attends with the length L of the round."""

from __future__ import annotations

from nsa_backend.kernels.plan import MetadataPlan, plan_decode
from nsa_backend.multi_step import NativeSparseAttnMultiStepBackend


class SharedLengthMultiStepBackend(NativeSparseAttnMultiStepBackend):
    """What SGLang gives its draft steps (to 0.5.23 at least); a draft token sees neither itself nor the drafts before it."""

    def plan(self, num_requests: int) -> MetadataPlan:
        return plan_decode(num_requests)
