"""A stand-in for SGLang's EAGLE worker, and what its scheduler does around a forward, for tests of whole rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.overlap_utils import FutureMap, RelayPayload, resolve_forward_inputs
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from nsa_backend.adapters.dsa.rounds.by_release import release
from nsa_backend.adapters.dsa.rounds.worker import CAPTURING

D = 4
POOL = 24
"""Rows of the request pool; SGLang gives row 0 to no request."""
HIDDEN = 3
SELECTED = 5
"""Tokens of a selection that draft steps share."""
VOCABULARY = 1009
SIZES = [1, 2, 4, 8]
KEEPS_ALL = 1 << 30
"""SGLang's top-k of a request that asks for none."""


class Backend:
    """Stands for ours."""


class Graphs(SimpleNamespace):
    """Stands for one of SGLang's graph runners, which weak references are made to."""


@dataclass(frozen=True)
class WeightUpdater:
    """Stands for that of SGLang's target runner."""

    recapture_cuda_graph: Callable[[], None]


class StandInWorker:
    """One round as a function of everything a real one reads."""

    gathers = False  # whether its graphs go by the rank with the most requests
    topk = 1

    def __init__(self):
        graphs = Graphs(capture_bs=SIZES, require_mlp_tp_gather=self.gathers)
        self.target_worker = SimpleNamespace(
            model_runner=self.runner(decode_cuda_graph_runner=graphs, weight_updater=WeightUpdater(self.capture_anew)),
            model_config=SimpleNamespace(vocab_size=VOCABULARY),
        )
        self.draft_worker = SimpleNamespace(
            cuda_graph_runner=graphs,
            cuda_graph_runner_for_draft_extend=Graphs(capture_bs=[*SIZES, 16], require_mlp_tp_gather=self.gathers),
            draft_runner=self.runner(),
            seed_dsa_topk_from_draft_extend=False,
            dsa_seed_topk_width=SELECTED,
        )
        setattr(self, release().last_reader, self.draft_worker.draft_runner)
        self.spec_v2_attn_backends = (Backend(), None, Backend())
        self.speculative_num_draft_tokens = D
        self.filters: list[tuple[bool, bool]] = []  # top-p and top-k, by sampled round

    @staticmethod
    def runner(**fields: Any) -> SimpleNamespace:
        config = SimpleNamespace(model_is_mrope=False, spec_hidden_size=HIDDEN, dtype=torch.float32)
        fields["spec_algorithm"] = SpeculativeAlgorithm.EAGLE
        return SimpleNamespace(device_timer=None, model_config=config, **{release().reads_done: None}, **fields)

    def capture_anew(self) -> None:
        """What SGLang does where /update_weights_from_disk asks for it, or another one captures."""
        anew = Graphs(capture_bs=SIZES, require_mlp_tp_gather=self.gathers)
        self.target_worker.model_runner.decode_cuda_graph_runner = anew

    def forward_batch_generation(self, batch: Any, on_publish: Callable | None = None) -> GenerationBatchResult:
        assert batch.seq_lens_cpu is None, "lengths on the host would be those of the capture"
        draft = batch.spec_info
        first = draft.topk_index[:, 0] + draft.bonus_tokens * 3 + batch.seq_lens * 5 + draft.hidden_states.sum(1).long()
        first = first if draft.dsa_topk_indices is None else first + draft.dsa_topk_indices.sum(1)
        if not batch.sampling_info.is_all_greedy:
            first = first + self.drawn(batch.sampling_info)
        shared = self.draft_worker.seed_dsa_topk_from_draft_extend
        tokens = (first[:, None] * torch.arange(1, D + 1) + batch.req_pool_indices[:, None]) % VOCABULARY
        accept_lens = (tokens.sum(1) % D + 1).int()
        on_publish(batch.seq_lens + accept_lens)
        told = -(tokens + batch.seq_lens[:, None] / 8192) if batch.return_logprob else None
        last = tokens.gather(1, accept_lens.long()[:, None] - 1)
        return GenerationBatchResult(
            logits_output=LogitsProcessorOutput(next_token_logits=None, next_token_logprobs=told),
            next_token_ids=tokens.flatten().int(),
            accept_lens=accept_lens,
            new_seq_lens=batch.seq_lens + accept_lens,
            can_run_cuda_graph=True,
            speculative_num_draft_tokens=D,
            next_draft_input=EagleDraftInput(
                bonus_tokens=last[:, 0].int(),
                topk_p=torch.ones(len(last), 1),
                topk_index=(last * 11 + 1) % VOCABULARY,
                hidden_states=last.float() + torch.arange(HIDDEN),
                dsa_topk_indices=last.int() + torch.arange(SELECTED, dtype=torch.int32) if shared else None,
            ),
        )

    def drawn(self, sampling: Any) -> torch.Tensor:
        """What a sampled round of these parameters adds to the first token of every request, int64 [requests]."""
        self.filters.append((sampling.need_top_p_sampling, sampling.need_top_k_sampling))
        temperatures = (sampling.temperatures[:, 0] * 100).long()
        top_ps = (sampling.top_ps.clamp(max=1.0) * 1000).long() if sampling.need_top_p_sampling else torch.tensor(1000)
        top_ks = sampling.top_ks.long() if sampling.need_top_k_sampling else torch.tensor(KEEPS_ALL)
        return temperatures * 7 + top_ps * 13 + top_ks % VOCABULARY * 17


class Recorded:
    """Records on the CPU: a replay runs the function again and copies what it returns to the first run's tensors.

    A real capture runs nothing, so what the recording has changed is put back.
    """

    def __init__(self, side: Any):
        self.side = side

    def record(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        kept = {name: value for name, value in vars(self.side.future_map).items() if isinstance(value, torch.Tensor)}
        kept["launches"] = function.func.__self__._launches_on_gpu
        before = {name: value.clone() for name, value in kept.items()}
        outputs = function()
        for name, value in kept.items():
            value.copy_(before[name])

        def replay() -> None:
            self.side.sizes.append(len(outputs.accept_lens))
            rounds = self.side.worker.rounds
            state, rounds._round = rounds._round, CAPTURING  # a graph does not ask which batches it serves
            again = function()
            rounds._round = state
            outputs.next_token_ids.copy_(again.next_token_ids)
            outputs.accept_lens.copy_(again.accept_lens)

        return replay, outputs


def finished_prefill(future_map: FutureMap, seed: int, *, shared: bool = False) -> None:
    """What prefills leave for every row of the pool that a request can have; `shared`: a selection for draft steps too."""
    rng = torch.Generator().manual_seed(seed)
    rows = torch.arange(1, POOL)
    future_map.publish(rows, torch.randint(1, 5000, (POOL - 1,), generator=rng))
    future_map.stash(
        rows,
        RelayPayload(
            bonus_tokens=torch.randint(0, VOCABULARY, (POOL - 1,), generator=rng),
            topk_p=torch.ones(POOL - 1, 1),
            topk_index=torch.randint(0, VOCABULARY, (POOL - 1, 1), generator=rng),
            hidden_states=torch.randint(0, 50, (POOL - 1, HIDDEN), generator=rng).float(),
            dsa_topk_indices=torch.randint(0, 99, (POOL - 1, SELECTED), generator=rng, dtype=torch.int32) if shared else None,
        ),
    )


def sampling_info(slots: list[int], *, greedy: bool) -> SimpleNamespace:
    """How the requests in these rows sample; where not all are greedy, those in rows of a multiple of 3 are."""
    rows = torch.tensor(slots)
    one = torch.ones(len(slots), dtype=torch.bool) if greedy else rows % 3 == 0
    wishes = {"logit_bias": None, "has_custom_logit_processor": False, "has_watermark_candidates": False}
    top_ps = torch.where(one | (rows % 4 == 0), 1.0, rows / (POOL + 1))
    top_ks = torch.where(one, 1, torch.where(rows % 5 == 0, rows + 5, KEEPS_ALL)).int()
    return SimpleNamespace(
        temperatures=torch.where(one, 1.0, rows / POOL)[:, None],
        top_ps=top_ps,
        top_ks=top_ks,
        is_all_greedy=bool(one.all()),
        need_top_p_sampling=bool((top_ps != 1).any()),
        need_top_k_sampling=bool((top_ks != KEEPS_ALL).any()),
        sampling_seed=None,
        penalizer_orchestrator=SimpleNamespace(is_required=False),
        **{name: value for name, value in wishes.items() if name not in release().lacks},
    )


def decode_batch(slots: list[int], *, greedy: bool = True, shared: bool = False) -> Callable[..., ScheduleBatch]:
    """Returns what makes a decode batch of the requests in these rows of the pool, with some fields changed."""

    def batch(**fields: Any) -> ScheduleBatch:
        rows = torch.tensor(slots)
        sampling = sampling_info(slots, greedy=greedy)
        asked = [SimpleNamespace(sampling_params=SimpleNamespace(top_k=k)) for k in sampling.top_ks.tolist()]
        made = ScheduleBatch(reqs=asked)
        made.forward_mode, made.enable_overlap, made.spec_algorithm = ForwardMode.DECODE, True, SpeculativeAlgorithm.EAGLE
        made.req_pool_indices, made.device = rows, "cpu"
        made.spec_info = EagleDraftInput(future_indices=rows, future_dsa_topk_indices_available=shared)
        made.sampling_info = sampling
        for name, value in fields.items():
            setattr(made, name, value)
        return made

    return batch


def generate(worker: Any, future_map: FutureMap, batch: ScheduleBatch) -> GenerationBatchResult:
    """SGLang's scheduler around one forward, as its overlap loop has it."""
    future_map.resolve_seq_lens_cpu(batch)
    resolve_forward_inputs(batch, future_map)
    rows = batch.req_pool_indices
    schedulers = batch.sampling_info
    result = worker.forward_batch_generation(batch, on_publish=partial(future_map.publish, rows))
    batch.sampling_info = schedulers
    future_map.stash(rows, RelayPayload.from_draft_input(result.next_draft_input))
    return result
