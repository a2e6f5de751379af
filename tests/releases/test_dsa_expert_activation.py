"""SGLang's Triton experts with launches of ours before and between products: SGLang's kernels, interpreted; what is left."""

from __future__ import annotations

import contextlib
import inspect
import logging
from functools import partial
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from nsa_backend import registration
from nsa_backend.adapters import expert_activation, few_experts
from nsa_backend.kernels.few_experts_torch import few_experts_torch
from nsa_backend.kernels.layer_front_weights import GROUP
from nsa_backend.releases import FEW_EXPERTS, installed
from nsa_backend.testing.interpreter import round_as_a_gpu_does

if installed() not in FEW_EXPERTS:
    pytest.skip("the runner of this release is another", allow_module_level=True)

HIDDEN, EXPERTS, CHOICES, BLOCK = 256, 9, 3, 16
SGLANGS = "SGLang's"
TOO_FAR = 1e-2
"""Relative; where one sum rounds to another FP8 scale, 128 values move."""


def in_blocks(chosen: torch.Tensor, block: int, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choices by expert, each block's expert, and rows, as SGLang's CUDA kernels sort them; behind the last row is anything."""
    flat = chosen.flatten()
    most = len(flat) * block if len(flat) < experts + 1 else len(flat) + (experts + 1) * (block - 1)
    most = -(-most // 4) * 4
    order, of_block = torch.full((most,), 2, dtype=torch.int32), torch.full((-(-most // block),), 7, dtype=torch.int32)
    rows = 0
    for expert in range(-1, experts):
        choices = (flat == expert).nonzero().flatten().int()
        blocks = -(-len(choices) // block)
        order[rows : rows + blocks * block] = len(flat)
        order[rows : rows + len(choices)] = choices
        of_block[rows // block : rows // block + blocks] = expert
        rows += blocks * block
    return order, of_block, torch.tensor([rows], dtype=torch.int32)


@pytest.fixture
def server(monkeypatch):
    """What SGLang's runner asks its process."""
    server = SimpleNamespace(
        moe=SimpleNamespace(enable_fused_moe_sum_all_reduce=False),
        deterministic=SimpleNamespace(enable_deterministic_inference=False),
    )
    monkeypatch.setattr("sglang.srt.runtime_context.get_exec", lambda: server)
    return server


@pytest.fixture
def runner(monkeypatch, server):
    """SGLang's module with our hooks and kernels that are interpreted: what tells rows by expert and tiles is for GPUs alone.

    `bulk` and `alone` are whether both products copy in bulk, and whether the second has no tiles; `sorted` has the tokens of
    every call that would launch what tells rows by expert.
    """
    round_as_a_gpu_does()
    expert_activation.tell.cache_clear()
    monkeypatch.setenv(few_experts.SWITCH, "1")
    module = import_module(few_experts.MODULE)
    kernels = import_module(module.invoke_fused_moe_kernel.__module__)
    for place in (module, kernels):
        monkeypatch.setattr(place, "is_arch_support_pdl", lambda: False)
    tile = {"BLOCK_SIZE_M": BLOCK, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": GROUP, "GROUP_SIZE_M": 1, "num_warps": 4}
    found = SimpleNamespace(module=module, bulk=False, alone=False, sorted=[])

    def lookup(*_: object, **__: object) -> tuple:
        first = tile | {"num_stages": 3, "USE_TMA": found.bulk}
        return first, (None if found.alone else first | {"num_stages": 2}, BLOCK)

    monkeypatch.setattr(module, "try_get_optimal_moe_config", lookup)
    monkeypatch.setattr(module, "moe_align_block_size", lambda *given: found.sorted.append(len(given[0])) or in_blocks(*given))
    monkeypatch.setattr(module, "_prepare_fused_moe_run", partial(expert_activation.prepared, module._prepare_fused_moe_run))
    monkeypatch.setattr(module, "get_exec", lambda: server)
    monkeypatch.setattr(
        module, "_fused_moe_kernel_sequence", partial(expert_activation.sequence, module._fused_moe_kernel_sequence)
    )
    monkeypatch.setattr(module, "fused_experts_impl", partial(few_experts.experts, module.fused_experts_impl))
    return found


@pytest.fixture
def launched(monkeypatch):
    """Of every launch between both products, its rows."""
    seen, activate = [], expert_activation.activate

    def spy(both: torch.Tensor, *arguments: object) -> tuple:
        seen.append(len(both))
        return activate(both, *arguments)

    monkeypatch.setattr(expert_activation, "activate", spy)
    return seen


def arguments(tokens: int = 6, width: int = 256, elsewhere: float = 0.0, hidden: int = HIDDEN) -> dict:
    """As SGLang's Triton runner hands them over, for block-FP8 experts, some of them another GPU's."""
    generator = torch.Generator().manual_seed(tokens + width)

    def fp8(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)

    def scales(*shape: int) -> torch.Tensor:
        return 0.02 + 0.1 * torch.rand(shape, generator=generator)

    chosen = torch.rand(tokens, EXPERTS, generator=generator).argsort(dim=1)[:, :CHOICES].int().contiguous()
    chosen[torch.rand(chosen.shape, generator=generator) < elsewhere] = -1
    return {
        "hidden_states": torch.randn(tokens, hidden, generator=generator).bfloat16(),
        "w1": fp8(EXPERTS, 2 * width, hidden), "w1_scale": scales(EXPERTS, 2 * width // GROUP, hidden // GROUP),
        "w2": fp8(EXPERTS, hidden, width), "w2_scale": scales(EXPERTS, hidden // GROUP, width // GROUP),
        "topk_weights": torch.rand(tokens, CHOICES, generator=generator), "topk_ids": chosen,
        "use_fp8_w8a8": True, "block_shape": [GROUP, GROUP], "routed_scaling_factor": 2.5, "filter_expert": elsewhere > 0,
    }  # fmt: skip


def of_twin(given: dict) -> torch.Tensor:
    names = "hidden_states", "w1", "w1_scale", "w2", "w2_scale", "topk_weights", "topk_ids"
    return few_experts_torch(*(given[name] for name in names), factor=given["routed_scaling_factor"] or 1.0).float()


@pytest.mark.parametrize(
    ("width", "bulk", "alone", "elsewhere"),
    [(256, False, False, 0.0), (256, True, False, 0.0), (256, False, True, 0.5), (256, True, False, 0.5),
     (128, False, False, 0.0), (128, True, False, 0.0), (256, False, False, 1.0), (256, True, False, 1.0)],
)  # fmt: skip
def test_experts_are_right(runner, launched, width, bulk, alone, elsewhere):
    """Whether SGLang copies in bulk, has tiles of the second product, and has every expert on this GPU."""
    given = arguments(width=width, elsewhere=elsewhere)
    runner.bulk, runner.alone = bulk, alone
    found = runner.module.fused_experts_impl(**given).float()
    wanted = of_twin(given)
    assert len(launched) == 1
    assert found.isfinite().all()
    assert (found - wanted).norm() <= TOO_FAR * wanted.norm()


@pytest.mark.parametrize(("bulk", "alone", "elsewhere"), [(False, False, 0.0), (True, False, 0.5), (False, True, 0.5)])
def test_one_launch_tells_rows_by_expert_and_quantises(runner, launched, bulk, alone, elsewhere):
    """And the sequence finds what it has left with the order; SGLang's own launches do not run."""
    given = arguments(elsewhere=elsewhere, hidden=1024)
    runner.bulk, runner.alone = bulk, alone
    found = runner.module.fused_experts_impl(**given).float()
    wanted = of_twin(given)
    assert (len(launched), runner.sorted) == (1, [])
    assert (found - wanted).norm() <= TOO_FAR * wanted.norm()


def test_tiles_and_order_are_those_that_sglang_chooses(runner):
    given = arguments(33, elsewhere=0.2, hidden=1024)
    tensors = [given[name] for name in ("hidden_states", "w1", "w2", "topk_ids")]
    (sglangs,) = runner.module._prepare_fused_moe_run.args
    for runner.bulk, runner.alone in ((False, False), (True, False), (True, True)):
        wanted = expert_activation.Prepared(*sglangs(*tensors, **expert_activation.FORM))
        found = runner.module._prepare_fused_moe_run(*tensors, **expert_activation.FORM)
        assert found[:4] == wanted[:4]
        rows = int(wanted.padded)
        assert torch.equal(found.padded, wanted.padded)
        assert found.sorted_ids.shape == wanted.sorted_ids.shape
        assert torch.equal(found.sorted_ids[:rows], wanted.sorted_ids[:rows])
        assert torch.equal(found.expert_ids[: rows // BLOCK], wanted.expert_ids[: rows // BLOCK])
        assert (found.given is None, wanted.given) == (False, None)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_states": torch.zeros(4, 1024, dtype=torch.bfloat16)},
        {"hidden_states": torch.zeros(expert_activation.TOKENS.stop, 1024, dtype=torch.bfloat16)},
        {"hidden_states": torch.zeros(6, 1024, dtype=torch.float16)},
        {"hidden_states": torch.zeros(6, HIDDEN, dtype=torch.bfloat16)},
        {"topk_ids": torch.zeros(6, CHOICES, dtype=torch.int64)},
        {"topk_ids": torch.zeros(6, 1, dtype=torch.int32)},
        {"w1": torch.zeros(EXPERTS, 2 * 192, 1024).to(torch.float8_e4m3fn)},
        {"w1": torch.zeros(EXPERTS, 512, 1024, dtype=torch.bfloat16)},
        {"use_fp8_w8a8": False},
        {"block_shape": None},
    ],
)
def test_other_rows_are_told_by_sglangs_launches(monkeypatch, server, change):
    monkeypatch.setenv(few_experts.SWITCH, "1")
    given = {name: value for name, value in arguments(hidden=1024).items() if name in ("hidden_states", "w1", "w2", "topk_ids")}
    given |= expert_activation.FORM | change
    asked = []
    expert_activation.prepared(lambda *tensors, **form: asked.append((tensors, form)), **given)
    ((tensors, form),) = asked
    assert len(tensors) == 4
    assert set(form) == set(expert_activation.FORM)


@pytest.mark.parametrize("factor", [None, 1.0, 2.0])
def test_sums_have_sglangs_factor_and_place(runner, launched, factor):
    given = arguments() | {"routed_scaling_factor": factor}
    wanted, x = of_twin(given), given["hidden_states"]
    before = x.clone()
    apart = runner.module.fused_experts_impl(**given)
    assert torch.equal(x, before)
    assert (apart.float() - wanted).norm() <= TOO_FAR * wanted.norm()
    assert runner.module.fused_experts_impl(**given, inplace=True) is x
    assert torch.equal(x, apart)
    assert len(launched) == 2


def test_few_tokens_are_two_launches_and_many_are_sglangs(monkeypatch, runner, launched):
    """Both hooks are in place, each at its own function."""
    few = []
    monkeypatch.setattr(few_experts.kernels, "few_experts", lambda x, *_, out, **__: few.append(len(x)) or out)
    monkeypatch.setattr(few_experts.kernels, "problem", lambda hidden, width: None)
    monkeypatch.setattr(expert_activation, "experts", lambda x, *_, **__: launched.append(len(x)))
    monkeypatch.setattr(
        runner.module, "_fused_moe_kernel_sequence", partial(expert_activation.sequence, sglangs(runner.module))
    )
    counts = 1, 2, 3, 4, 5, 8, 33, 128, 129
    found = {tokens: runner.module.fused_experts_impl(**arguments(tokens, 128)) for tokens in counts}
    assert few == [1, 2]
    assert launched == [5, 8, 33, 128]
    assert [tokens for tokens, of in found.items() if isinstance(of, str)] == [3, 4, 129]


def sglangs(module) -> object:
    """In place of SGLang's sequence, whose signature it has."""

    def left(*_: object, **__: object) -> str:
        return SGLANGS

    left.__signature__ = signature(module)
    return left


def signature(module) -> inspect.Signature:
    """Of SGLang's sequence, whatever is around it."""
    function = module._fused_moe_kernel_sequence
    while isinstance(function, partial):
        (function,) = function.args
    return inspect.signature(inspect.unwrap(function))


@pytest.fixture
def left(monkeypatch, runner):
    """Returns a function of arguments to whether SGLang's sequence has them, with its hook alone around it."""

    def asked(given: dict, **more: object) -> bool:
        of_experts = {name: None for name in signature(runner.module).parameters if name not in given}
        of_experts |= {name: value for name, value in expert_activation.OF_SEQUENCE.items() if name not in given}
        of_experts |= {"inplace": False, "config": {"BLOCK_SIZE_M": BLOCK}}
        monkeypatch.setattr(expert_activation, "experts", lambda *_, **__: None)
        return expert_activation.sequence(sglangs(runner.module), **of_experts | given | more) == SGLANGS

    return asked


OTHER = {
    "activation": "gelu", "is_gated": False, "use_fp8_w8a8": False, "block_shape": None, "per_channel_quant": True,
    "apply_router_weight_on_input": True, "no_combine": True, "defer_sum": True, "gemm1_limit": 7.0, "swiglu_limit": 10.0,
    "a1_q": torch.zeros(1), "a1_scale": torch.zeros(1), "b1": torch.zeros(1), "use_int8_w8a8": True,
    "fuse_swiglu_interleaved": True, "hooks": SimpleNamespace(after_gate_up=None, after_down=None),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER)
def test_other_experts_are_sglangs(left, name):
    assert not left(arguments())
    assert left(arguments(), **{name: OTHER[name]})


@pytest.mark.parametrize(
    "change",
    [
        {"topk_ids": torch.zeros(6, CHOICES, dtype=torch.int64)},
        {"topk_ids": torch.zeros(6, 1, dtype=torch.int32)},
        {"w1_scale": torch.zeros(EXPERTS, 4, 2, dtype=torch.int32)},  # scales that are packed
        {"hidden_states": torch.zeros(6, HIDDEN, dtype=torch.float16)},
        {"w1": torch.zeros(EXPERTS, 2 * 192, HIDDEN).to(torch.float8_e4m3fn)},
    ],
)
def test_other_tensors_are_sglangs(left, change):
    assert left(arguments() | change)


@pytest.mark.parametrize(
    "part", [("moe", "enable_fused_moe_sum_all_reduce"), ("deterministic", "enable_deterministic_inference")]
)
def test_servers_that_want_sums_otherwise_are_sglangs(left, runner, server, part):
    """With their rows' order, which would be quantised for nothing."""
    given = arguments(hidden=1024)
    tensors = [given[name] for name in ("hidden_states", "w1", "w2", "topk_ids")]
    group, option = part
    setattr(getattr(server, group), option, True)
    assert left(arguments())
    runner.module._prepare_fused_moe_run(*tensors, **expert_activation.FORM)
    assert runner.sorted == [6]


def test_the_sum_is_where_sglang_has_it(monkeypatch, left):
    """In memory that NCCL knows where ranks allocate alike, which they do without DP attention; nowhere new in place."""
    asked = []

    @contextlib.contextmanager
    def memory(group, disabled):
        asked.append(disabled)
        yield

    monkeypatch.setattr("sglang.srt.distributed.device_communicators.pynccl_allocator.use_symmetric_memory", memory)
    for answer in (True, False):
        monkeypatch.setattr("sglang.srt.layers.dp_attention.is_allocation_symmetric", lambda answer=answer: answer)
        assert not left(arguments())
        assert not left(arguments(), inplace=True)
    assert asked == [False, True]


def test_every_argument_of_sglangs_sequence_is_known(runner):
    """One that is new may change what is computed; what its functions give and take is as it was."""
    tensors = {"hidden_states", "w1", "w2", "topk_weights", "topk_ids", "w1_scale", "w2_scale"}
    order = expert_activation.NAMES
    of_others = {"routed_scaling_factor", "filter_expert", "gate_up_interleaved", "no_combine_keep_router_weight", "inplace"}
    known = tensors | set(order) | of_others | set(expert_activation.OF_SEQUENCE)
    assert set(signature(runner.module).parameters) == known
    (prepare,) = runner.module._prepare_fused_moe_run.args
    returned = inspect.getsource(prepare).rpartition("return (")[2]
    assert tuple(name.strip() for name in returned.strip(" )\n").split(",") if name.strip()) == order
    assert len(order) == len(expert_activation.Prepared._fields)
    assert set(inspect.signature(prepare).parameters) == {"hidden_states", "w1", "w2", "topk_ids"} | set(expert_activation.FORM)


def test_the_log_has_it_once(caplog, left):
    with caplog.at_level(logging.INFO, expert_activation.__name__):
        assert not left(arguments())
        assert not left(arguments(33))
    (line,) = (record.getMessage() for record in caplog.records)
    what = "experts of 5 to 128 tokens have one launch before both products and one between"
    assert line == f"nsa_backend: {what}, 9 experts of 256"


@pytest.mark.parametrize(
    ("said", "experts", "width", "served"),
    [(None, 256, 256, True), (None, 257, 256, True), (None, 256, 512, False), (None, 32, 256, False), ("1", 32, 256, True)],
)
def test_who_asks_for_nothing_has_them_of_experts_that_were_timed(monkeypatch, server, said, experts, width, served):
    """Both hooks look, each at the weights that it is given."""
    monkeypatch.setenv(few_experts.SWITCH, said) if said else monkeypatch.delenv(few_experts.SWITCH, raising=False)
    monkeypatch.setattr(expert_activation, "prepare", lambda *_: "ours")
    monkeypatch.setattr(expert_activation, "are_plain", lambda *_: True)
    monkeypatch.setattr(expert_activation, "experts", lambda *_, **__: "ours")
    x, first = torch.zeros(6, 1024, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.float8_e4m3fn)
    first = first.expand(experts, 2 * width, 1024)
    chosen = torch.zeros(6, CHOICES, dtype=torch.int32)
    found = expert_activation.prepared(lambda *_, **__: SGLANGS, x, first, first, chosen, **expert_activation.FORM)
    module = import_module(few_experts.MODULE)
    left = sglangs(module)
    of = dict.fromkeys(signature(module).parameters) | {"hidden_states": x, "w1": first, "topk_ids": chosen, "inplace": True}
    assert [found, expert_activation.sequence(left, **of)] == ["ours" if served else SGLANGS] * 2


@pytest.mark.parametrize("wanted", [False, True])
def test_a_server_has_them_where_few_experts_are_wanted(monkeypatch, wanted):
    found = []
    backend = SimpleNamespace(config=SimpleNamespace(attention=SimpleNamespace(device_sm=90)))
    monkeypatch.setattr(registration, "NativeSparseAttnBackend", lambda runner: backend)
    monkeypatch.setattr(registration, "adapter", SimpleNamespace(**dict.fromkeys(
        ("take_context_parts", "score_at_once", "divide_indexer", "take_moe_configs", "clear_padding_on_resume"),
        lambda *_: None,
    )))  # fmt: skip
    monkeypatch.setattr(registration, "wants_layer_fronts", lambda: False)
    monkeypatch.setattr(registration.few_experts, "wanted", lambda device_sm: wanted)
    for part in ("few_experts", "expert_activation"):
        monkeypatch.setattr(getattr(registration, part), "take", lambda part=part: found.append(part))
    registration.create_backend(SimpleNamespace(is_draft_worker=True, token_to_kv_pool=None))
    assert found == (["few_experts", "expert_activation"] if wanted else [])


def test_the_hook_is_where_sglangs_runners_look(monkeypatch):
    hooked = []
    monkeypatch.setattr(expert_activation, "hook", lambda path, around, kind: hooked.append((path, around)))
    expert_activation.take()
    assert hooked == [
        (f"{few_experts.MODULE}._prepare_fused_moe_run", expert_activation.prepared),
        (f"{few_experts.MODULE}._fused_moe_kernel_sequence", expert_activation.sequence),
    ]
    module = import_module(few_experts.MODULE)
    source = inspect.getsource(inspect.unwrap(module.fused_experts_impl))
    assert "= _prepare_fused_moe_run(" in source
    assert "return _fused_moe_kernel_sequence(" in source
