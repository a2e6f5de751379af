"""What one engine of an end-to-end run is started with and held to."""

from __future__ import annotations

from dataclasses import dataclass, field

from packaging.specifiers import SpecifierSet

from nsa_backend.releases import generation_of, installed


def workload_of(name: str) -> str:
    """The workload of a name in `Case.measured`."""
    return name.split(", ")[0]


@dataclass(frozen=True)
class Case:
    """One engine start. `floors` are the least mean accept length of a workload, as a share of N + 1."""

    name: str
    steps: int  # N; 0 without speculation
    workloads: tuple[str, ...]
    decode: str = "fa3"
    model: str = "deepseek-v3.2"  # a key of benchmarks/faithful_models.MODELS
    shape: str = "faithful"  # a key of checkpoints.faithful.ALL_SHAPES
    environment: dict[str, str] = field(default_factory=dict)
    builtin_environment: dict[str, str] | None = None  # where the built-in backend fails with `environment`
    engine: dict = field(default_factory=dict)
    ours_alone: tuple[str, ...] = ()  # options of it that the built-in backend cannot serve, and is started without
    dense_draft: bool = False  # EAGLE3, with the draft that benchmarks/checkpoints/eagle3.py writes beside the checkpoint
    floors: dict[str, float] = field(default_factory=dict)  # mean accept length over N + 1
    floor_of_all: float = 0.0  # least mean accept length of all requests of the case, over N + 1
    request_floors: dict[str, float] = field(default_factory=dict)  # the same for the worst request
    says: str = ""  # what our engine's log must have, beside that the backend is active
    says_times: int = 1  # how often at least
    never_says: str = ""  # what it must not have
    replays: str = ""  # the kind of rounds of which ours must have replayed some as one graph (replays.py)
    gpus: int = 1
    ranks_per_gpu: int = 1  # more than one: as many nodes on this machine, each with a rank on every GPU (nodes.py)
    most_tokens: int = 128  # new tokens of a request at most: engine_options.new_tokens
    spec_v1: bool = False  # gone from SGLang 0.5.13 on
    releases: str = ""  # of SGLang, those that can serve it, as a version specifier, or several with " or " between them
    disaggregated: str = ""  # the transfer engine between a prefill and a decode server (pd_servers.roles)
    prefill_engine: dict = field(default_factory=dict)  # options of the prefill server of these alone
    router: bool = False  # whether requests reach these two through SGLang's own router
    action: str = ""  # a key of actions.ACTIONS: done once the workloads have run, which then run again
    loaded_back: str = ""  # the workload whose prompts must come back from host memory, or
    tier: str = "host"  # from "storage": a key of SGLang's cached_tokens_details
    sampling: tuple[dict, ...] = ()  # sampling parameters in place of greedy ones, of one request of a wave after the other
    logprobs: bool = False  # whether requests ask for the log-probabilities of their tokens (logprobs.py)
    same: tuple[tuple[str, str], ...] = ()  # workloads that must have the same outputs on one side

    @property
    def builtin_engine(self) -> dict:
        """Options of the built-in backend's side."""
        return {name: value for name, value in self.engine.items() if name not in self.ours_alone}

    @property
    def again(self) -> str:
        """What tells the names of workloads that ran a second time; empty where none did."""
        if self.disaggregated:
            return "one server"
        return f"after {self.action}" if self.action else ""

    def measured(self) -> tuple[str, ...]:
        """Names of all that a run of the case has results of."""
        return self.workloads + (tuple(f"{name}, {self.again}" for name in self.workloads) if self.again else ())

    def equal_outputs(self) -> tuple[tuple[str, str], ...]:
        """Pairs of these names whose outputs must be the same on one side, up to ties."""
        return self.same + (tuple((name, f"{name}, {self.again}") for name in self.workloads) if self.again else ())

    def runs_here(self) -> bool:
        """Whether the installed SGLang has what the case is about."""
        has_v1 = generation_of(installed()).adapter == "nsa"
        return (has_v1 or not self.spec_v1) and self.is_of(installed())

    def is_of(self, release: str) -> bool:
        """Whether it is about this release of SGLang."""
        return any(release in SpecifierSet(one, prereleases=True) for one in self.releases.split(" or "))

    @property
    def checkpoint(self) -> tuple[str, str]:
        """Model and shape of what it serves."""
        return self.model, self.shape
