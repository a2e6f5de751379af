"""End-to-end cases of a layer: its front in two launches, and rows of a request or of a prompt together."""

from __future__ import annotations

from functools import partial

from case import Case
from engine_options import BY_ROWS, DEFAULT_SUMS, DP_2, FLOORS, FOUR_GPUS, FP8, PREFILL_SIZES, SAVED, STANDARD, TWO_GPUS

FRONT = {"NSA_BACKEND_LAYER_FRONT": "1"}
SHORT = FRONT | {"NSA_BACKEND_SHORT_GRAPHS": "1"}
WHOLE_PREFILLS = FRONT | {"NSA_BACKEND_SHORT_PREFILLS": "1"}
PAIRED = {"NSA_BACKEND_PAIRED_LOGITS": "1"}
BOTH = FRONT | PAIRED
ACROSS = "across 2048 tokens"
MANY = (*STANDARD, "32x300", "shared prefix", "short")
SUMMED = TWO_GPUS | DEFAULT_SUMS | BY_ROWS

front = partial(Case, environment=FRONT, builtin_environment={}, says="layers is two launches", releases="==0.5.23")
glm_front = partial(front, steps=3, workloads=STANDARD, model="glm-5.1", floor_of_all=0.95)
together = partial(
    Case, steps=3, environment=PAIRED, builtin_environment={}, decode="sparse_verify", floors=FLOORS, releases=">=0.5.17"
)

alone = partial(Case, steps=3, decode="sparse_verify", floors=FLOORS, releases=">=0.5.17")

LAYER_CASES = [
    front("n0 fa3, front in two launches", 0, MANY),
    front("n0 fa3, graphs of short requests", 0, (*MANY, ACROSS), environment=SHORT),
    # One graph where no request can come to 2048 tokens in a round, and another one from there on.
    *(
        front(
            f"{of}, rounds of short requests",
            3,
            ("8x300", ACROSS, "4x3000", "short"),
            environment=SHORT,
            replays="short greedy requests",
            floor_of_all=0.95,
            **more,
        )
        for of, more in {
            "n3 fa3": {},
            "n3 fp8, flashmla_kv": {"decode": "flashmla_kv", "engine": FP8},
            "n3 fa3, FP8 weights": {"shape": "fp8-weights"},
            "glm-5.2 n3 fa3": {"model": "glm-5.2"},
        }.items()
    ),
    front(
        "two GPUs, DP attention, n0 fa3, graphs of short requests",
        0,
        ("8x300", "unequal ranks", ACROSS, "4x3000"),
        environment=SHORT,
        engine=TWO_GPUS | DP_2,
        gpus=2,
        says_times=2,
    ),
    # Each rank chooses for itself: with unequal ones a graph of short requests meets one of long ones, or an idle rank's.
    *(
        front(
            f"two GPUs, DP attention, {of}, rounds of short requests",
            3,
            ("1x300", "8x300", "unequal ranks", ACROSS, "4x3000", "short"),
            environment=SHORT,
            replays="short greedy requests",
            floor_of_all=0.95,
            gpus=2,
            says_times=2,
            **{"engine": TWO_GPUS | DP_2} | more,
        )
        for of, more in {
            "n3 fa3": {},
            "n3 fp8, flashmla_kv": {"decode": "flashmla_kv", "engine": TWO_GPUS | DP_2 | FP8},
        }.items()
    ),
    # Up to 1024 new tokens, some behind a cached prefix, which is long in chats; others are captured in pieces.
    *(
        front(
            f"{of}, short prefills in one graph",
            workloads=("1x300", "short", "shared prefix", "turns of chats", "8x300"),
            says="a prefill ran in one graph",
            **{"steps": 3, "floor_of_all": 0.95, "engine": PREFILL_SIZES, "environment": WHOLE_PREFILLS} | more,
        )
        for of, more in {
            "n0 fa3": {"steps": 0, "floor_of_all": 0.0},
            "n3 fa3": {},
            "n3 fp8, flashmla_kv": {"decode": "flashmla_kv", "engine": PREFILL_SIZES | FP8},
            "glm-5.2 n3 fa3": {"model": "glm-5.2"},
            # By default, of all sizes that SGLang captures.
            "n3, nothing named": {
                "shape": "faithful-16-heads",
                "engine": BY_ROWS | {"cuda_graph_backend_prefill": "breakable"},
                "environment": FRONT,
            },
            # Whose products of few rows are divided.
            "n3 fa3, FP8 weights": {"shape": "fp8-weights"},
            # Whose decode is another, as rows of a whole prefill are not.
            "n3 flashmla_sparse": {"decode": "flashmla_sparse"},
            "n3 sparse_decode": {"decode": "sparse_decode"},
            "n3 sparse_verify": {"decode": "sparse_verify", "shape": "faithful-16-heads"},
            "EAGLE3": {"dense_draft": True, "floor_of_all": 2.6 / 4},
            "memory released and resumed": {"action": "memory was released and resumed", "engine": PREFILL_SIZES | SAVED},
            # Whose sums over ranks are in the graph too.
            "two GPUs, tensor parallel, n3 fa3": {"gpus": 2, "engine": PREFILL_SIZES | TWO_GPUS},
            "two GPUs, expert parallel, n3 fa3": {"gpus": 2, "engine": PREFILL_SIZES | TWO_GPUS | {"ep_size": 2}},
            "two GPUs, tensor parallel, n3 fa3, custom all-reduce": {
                "gpus": 2,
                "engine": PREFILL_SIZES | TWO_GPUS | {"disable_custom_all_reduce": False},
            },
            "two GPUs, tensor parallel, n3 fa3, default all-reduce": {
                "gpus": 2,
                "engine": PREFILL_SIZES | TWO_GPUS | DEFAULT_SUMS,
            },
        }.items()
    ),
    *(front(f"n{n} fa3, front in two launches", n, MANY, floor_of_all=0.95) for n in (1, 3, 5)),
    front("n3 fp8, flashmla_kv, front in two launches", 3, MANY, decode="flashmla_kv", engine=FP8, floor_of_all=0.95),
    glm_front("glm-5.1 n3 fa3, front in two launches"),
    glm_front("glm-5.1 n3 fp8, front in two launches", decode="flashmla_kv", engine=FP8),
    # Whose products are divided, as their weights are block FP8, of both forms of scales.
    front("n3 fa3, FP8 weights, front in two launches", 3, MANY, shape="fp8-weights", floor_of_all=0.95),
    glm_front("glm-5.1 n3 fa3, FP8 weights, front in two launches", shape="fp8-weights"),
    # Whose experts are one launch in every captured size, beyond, and in short prefills, and in long ones products of ours.
    front(
        "n3, nothing named, experts of a rank",
        3,
        ("1x300", *MANY, "64x300"),
        shape="experts-of-a-rank",
        engine=BY_ROWS,
        floor_of_all=0.95,
        environment={},
        says="experts of 1025 tokens or more have our second product, of 2048 or more both, 256 experts of 256",
    ),
    # Whose experts of up to four tokens are two launches, and routers one, in captured decode and rounds, unasked.
    *(
        front(
            f"n{n}, nothing named, experts of few tokens",
            n,
            ("1x300", "8x300", "short"),
            shape="experts-of-a-rank",
            engine=BY_ROWS,
            environment={},
            says="experts of up to 4 tokens are two launches, 256 experts of 256 and the shared one",
            **floors,
        )
        for n, floors in ((0, {}), (3, {"floor_of_all": 0.95}))
    ),
    # Divided among GPUs, whose launch has no rows for another one's.
    *(
        front(
            f"two GPUs, {of}, experts of a rank",
            3,
            workloads,
            gpus=2,
            shape="experts-of-a-rank",
            engine=BY_ROWS | TWO_GPUS | {"ep_size": 2} | options,
            floor_of_all=0.95,
            environment={"NSA_BACKEND_FEW_EXPERTS": "1"},
            says="experts of 8 to 1024 tokens have both products in one launch, 128 experts of 256",
        )
        for of, workloads, options in (
            ("expert parallel", MANY, {}),
            ("DP attention, expert parallel", ("8x300", "unequal ranks"), DP_2),
        )
    ),
    front("glm-5.2 n5 fa3, front in two launches", 5, STANDARD, model="glm-5.2", floor_of_all=0.95),
    front("n3 fa3, front in two launches, 61 layers", 3, STANDARD, shape="deep", floor_of_all=0.95),
    front("weights updated, front in two launches", 3, STANDARD, action="weights were updated", floors=FLOORS),
    front("two GPUs, tensor parallel, front in two launches", 3, STANDARD, engine=TWO_GPUS, gpus=2, floors=FLOORS),
    # As a server of several GPUs has it that says nothing of all-reduce, with a rank's 16 heads, tiles and block FP8 weights.
    *(
        front(
            f"two GPUs, {of}, default all-reduce",
            3,
            ("1x300", *MANY),
            gpus=2,
            floor_of_all=0.95,
            **{"engine": SUMMED, "environment": {}} | more,
        )
        for of, more in {
            "tensor parallel": {"shape": "faithful-32-heads"},
            "tensor parallel, glm-5.1": {"model": "glm-5.1"},
            "tensor parallel, FP8 weights": {"shape": "fp8-weights"},
            "expert parallel": {"engine": SUMMED | {"ep_size": 2}},
            "expert parallel, one graph a round": {
                "engine": SUMMED | {"ep_size": 2},
                "environment": {"NSA_BACKEND_ROUND_GRAPH": "1"},
                "replays": "greedy requests",
            },
        }.items()
    ),
    # Ranks divide the indexer's work of long prefills: eager ones, and those in pieces, behind a prefix.
    *(
        front(
            f"two GPUs, divided indexer{words}",
            3,
            ("8x300", "1x6000", "8x6000"),
            gpus=2,
            floor_of_all=0.95,
            says="ranks divide the indexer's work",
            says_times=2,
            **{"engine": TWO_GPUS | PREFILL_SIZES, "environment": {}} | more,
        )
        for words, more in {
            "": {},
            ", in pieces": {"engine": TWO_GPUS | PREFILL_SIZES | {"chunked_prefill_size": 2048}},
            ", glm-5.1": {"model": "glm-5.1", "environment": {"NSA_BACKEND_DIVIDED_INDEXER": "1"}},
            ", default all-reduce": {"engine": SUMMED | PREFILL_SIZES},
        }.items()
    ),
    # Whose group of attention has no communicator of its own, so that torch's gathers.
    front(
        "four GPUs, DP attention 2, divided indexer, in pieces",
        3,
        ("8x300", "8x6000"),
        gpus=4,
        floor_of_all=0.95,
        environment={"NSA_BACKEND_DIVIDED_INDEXER": "1"},
        engine=FOUR_GPUS | DP_2 | PREFILL_SIZES | {"chunked_prefill_size": 4096},  # of both ranks together
        says="ranks divide the indexer's work",
        says_times=4,
    ),
    # Four rows of 16 heads, or of 8, in a tile; of a prompt four or eight.
    *(
        alone(f"{heads} heads, n3 sparse_verify", workloads=(*MANY, "32x3000"), shape=f"faithful-{heads}-heads")
        for heads in (16, 8)
    ),
    *(
        alone(
            f"{heads} heads, n3 sparse_prefill",
            workloads=(*MANY, "32x3000"),
            shape=f"faithful-{heads}-heads",
            decode="fa3",
            engine={"nsa_prefill_backend": "sparse_prefill"},
            ours_alone=("nsa_prefill_backend",),
        )
        for heads in (16, 8)
    ),
    alone("16 heads, n3 fp8 sparse_verify", workloads=(*MANY, "32x3000"), shape="faithful-16-heads", engine=FP8),
    alone(
        "16 heads, n3 fp8 sparse_prefill",
        workloads=(*MANY, "32x3000"),
        shape="faithful-16-heads",
        decode="flashmla_kv",
        engine=FP8 | {"nsa_prefill_backend": "sparse_prefill"},
        ours_alone=("nsa_prefill_backend",),
    ),
    # What a server on an H200 has that names nothing.
    *(
        alone(
            f"{heads} heads, n{steps}{' fp8' * fp8}, implementations by rows",
            steps=steps,
            workloads=(*MANY, "32x3000"),
            shape=f"faithful-{heads}-heads",
            decode="auto",
            engine=(FP8 if fp8 else {}) | BY_ROWS,
            says="decode=auto, prefill=auto",
            releases="==0.5.23",
            **({} if steps == 3 else {"floors": {}, "floor_of_all": 0.95}),
        )
        for heads, steps, fp8 in ((16, 3, False), (8, 3, False), (16, 5, False), (16, 3, True))
    ),
    # GLM-5's ranks of eight have 8 heads, and decode by sparse_decode then.
    *(
        alone(
            f"glm-5.1, 8 heads, n{steps}, implementations by rows",
            steps=steps,
            workloads=MANY,
            model="glm-5.1",
            shape="faithful-8-heads",
            decode="auto",
            engine=BY_ROWS,
            says="decode=auto, prefill=auto",
            releases="==0.5.23",
            floors={},
            **({"floor_of_all": 0.95} if steps else {}),
        )
        for steps in (3, 0)
    ),
    # 256 rows to score, more than an H200 has SMs: two by two they are not, and one by one they are.
    *(
        Case(
            f"n3 fa3, 64 requests, {words}",
            3,
            ("64x300",),
            environment={"NSA_BACKEND_PAIRED_LOGITS": switch},
            builtin_environment={},
            engine={"max_running_requests": 64, "cuda_graph_bs": [1, 8, 64]},
            floor_of_all=0.95,
            releases="==0.5.23",
        )
        for words, switch in (("one by one", "0"), ("two by two", "1"))
    ),
    together("n3 sparse_verify, paired logits", workloads=MANY),
    together("n3 fp8, sparse_verify, paired logits", workloads=MANY, engine=FP8),
    together("n5 sparse_verify, paired logits", steps=5, workloads=STANDARD, floors={}, floor_of_all=0.95),
    together("glm-5.1 n3 sparse_verify, paired logits", workloads=STANDARD, model="glm-5.1"),
    together("n3 sparse_verify, paired logits, front in two launches", workloads=MANY, environment=BOTH, releases="==0.5.23"),
]
