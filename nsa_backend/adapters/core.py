"""The backends as SGLang's entry points see them: what a generation's entry points call, whichever generation it is."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from nsa_backend.adapters import sglang_types
from nsa_backend.kernels.batch_inputs import BatchInputs


class CapturedForwards(ABC):
    """Forwards of one model, of which graphs are captured and replayed."""

    @abstractmethod
    def before_capture(self, mode: sglang_types.ForwardMode, num_rows: int, inputs: BatchInputs) -> None:
        """Choose the buffers that the graph being captured will fill.

        Args:
            mode: decode, target_verify or draft_extend.
            num_rows: query rows of all requests.
            inputs: the graph runner's static tensors: every replay reads what they hold then.
        """

    @abstractmethod
    def before_replay(self, mode: sglang_types.ForwardMode, num_requests: int, inputs: BatchInputs) -> None:
        """Nothing on the device: the graph writes its own metadata.

        Args:
            mode: as it was captured.
            num_requests: the captured batch size.
            inputs: must begin where the captured tensors did, and may be longer.

        Raises:
            ValueError: there is no such graph, or it reads other tensors.
        """

    @abstractmethod
    def at_graph_head(self) -> None:
        """Write the metadata of the captured forward that runs on the CPU, and prepare the decode implementation for it."""

    @property
    @abstractmethod
    def runs_captured(self) -> bool:
        """Whether a captured forward runs on the CPU: in warm-ups, in the capture, and in replays that call it."""

    @abstractmethod
    def indexer_metadata(self, forward_batch: sglang_types.ForwardBatch) -> object:
        """The metadata of the forward under way, behind the interface of SGLang's indexer; the same for all of its layers."""

    @abstractmethod
    def selection_for_drafts(self, topk_indices: torch.Tensor) -> torch.Tensor:
        """Rows that the indexer chose in the forward under way, as draft steps read them: slots, or positions where not fused.

        Args:
            topk_indices: int32 [rows, index_topk], some rows of what the indexer's top-k returned.
        """


class CapturedRounds(ABC):
    """Draft rounds, of which graphs are captured and replayed."""

    speculative_num_steps: int

    @abstractmethod
    def before_capture(self, inputs: BatchInputs) -> None:
        """Choose what the round being captured will fill; `inputs` are the graph runner's static tensors."""

    @abstractmethod
    def before_replay(self, num_requests: int) -> None:
        """Nothing on the device: the draft graph writes its own metadata. Raises ValueError where there is no such graph."""

    @abstractmethod
    def at_graph_head(self) -> None:
        """Write the metadata of all steps of the captured round that runs on the CPU, and prepare the implementation for each.

        Runs in warm-ups and the capture, and where SGLang replays by calling what it captured (--debug-cuda-graph).
        """

    @property
    @abstractmethod
    def runs_captured(self) -> bool:
        """Whether a captured round runs on the CPU."""
