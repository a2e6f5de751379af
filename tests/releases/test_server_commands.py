"""Every server command of the benchmarks and of the end-to-end tests, as the installed release parses it on either side.

The built-in side's parser has no options of ours: on 0.5.20 and later it knows the dsa spellings alone.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from in_a_script import answers

from nsa_backend.adapters.installed import adapter
from nsa_backend.benchmarks.checkpoints import faithful, ranks
from nsa_backend.benchmarks.commands import capture, draft, profile, rank_serve, serve
from nsa_backend.benchmarks.commands.own_model import OwnModel
from nsa_backend.benchmarks.reports.rank_rows import title_of
from nsa_backend.benchmarks.servers import pairs, server, server_options, sides
from nsa_backend.benchmarks.servers.parallel import parsed as parallel
from nsa_backend.benchmarks.servers.sides import checkpoint_of, options_for
from nsa_backend.cli.bench import OPTIONS
from nsa_backend.releases import installed

ON_FOUR_GPUS = {"tp4": (4, 1), "dp4": (4, 4), "dp2-tp2": (4, 2)}
"""GPUs, and ranks of attention."""
ON_TWO_GPUS = ("tp2-ep", "dp2-ep", "cp2", "dcp2", "pd", "pp2")
"""What 0.5.23 alone is asked for; with drafts, but for pp2, which needs a switch for them."""
LONG_CONTEXTS = Path(__file__).resolve().parents[2] / "docs" / "long_contexts.md"
LONG_CONTEXTS_COMMAND = "the page on long contexts, N = 3"
MANY = [(batch, 300) for batch in (1, 8, 64, 256)]
DEFAULT_PREFILL = ["--chunked-prefill-size", str(server_options.CHUNK)]


def options_of(bench, monkeypatch, **given) -> list[list[str]]:
    """What `bench` starts its servers with, by its own choice of cells."""
    seen = []

    class Servers:
        def __init__(self, folder, port, shapes, new_tokens, sides=None):
            seen.append([*options_for(shapes, new_tokens), *pairs.meeting(port)])

        def close(self):
            pass

    monkeypatch.setattr(bench, "Servers", Servers)
    options = (option[2:].replace("-", "_") for option in OPTIONS)
    chosen = dict.fromkeys(options) | {"quick": False} | given
    with ExitStack() as resources:
        bench.cells(argparse.Namespace(**chosen), resources)
    return seen


def rank_command(name: str, folder: Path, word: str = "tp1") -> dict[str, list[str]]:
    together = parallel(word)
    words = [*options_for([(8, 4096)], rank_serve.TOKENS, together, bounded=word == "tp1")]
    words += rank_serve.alone(139 * ranks.GIB)
    command = server.command(checkpoint_of(name, folder, together.gpus), 25003, 3)[3:]
    return {f"{title_of(name, word)}, N = 3": [*command, *words, *(() if word == "tp1" else pairs.meeting(25003))]}


@pytest.fixture(scope="module")
def commands(tmp_path_factory) -> dict[str, list[str]]:
    """By name, what follows `python -m sglang.launch_server`."""
    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / "config.json").write_text(json.dumps(faithful.config(faithful.SHAPES["wide"])))
    with pytest.MonkeyPatch.context() as monkeypatch:
        options = {bench.__name__.rsplit(".", 1)[1]: options_of(bench, monkeypatch)[0] for bench in (serve, draft, profile)}
    options |= {f"capture {requests}": capture.options_for(requests) for requests in capture.REQUESTS}
    options["readme"] = []
    options["own model"] = OwnModel(
        folder, [[1]], [1, 8], 256, folder, 1, ["--tp-size", "1", "--max-running-requests", "16"]
    ).options()
    options["rejections on fp8"] = [
        *sides.SIZES, "--kv-cache-dtype", "fp8_e4m3", *server_options.implementations("flashmla_kv", "flashmla_kv"),
    ]  # fmt: skip
    options["every prefill graph"] = DEFAULT_PREFILL
    for word in ON_FOUR_GPUS:
        options[f"serve {word}"] = [*options_for(MANY, serve.TOKENS, parallel(word)), *DEFAULT_PREFILL]
    for word in ON_TWO_GPUS if installed() == "0.5.23" else ():
        options[f"serve {word}"] = options_for(MANY, serve.TOKENS, parallel(word))
    if shared := options.pop("serve pd", None):
        options |= {
            f"serve pd, {mode}": [*shared, *pairs.role(mode, 26000, gpu)] for mode, gpu in (("prefill", 0), ("decode", 1))
        }
    found = {
        f"{name}, N = {steps}": [*server.command(folder, 25000 + steps, steps)[3:], *given]
        for name, given in options.items()
        for steps in ((0,) if name == "serve pp2" else (0, 1, 3))
    }
    for name in ranks.RANKS:  # a server with a GPU to itself, as `rank_serve` starts it
        with suppress(SystemExit):
            ranks.check_release(name)
            found |= rank_command(name, tmp_path_factory.mktemp(name))
    if installed() == "0.5.23":
        for word in ("tp2", "dcp2", "dcp8"):
            found |= rank_command("v3.2-tp8", tmp_path_factory.mktemp(word), word)
        of_page = re.search(
            r"^ {4}python -m sglang\.launch_server --model-path \S+(.*?)\n\n", LONG_CONTEXTS.read_text(), re.M | re.S
        )
        words = shlex.split(of_page[1].replace("\\\n", " "))
        found[LONG_CONTEXTS_COMMAND] = ["--model-path", str(folder), *words, "--port", "25003"]
    return found


@pytest.fixture(scope="module")
def both_parsed(commands) -> dict[str, Future]:
    """By side, what comes of all commands with our plugin or without it; both processes are started at once."""
    with ThreadPoolExecutor() as pool:
        asked = list(commands.values())
        return {
            side: pool.submit(answers, "parsed_commands.py", asked, NSA_BACKEND_DISABLE=disabled)
            for side, disabled in server.BACKENDS.items()
        }


@pytest.fixture(scope="module", params=[pytest.param(side, marks=pytest.mark.slow) for side in server.BACKENDS])
def parsed(request, commands, both_parsed) -> dict[str, dict]:
    """What the installed release makes of each command, with our plugin or without it."""
    return dict(zip(commands, both_parsed[request.param].result(), strict=True))


def test_both_sides_serve_the_same_configuration(parsed, request):
    """But for a divided context with nothing named, which SGLang by itself would give to a kernel of Blackwell's."""
    alone = {LONG_CONTEXTS_COMMAND: "trtllm"} if request.node.callspec.params["parsed"] == "builtin" else {}
    for name, found in parsed.items():
        steps = int(name[-1])
        assert set(found["backends"]) <= set(adapter.BACKEND_NAMES), name
        assert found["implementation"] == alone.get(name, "flashmla_kv" if "fp8" in name else "fa3"), name
        assert (found["steps"] or 0, found["port"]) == (steps, 25000 + steps), name


def test_serve_has_room_for_its_largest_cell_and_graphs_for_its_batches(parsed):
    found = parsed["serve, N = 3"]
    assert found["max_total_tokens"] >= 32 * (32768 + serve.TOKENS)
    assert found["max_running_requests"] == 32
    assert not found["cache"]
    assert set(serve.BATCHES) <= set(found["decode"]) <= set(server_options.MEASURED_BATCHES)


def test_captures_are_those_of_a_default_server_for_as_many_requests(parsed):
    few, many = (parsed[f"capture {requests}, N = 3"] for requests in capture.REQUESTS)
    default = parsed["readme, N = 3"]
    assert (few["max_running_requests"], many["max_running_requests"]) == capture.REQUESTS
    assert max(few["decode"]) >= 48
    assert max(many["decode"]) >= 160  # of a GPU whose memory nobody knows; more on one that is there
    assert set(parsed["serve, N = 3"]["decode"]) < set(default["decode"]) <= set(few["decode"]) <= set(many["decode"])
    assert few["prefill"] == many["prefill"] == default["prefill"]


@pytest.mark.parametrize("word", ON_FOUR_GPUS)
def test_serve_on_four_gpus_has_room_for_what_comes_to_a_rank(parsed, word):
    found = parsed[f"serve {word}, N = 3"]
    ranks = ON_FOUR_GPUS[word][1]
    assert (found["tensor_parallel"], found["attention_ranks"]) == ON_FOUR_GPUS[word]
    assert found["prefilled_at_once"] == server_options.CHUNK // ranks
    assert found["max_running_requests"] // ranks >= 256 // ranks
    assert found["max_total_tokens"] >= 256 // ranks * (300 + serve.TOKENS)
    assert {-(-batch // ranks) for batch, _ in MANY} <= set(found["decode"])
    if server_options.names().prefill_graphs is not None:
        assert max(found["prefill"]) <= found["prefilled_at_once"]


@pytest.mark.skipif(installed() != "0.5.23", reason="an older release has not all of these")
def test_what_two_gpus_make(parsed):
    for mode, gpu in (("prefill", 0), ("decode", 1)):
        found = parsed[f"serve pd, {mode}, N = 3"]
        assert (found["disaggregation"], found["first_gpu"], found["tensor_parallel"]) == ([mode, "nixl", 26000], gpu, 1)
    for word, attention_ranks, experts in (("tp2-ep", 1, 2), ("dp2-ep", 2, 2), ("cp2", 1, 1), ("dcp2", 1, 1)):
        found = parsed[f"serve {word}, N = 3"]
        assert (found["tensor_parallel"], found["attention_ranks"], found["experts"]) == (2, attention_ranks, experts), word
    assert parsed["serve cp2, N = 3"]["divided_prefill"] == parsed["serve dcp2, N = 3"]["divided_context"] == 2
    assert (parsed["serve pp2, N = 0"]["stages"], parsed["serve pp2, N = 0"]["tensor_parallel"]) == (2, 1)


@pytest.mark.skipif(installed() != "0.5.23", reason="an older release divides no KV")
def test_ranks_of_one_server_divide_what_they_are_told_to_and_take_all_memory(parsed):
    for word, gpus, parts in (("tp2", 2, 1), ("dcp2", 2, 2), ("dcp8", 8, 8)):
        found = parsed[f"v3.2-tp8, {word}, N = 3"]
        assert (found["tensor_parallel"], found["divided_context"], found["max_total_tokens"]) == (gpus, parts, None), word
    page = parsed["the page on long contexts, N = 3"]
    assert (page["tensor_parallel"], page["divided_context"]) == (8, 8)
    assert page["prefill"] == parsed["readme, N = 3"]["prefill"] != []
    assert parsed["v3.2-tp8, N = 3"]["max_total_tokens"] >= 8 * (4096 + rank_serve.TOKENS)


def test_prefill_runs_in_the_graphs_of_a_default_server(parsed):
    """Fewer are captured, each of them one that a server captures by default, and every prefill pads to what it would there."""
    captured, default = parsed["serve, N = 0"]["prefill"], parsed["every prefill graph, N = 0"]["prefill"]
    if server_options.names().prefill_graphs is None:
        assert captured is default is None
        return
    largest = max(default)
    assert server_options.largest_prefill_graph() == largest
    every = range(1, largest + 1)
    assert [server_options.graph_tokens(n) for n in every] == [min(s for s in default if s >= n) for n in every]
    assert set(captured) < set(default)
    assert len(captured) <= 10
    for shape in ((1, 300), (8, 300), (32, 300), (8, 4096), (32, 32768), (1, 131072)):
        for tokens in server_options.chunks(*shape):
            graphs = [min((s for s in sizes if s >= tokens), default=None) for sizes in (captured, default)]
            assert graphs[0] == graphs[1]


def test_the_words_of_a_user_come_last(parsed):
    found = parsed["own model, N = 3"]
    assert found["max_running_requests"] == 16
    assert found["decode"] == [1, 8]
    assert not found["cache"]
