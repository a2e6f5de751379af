"""Metadata launches that graphs have recorded: of a backend's captured forwards, or of captured draft rounds."""

from __future__ import annotations

from dataclasses import dataclass

from nsa_backend.adapters import sglang_types
from nsa_backend.kernels.batch_inputs import BatchInputs
from nsa_backend.kernels.buffers import MetadataBuffers
from nsa_backend.kernels.plan import MetadataPlan
from nsa_backend.metadata.views import NSAMetadata, step_metadata
from nsa_backend.metadata.writer import MetadataWriter

READ = ("seq_lens", "req_pool_indices")
"""What a captured launch reads of its inputs."""


@dataclass(frozen=True)
class CapturedLaunch:
    """The launch that one graph has recorded."""

    plan: MetadataPlan
    buffers: MetadataBuffers
    inputs: BatchInputs  # the graph runner's own tensors: a replay reads what they hold then
    steps: tuple[NSAMetadata, ...]  # what the launch fills, one a draft step; one alone in every other mode


class CapturedLaunches:
    """The launches of a backend's graphs. All batch sizes of a mode share one set of buffers.

    What a capture will write is known before it; the launch is kept here and made inside it, where the generation of SGLang
    gives the backend its turn. A replay then costs no launch: the graph reads the runner's static `seq_lens` and
    `req_pool_indices` itself. Under --debug-cuda-graph SGLang replays by calling what it captured; then the launch of that very
    batch is made again.
    """

    def __init__(self, writer: MetadataWriter, graph: str = "graph"):
        """`graph` is what an error calls the graphs."""
        self._writer, self._graph = writer, graph
        self._buffers: dict[tuple, MetadataBuffers] = {}
        self._launches: dict[tuple[sglang_types.ForwardMode | None, int], list[CapturedLaunch]] = {}
        self.current: CapturedLaunch | None = None
        """The launch of the captured forward that runs on the CPU: in warm-ups, in the capture, and in replays that call it."""

    def clear(self) -> None:
        """Forget what was captured: another largest batch has been set."""
        self._buffers.clear()
        self._launches.clear()

    def capture(
        self,
        mode: sglang_types.ForwardMode | None,
        plan: MetadataPlan,
        room: MetadataPlan,
        inputs: BatchInputs,
        width: int | None = None,
    ) -> CapturedLaunch:
        """Choose what the graph being captured will fill; `write` records the launch in it.

        Args:
            mode: None for a draft round, and for the rows of a prefill.
            plan: what this graph writes.
            room: the largest plan of the mode, which its buffers are allocated for when it is captured first.
            inputs: the graph runner's static tensors.
            width: tokens that a row of the page table has room for, in a table of its own; None for any request, in the table
                that all graphs share.
        """
        key = mode, width, room.num_requests
        if key not in self._buffers:
            self._buffers[key] = self._writer.replay_buffers(room, width)
        buffers = self._buffers[key]
        steps = tuple(step_metadata(plan, buffers, step) for step in range(plan.num_steps))
        self.current = CapturedLaunch(plan, buffers, inputs, steps)
        # Two-batch overlap captures the second half of 7 requests and that of 8: 4 requests each, at other addresses.
        launches = self._launches.setdefault((mode, plan.num_requests), [])
        self._launches[mode, plan.num_requests] = [self.current, *(old for old in launches if not _same(old.inputs, inputs))]
        return self.current

    def replay(
        self, mode: sglang_types.ForwardMode | None, num_requests: int, inputs: BatchInputs | None = None
    ) -> CapturedLaunch:
        """The launch of a captured graph; raises ValueError where it was not captured, or reads other tensors than `inputs`."""
        self.leave()
        of_mode = "" if mode is None else f" for {mode.name}"
        launches = self._launches.get((mode, num_requests))
        if not launches:
            raise ValueError(
                f"no {self._graph} of {num_requests} requests was captured{of_mode}: there is no metadata to replay"
            )
        launch = next((found for found in launches if inputs is None or _same(found.inputs, inputs)), None)
        if launch is None:
            name = next(name for name in READ if not _same_tensor(name, launches[0].inputs, inputs))
            raise ValueError(
                f"the {self._graph} of {num_requests} requests{of_mode} reads the {name} it was captured with, and the "
                "replay brings another tensor: it would attend with the lengths of an earlier batch"
            )
        self._writer.check(launch.plan, launch.inputs)
        self.current = launch
        return launch

    def write(self) -> CapturedLaunch:
        """Make the launch of the captured forward that runs on the CPU."""
        launch = self.current
        self._writer.write(launch.plan, launch.buffers, launch.inputs)
        return launch

    def leave(self) -> None:
        """Another forward follows, which must not write the metadata of a graph."""
        self.current = None


def _same(one: BatchInputs, other: BatchInputs) -> bool:
    """Whether both begin at the same addresses."""
    return all(_same_tensor(name, one, other) for name in READ)


def _same_tensor(name: str, one: BatchInputs, other: BatchInputs) -> bool:
    return getattr(one, name).data_ptr() == getattr(other, name).data_ptr()
