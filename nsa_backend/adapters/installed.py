"""The adapter of the installed SGLang. Nothing outside this package imports `sglang`, the demo and `testing` aside."""

from __future__ import annotations

from nsa_backend.adapters.contract import Adapter
from nsa_backend.releases import SUPPORTED, generation_of, installed


def _adapter() -> Adapter:
    generation = generation_of(installed())
    if generation is None:
        raise ImportError(f"nsa_backend supports SGLang {SUPPORTED}, and this is {installed()}")
    if generation.adapter == "dsa":
        from nsa_backend.adapters.dsa.adapter import DsaAdapter

        return DsaAdapter()
    from nsa_backend.adapters.nsa.adapter import NsaAdapter

    return NsaAdapter()


adapter = _adapter()
