"""What one engine of an end-to-end run is started with and held to."""

from __future__ import annotations

from dataclasses import dataclass, field

from packaging.specifiers import SpecifierSet

from nsa_backend.releases import generation_of, installed

FP8 = {"kv_cache_dtype": "fp8_e4m3", "nsa_prefill_backend": "flashmla_kv"}
TWO_GPUS = {"tp_size": 2, "disable_custom_all_reduce": True, "enforce_disable_flashinfer_allreduce_fusion": True}
"""All-reduce through NCCL alone: SGLang's fused one asks for NVLink multicast, which not every machine offers."""


@dataclass(frozen=True)
class Case:
    """One engine start. `floors` are the least mean accept length of a workload, as a share of N + 1."""

    name: str
    steps: int  # N; 0 without speculation
    workloads: tuple[str, ...]
    decode: str = "fa3"
    model: str = "deepseek-v3.2"  # a key of benchmarks/faithful_models.MODELS
    environment: dict[str, str] = field(default_factory=dict)
    builtin_environment: dict[str, str] | None = None  # where the built-in backend fails with `environment`
    engine: dict = field(default_factory=dict)
    floors: dict[str, float] = field(default_factory=dict)  # mean accept length over N + 1
    floor_of_all: float = 0.0  # least mean accept length of all requests of the case, over N + 1
    request_floors: dict[str, float] = field(default_factory=dict)  # the same for the worst request
    says: str = ""  # what our engine's log must have, beside that the backend is active
    gpus: int = 1
    spec_v1: bool = False  # gone from SGLang 0.5.13 on
    releases: str = ""  # of SGLang, those that can serve it, as a version specifier

    def runs_here(self) -> bool:
        """Whether the installed SGLang has what the case is about."""
        has_v1 = generation_of(installed()).adapter == "nsa"
        return (has_v1 or not self.spec_v1) and installed() in SpecifierSet(self.releases, prereleases=True)
