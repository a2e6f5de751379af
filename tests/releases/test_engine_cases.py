"""Every end-to-end case's engine arguments, resolved and checked by SGLang itself, on both sides of the comparison."""

import json
from types import SimpleNamespace

import installed_source
import pytest
import soak_server
import soak_traffic
from next_token import question
from pd_servers import command, roles
from run_case import engine_arguments
from sglang.srt.server_args import ServerArgs
from workloads import CASES

from nsa_backend.adapters.installed import adapter
from nsa_backend.benchmarks.checkpoints import eagle3, faithful
from nsa_backend.benchmarks.checkpoints.faithful_models import MODELS
from nsa_backend.benchmarks.servers.server import retracted
from nsa_backend.refusals import RULES
from nsa_backend.releases import CONTEXT_RANKS, generation_of, installed

HAS_V1 = generation_of(installed()).adapter == "nsa"
RUN_HERE = [case for case in CASES if case.runs_here()]
SERVED_HERE = [
    name
    for name in soak_server.TOPOLOGIES
    if not (HAS_V1 and name.startswith("pd")) and (name != "dcp" or installed() in CONTEXT_RANKS)
]


def spans_all(case) -> bool:
    """Whether each of its servers is on all of its GPUs."""
    return not case.disaggregated or "on the same two GPUs" in case.name


@pytest.fixture(scope="module")
def resolved_before() -> dict[str, ServerArgs]:
    """By all that they are resolved of; cases that differ in what clients do have this in common."""
    return {}


@pytest.fixture
def engine(hopper, small_model, tmp_path, monkeypatch, resolved_before):
    """Returns a function of a case that goes as far as sglang.Engine's main process."""

    def resolved(case):
        for name, value in case.environment.items():
            monkeypatch.setenv(name, value)
        config = faithful.config(faithful.ALL_SHAPES[case.shape], MODELS[case.model])
        given = json.dumps([case.environment, config, engine_arguments(case, "target", 30000)], sort_keys=True)
        if given not in resolved_before:
            resolved_before[given] = resolve_anew(case, config)
        return resolved_before[given]

    def resolve_anew(case, config):
        target = tmp_path / "target"
        for folder, fields in ((target, config), (eagle3.beside(target), eagle3.config(config))):
            folder.mkdir(exist_ok=True)
            (folder / "config.json").write_text(json.dumps(fields))
        server_args = ServerArgs(**engine_arguments(case, str(target), 30000), device="cuda")
        if hasattr(server_args, "resolve_once"):
            server_args.resolve_once()
        server_args.check_server_args()
        return server_args

    return resolved


@pytest.mark.parametrize("ask", [False, True], ids=["measured", "asked about ties"])
@pytest.mark.parametrize("case", RUN_HERE, ids=lambda case: case.name)
def test_every_case_resolves(engine, case, ask):
    server_args = engine(question(case) if ask else case)
    args = adapter.resolved(server_args)
    assert set(adapter.served_backends(server_args)) <= set(adapter.BACKEND_NAMES)
    sglangs = "flashmla_kv" if args.kv_cache_dtype == "fp8_e4m3" else "fa3"  # where nobody names one
    assert getattr(args, adapter.DECODE_ATTRIBUTE) == (sglangs if case.decode == "auto" else case.decode)
    assert (args.speculative_num_steps or 0) == (0 if ask else case.steps)
    ranks = 1 if ask else case.ranks_per_gpu
    assert args.tp_size * args.pp_size == ranks * case.gpus // (1 if spans_all(case) else 2)
    dense = case.dense_draft and not ask
    assert (args.speculative_algorithm == "EAGLE3") == dense
    assert getattr(args, "speculative_draft_attention_backend", None) == ("fa3" if dense else None)


@pytest.mark.parametrize("case", [case for case in RUN_HERE if case.disaggregated], ids=lambda case: case.name)
def test_both_servers_of_a_pair_resolve(parse, resolve, tmp_path, case):
    """As their command lines are parsed; what one sends, the other expects."""
    (tmp_path / "config.json").write_text(json.dumps(faithful.config(faithful.SHAPES["faithful"], MODELS[case.model])))
    found = []
    for arguments in roles(engine_arguments(case, str(tmp_path), 30000), case.disaggregated, case.gpus, case.prefill_engine):
        server_args = resolve(*command(arguments)[3:])
        server_args.check_server_args()
        found.append(adapter.resolved(server_args))
    prefill, decode = found
    assert (prefill.disaggregation_mode, decode.disaggregation_mode) == ("prefill", "decode")
    for name in ("disaggregation_transfer_backend", "disaggregation_bootstrap_port", "kv_cache_dtype", "page_size", "tp_size"):
        assert getattr(prefill, name) == getattr(decode, name), name
    assert prefill.disaggregation_transfer_backend == case.disaggregated.removesuffix("_tcp")  # which SGLang resolves so
    assert (prefill.attn_cp_size, decode.attn_cp_size) == (prefill.tp_size if case.prefill_engine else 1, 1)
    assert (prefill.base_gpu_id, decode.base_gpu_id + decode.tp_size) == (0, case.gpus)
    assert decode.base_gpu_id == (0 if spans_all(case) else prefill.tp_size)
    assert len({prefill.port, decode.port, prefill.disaggregation_bootstrap_port}) == 3
    assert [args.speculative_num_steps or 0 for args in found] == [case.steps] * 2


def test_debugging_graphs_is_measured_where_sglang_starts_so(engine):
    (case,) = [c for c in CASES if c.engine.get("debug_cuda_graph")]
    assert case.runs_here() == HAS_V1
    if HAS_V1:
        assert engine_arguments(case, "", 30000)["debug_cuda_graph"]  # which SGLang puts off on a machine without a GPU
        assert not adapter.resolved(engine(case)).disable_cuda_graph
    else:
        (rule,) = [rule for rule in RULES if rule.attribute == "debug_cuda_graph"]
        assert "pass --disable-cuda-graph" in rule.refusal(SimpleNamespace(debug_cuda_graph=True))


def test_the_soak_run_makes_sglang_take_requests_back(monkeypatch):
    """By a switch of its own, whose line in the log is counted."""
    from sglang.srt.environ import envs

    for name, value in soak_server.RETRACTING.items():
        monkeypatch.setenv(name, value)
    assert (envs.SGLANG_TEST_RETRACT.get(), envs.SGLANG_TEST_RETRACT_INTERVAL.get()) == (True, 499)
    said = '"Testing retraction. "', 'f"#retracted_reqs: {'
    scheduler = (installed_source.ROOT / "managers" / "scheduler.py").read_text()
    assert all(words in scheduler for words in said)
    assert retracted("Testing retraction. #retracted_reqs: 1, #new_tokens_gained: 64") == 1


@pytest.mark.parametrize("topology", SERVED_HERE)
def test_both_sides_of_the_soak_run_understand_the_commands_of_its_servers(resolve, tmp_path, topology):
    """Which all have room for what is taken back beside another request, and no port in common."""
    served = soak_server.TOPOLOGIES[topology]
    commands = [words[words.index("--model-path") + 2 :] for words in served.commands(tmp_path, 33000)]
    assert not any(word.startswith("--nsa-") for words in commands for word in words if not HAS_V1)  # of the built-in side
    servers = [adapter.resolved(resolve(*words)) for words in commands]
    longest = max(len(each.prompt) + each.new_tokens for each in soak_traffic.make_templates(0))
    for args in servers:
        of_attention = args.dp_size if args.enable_dp_attention else getattr(args, "attn_dp_size", 1)
        divided = getattr(args, "dcp_size", 1)  # ranks of which a token of the pool has one
        assert of_attention * divided == served.ranks
        assert args.max_total_tokens * of_attention == soak_server.POOL_TOKENS
        assert 2 * longest < args.max_total_tokens
        assert (getattr(args, adapter.DECODE_ATTRIBUTE), args.speculative_num_steps) == ("fa3", 3)
        assert args.disable_custom_all_reduce == (served.ranks > 1)
        if served.ranks == 1:
            assert args.chunked_prefill_size == 512
            assert max(args.cuda_graph_bs if HAS_V1 else args.cuda_graph_config.decode.bs) == 64
    if len(servers) == 2:
        prefill, decode = servers
        assert (prefill.disaggregation_mode, decode.disaggregation_mode) == ("prefill", "decode")
        assert prefill.disaggregation_bootstrap_port == decode.disaggregation_bootstrap_port
        assert (prefill.base_gpu_id, decode.base_gpu_id) == (0, served.gpus - decode.tp_size)
        assert decode.num_reserved_decode_tokens < soak_server.LONGEST_OUTPUT
        ports = {prefill.port, decode.port, prefill.disaggregation_bootstrap_port, prefill.nccl_port, decode.nccl_port}
        assert len(ports - {None}) == 5
