"""`--warmups round_graphs`, run by SGLang's own loop over warm-ups: commands that name it go on working."""

from __future__ import annotations

import asyncio

import pytest
from sglang.srt.entrypoints import warmup as sglang_warmups

from nsa_backend.adapters.installed import adapter
from nsa_backend.releases import ROUND_WARM_UP


@pytest.mark.parametrize(("words", "offered"), [([], False), (["voice_chat"], False), (["voice_chat,round_graphs"], True)])
def test_it_is_there_for_a_server_that_is_started_with_it(resolve, monkeypatch, caplog, words, offered):
    """SGLang's module of warm-ups is loaded by the process that answers requests, and heavy for any other."""
    caplog.set_level("INFO", "nsa_backend")
    monkeypatch.setattr(sglang_warmups, "_warmup_registry", {})
    options = ["--warmups", *words] if words else []
    resolve("--attention-backend", adapter.BACKEND_NAMES[0], *options).check_server_args()
    assert (ROUND_WARM_UP in sglang_warmups._warmup_registry) == offered
    if offered:
        caplog.clear()
        asyncio.run(sglang_warmups.execute_warmups("null", [ROUND_WARM_UP], None))
        assert caplog.messages == [
            "nsa_backend: --warmups round_graphs can be dropped: rounds are captured before a server is ready"
        ]


def test_several_tokenizer_processes_do_not_know_it(resolve):
    server_args = resolve(
        "--attention-backend", adapter.BACKEND_NAMES[0], "--warmups", "round_graphs", "--tokenizer-worker-num", "2"
    )
    with pytest.raises(ValueError, match="pass --tokenizer-worker-num 1, or drop the warm-up"):
        server_args.check_server_args()
