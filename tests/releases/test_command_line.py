"""One command line for every release: parsed, resolved and checked by SGLang itself, as its launcher does after the plugins.

Resolution asks the GPU for its compute capability alone, which the `resolve` fixture answers for it.
"""

import pickle

import pytest
from installed_source import server_fields
from server_words import SPECULATIVE
from sglang.srt.server_args import ServerArgs

from nsa_backend.adapters import naive_eagle
from nsa_backend.adapters.installed import adapter
from nsa_backend.environment import asked
from nsa_backend.releases import round_graph_problem

OLD = "--nsa-decode-backend fa3 --nsa-prefill-backend flashmla_sparse"
OWN = f"{adapter.DECODE_OPTION} fa3 {adapter.PREFILL_OPTION} flashmla_sparse"


@pytest.mark.parametrize("options", [OLD, OWN])
@pytest.mark.parametrize("name", adapter.BACKEND_NAMES)
def test_the_options_set_what_the_backend_reads(resolve, options, name):
    server_args = resolve("--attention-backend", name, *options.split(), *SPECULATIVE)
    args = adapter.resolved(server_args)
    assert (getattr(args, adapter.DECODE_ATTRIBUTE), getattr(args, adapter.PREFILL_ATTRIBUTE)) == ("fa3", "flashmla_sparse")
    assert (args.speculative_num_steps, args.speculative_num_draft_tokens) == (3, 4)
    assert (args.page_size, args.kv_cache_dtype) == (64, "bfloat16")
    assert adapter.served_backends(server_args) == (name, name)
    server_args.check_server_args()


def test_a_sparse_model_is_served_without_any_option(resolve):
    server_args = resolve()
    assert set(adapter.served_backends(server_args)) <= set(adapter.BACKEND_NAMES)
    args = adapter.resolved(server_args)
    assert {getattr(args, adapter.DECODE_ATTRIBUTE), getattr(args, adapter.PREFILL_ATTRIBUTE)} <= {"fa3", "flashmla_sparse"}
    server_args.check_server_args()


@pytest.mark.parametrize(
    "option", ["--nsa-decode-backend", "--nsa-prefill-backend", adapter.DECODE_OPTION, adapter.PREFILL_OPTION]
)
def test_a_value_that_no_release_knows_is_refused_by_the_parser(parse, capsys, option):
    with pytest.raises(SystemExit):
        parse(option, "no_such_backend")
    assert "invalid choice: 'no_such_backend'" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--nsa-decode-backend", adapter.DECODE_OPTION])
def test_our_own_kernel_is_a_value_of_the_decode_option(resolve, option):
    server_args = resolve(option, "sparse_decode", *SPECULATIVE)
    assert getattr(adapter.resolved(server_args), adapter.DECODE_ATTRIBUTE) == "sparse_decode"
    server_args.check_server_args()


@pytest.mark.parametrize("option", ["--nsa-prefill-backend", adapter.PREFILL_OPTION])
def test_our_own_prefill_is_among_the_values_and_refused_for_decode(resolve, parse, capsys, option):
    server_args = resolve(option, "sparse_prefill")
    assert getattr(adapter.resolved(server_args), adapter.PREFILL_ATTRIBUTE) == "sparse_prefill"
    with pytest.raises(SystemExit):
        parse(option.replace("prefill", "decode"), "sparse_prefill")
    assert "invalid choice: 'sparse_prefill'" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--nsa-prefill-backend", adapter.PREFILL_OPTION])
def test_our_own_kernel_is_no_value_of_the_prefill_option(parse, capsys, option):
    with pytest.raises(SystemExit):
        parse(option, "sparse_decode")
    assert "invalid choice: 'sparse_decode'" in capsys.readouterr().err


def test_an_option_that_is_not_given_sets_nothing(parse):
    """The old spelling is a second option for one attribute: its default must not overwrite what the first one set."""
    args = parse(adapter.DECODE_OPTION, "fa3")
    assert getattr(args, adapter.DECODE_ATTRIBUTE) == "fa3"
    assert getattr(args, adapter.PREFILL_ATTRIBUTE) is None


def test_the_last_spelling_wins(parse):
    assert getattr(parse(adapter.DECODE_OPTION, "trtllm", "--nsa-decode-backend", "fa3"), adapter.DECODE_ATTRIBUTE) == "fa3"


@pytest.mark.skipif(not {"enable_prefill_cp", "cp_strategy"} <= server_fields(), reason="divides no prefill by these options")
@pytest.mark.parametrize("word", ["nsa", "dsa"])
@pytest.mark.parametrize(
    ("how", "strategy"), [("", "interleave"), ("round-robin-split", "interleave"), ("in-seq-split", "zigzag")]
)
@pytest.mark.parametrize("first", [True, False])
def test_prefill_context_parallel_by_its_old_names(parse, word, how, strategy, first):
    """As public commands have it; SGLang 0.5.17 resolves them to the new ones itself."""
    divide, mode = [f"--enable-{word}-prefill-context-parallel"], [f"--{word}-prefill-cp-mode", how] if how else []
    args = parse(*(divide + mode if first else mode + divide))
    if hasattr(ServerArgs, "dsa_prefill_cp_mode"):
        assert args.enable_dsa_prefill_context_parallel
        assert args.dsa_prefill_cp_mode == (how or "round-robin-split")
    else:
        assert (args.enable_prefill_cp, args.cp_strategy) == (True, strategy)
    plain = parse()
    assert (plain.enable_prefill_cp, plain.cp_strategy) == (False, None)


@pytest.mark.skipif(
    hasattr(ServerArgs, "dsa_prefill_cp_mode") or "cp_strategy" not in server_fields(), reason="SGLang has the old names itself"
)
def test_a_strategy_that_is_given_stays(parse):
    assert parse("--cp-strategy", "zigzag", "--enable-dsa-prefill-context-parallel").cp_strategy == "zigzag"
    assert parse("--enable-prefill-cp").cp_strategy is None, "SGLang asks for one there"


@pytest.mark.parametrize("option", [adapter.DECODE_OPTION, adapter.PREFILL_OPTION])
def test_the_check_stops_a_server_that_names_what_is_not_served(resolve, option):
    server_args = resolve("--attention-backend", adapter.BACKEND_NAMES[0], option, "tilelang")
    with pytest.raises(ValueError, match=f"nsa_backend does not serve {option} tilelang: .*NSA_BACKEND_DISABLE=1"):
        server_args.check_server_args()


def test_another_attention_backend_is_left_alone(resolve):
    server_args = resolve("--attention-backend", "flashinfer", adapter.DECODE_OPTION, "tilelang")
    assert not set(adapter.served_backends(server_args)) & set(adapter.BACKEND_NAMES)
    server_args.check_server_args()


NAIVE = ("--attention-backend", adapter.BACKEND_NAMES[0], "--speculative-algorithm", "NAIVE_EAGLE")


@pytest.fixture
def unset(monkeypatch):
    """The switch that the algorithm stands for, unset before and after."""
    monkeypatch.setenv("NSA_BACKEND_ROUND_GRAPH", "1")
    monkeypatch.delenv("NSA_BACKEND_ROUND_GRAPH")


@pytest.mark.usefixtures("unset")
def test_naive_eagle_is_eagle_with_one_draft_in_one_graph(resolve, parse):
    """The switch is set for its server's check and in its scheduler's process; the caller's environment stays as it was."""
    server_args = resolve(*NAIVE)
    args = adapter.resolved(server_args)
    assert args.speculative_algorithm == "EAGLE"
    assert (args.speculative_num_steps, args.speculative_eagle_topk, args.speculative_num_draft_tokens) == (1, 1, 2)
    problem = round_graph_problem()
    if problem is None:
        server_args.check_server_args()
    else:
        with pytest.raises(ValueError, match=problem):
            server_args.check_server_args()
    assert asked("NSA_BACKEND_ROUND_GRAPH") is None
    words = parse(*NAIVE)
    first, second = (ServerArgs.from_cli_args(words) for _ in range(2))
    assert words.speculative_algorithm == "NAIVE_EAGLE"
    plain = resolve(*NAIVE[:2], *SPECULATIVE)
    assert [naive_eagle.is_marked(pickle.loads(pickle.dumps(one))) for one in (first, second, plain)] == [True, True, False]
    naive_eagle.switch_on(plain)
    assert asked("NSA_BACKEND_ROUND_GRAPH") is None
    naive_eagle.switch_on(server_args)
    assert asked("NSA_BACKEND_ROUND_GRAPH") is True


@pytest.mark.usefixtures("unset")
def test_naive_eagle_with_the_settings_it_has_anyway(resolve):
    options = "--speculative-num-steps 1 --speculative-eagle-topk 1 --speculative-num-draft-tokens 2"
    assert adapter.resolved(resolve(*NAIVE, *options.split())).speculative_num_steps == 1


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize(
    ("option", "value", "has"),
    [
        ("--speculative-num-steps", "3", 1),
        ("--speculative-eagle-topk", "4", 1),
        ("--speculative-num-draft-tokens", "4", 2),
    ],
)
def test_naive_eagle_with_other_settings(resolve, option, value, has):
    with pytest.raises(ValueError, match=f"NAIVE_EAGLE means {option} {has}, and {value} is given: drop {option}"):
        resolve(*NAIVE, option, value)


def test_naive_eagle_without_a_graph(resolve, monkeypatch):
    monkeypatch.setenv("NSA_BACKEND_ROUND_GRAPH", "0")
    with pytest.raises(ValueError, match="is a round in one graph, and NSA_BACKEND_ROUND_GRAPH=0"):
        resolve(*NAIVE)
