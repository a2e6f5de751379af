"""What the text must say of the metadata launch alone, and of the launches between the top-k and attention of a layer."""

from collections.abc import Iterator

from quoted import one, rule, spread

MODES = {"decode": "decode", "draft decode, 4 steps": "draft_decode", "target_verify": "target_verify"}
"""Of the newer file, and of the older."""
ALONE = ("top-k", "KV write", "sparse_decode")


@rule("forward_parts_0_5_23", "metadata_launch_0_5_23")
def metadata_launch(before: dict, now: dict) -> Iterator[str]:
    """Every shape of the newer file, beside the version before it, in the parameters that it was served with."""
    chosen = {"column_block": 8192, "num_warps": 4, "row_block": 128}
    older = [r for r in before["metadata"] if chosen.items() <= r.items()]
    shapes = list(dict.fromkeys((r["bs"], r["length"]) for r in now["rows"]))
    assert shapes == list(dict.fromkeys((r["bs"], r["length"]) for r in older))
    assert len(now["rows"]) == len(older) == len(shapes) * len(MODES)
    ratios = []
    for bs, length in shapes:
        cells = []
        for mode, old_name in MODES.items():
            us, was = (one(rows, bs=bs, length=length, mode=m) for rows, m in ((now["rows"], mode), (older, old_name)))
            cells.append(f"{us['us']['served']:.2f} ({was['us']:.1f})")
            ratios.append(us["us"]["served"] / was["us"])
        yield f"| {bs} x {length} | {' | '.join(cells)} |"
    yield f"{min(ratios):.2f} to {max(ratios):.2f} of the version before"
    missed = [
        (row["mode"], row["bs"], row["length"], row["us"]["served"], *row["min_max"]["served"])
        for row in now["rows"]
        if row["us"]["served"] > (3.5 if row["length"] == 131072 else 2.5)
    ]
    ((mode, bs, length, *us),) = missed
    yield "met but for {} at {} x {}, with {:.2f} us ({:.2f} to {:.2f})".format(mode, bs, length, *us)
    every = [row["us"]["served"] for row in now["rows"]]
    single = [row["us"]["served"] for row in now["rows"] if row["bs"] == 1]
    yield f"{spread(single)} us for one request of 4096 tokens and at most {max(every):.2f} for 64 of 131072"


@rule("metadata_launch_0_5_23")
def other_parameters(report: dict) -> Iterator[str]:
    """No variant is quicker in every cell."""
    for name in list(report["variants"])[1:]:
        ratios = [row["us"][name] / row["us"]["served"] for row in report["rows"]]
        assert max(ratios) > 1
        yield f"{name} {spread(ratios)}"


@rule("chain_0_5_23")
def every_chain(report: dict) -> Iterator[str]:
    ways = ("chain", "chain, ordinary launches", "chain without the KV write", "chain without the top-k")
    for row in report["chain"]:
        us = row["us"]
        assert row["kv"] == "bf16"
        alone = [us[name] for name in ALONE]
        cells = [*alone, sum(alone), *(us[way] for way in ways), us["chain, reading ahead"], us["fa3 chain, scheduled once"]]
        yield f"| {row['heads']} | {row['rows']} | {' | '.join(f'{cell:.2f}' for cell in cells)} |"


@rule("chain_0_5_23")
def what_each_way_gives(report: dict) -> Iterator[str]:
    rows = report["chain"]

    def less(way: str, than: str, some: list[dict] = rows) -> str:
        return spread([row["us"][than] - row["us"][way] for row in some])

    def apart(way: str, than: str) -> int:
        return sum(row["min_max"][way][1] < row["min_max"][than][0] for row in rows)

    single = [row for row in rows if row["rows"] == 1]
    yield f"Dependent launches, as served, take {less('chain', 'chain, ordinary launches')} us less than ordinary ones"
    assert apart("chain", "chain, ordinary launches") == len(rows)
    yield f"takes {less('chain', 'chain, ordinary launches')} us off a layer"
    most = max(row["us"]["chain"] - row["us"]["chain without the KV write"] for row in rows)
    yield f"fusing the write into either could take off {most:.2f} us at most"
    yield f"{less('chain', 'chain, ordinary launches', single)} at one row"
    yield f"with nothing to write the chain takes {less('chain without the KV write', 'chain')} us less"
    alone = spread([row["us"]["KV write"] for row in single])
    yield f"{less('chain without the KV write', 'chain', single)} at one row, of a write that takes {alone} alone"
    yield f"without the top-k it takes {less('chain without the top-k', 'chain')} us less"
    assert [row["heads"] for row in single] == [16, 128]
    for way, words in (("KV write", "the KV write"), ("top-k", "the top-k")):
        shares = [100 * (1 - row["us"][f"chain without the {way}"] / row["us"]["chain"]) for row in single]
        yield "{words} {:.0f} and {:.0f} %".format(*shares, words=words)
    yield f"Reading ahead takes {less('chain, reading ahead', 'chain')} us less"
    assert apart("chain, reading ahead", "chain") == 0
    over = [row["us"]["chain"] - sum(row["us"][name] for name in ALONE) for row in rows]
    yield f"{spread(over)} us more than its three kernels alone, added up"
    yield f"{len(rows)} of 16 cells"
