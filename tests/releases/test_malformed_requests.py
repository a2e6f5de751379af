"""Malformed requests over HTTP, by SGLang's own steps before a request is in a batch, which are the same with every backend."""

from __future__ import annotations

import json
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams
from soak_faults import MALFORMED, _asked

VOCABULARY = 4096


def refused(body: dict | bytes) -> str | None:
    """SGLang's sentence, or None where the request goes on to the scheduler."""
    try:
        asked = json.loads(body) if isinstance(body, bytes) else body
        if find_spec("sglang.srt.entrypoints.api_contract"):
            contract = import_module("sglang.srt.entrypoints.api_contract")
            if error := contract.generate_contract_error(asked):
                return error
        request = GenerateReqInput(**asked)
        request.normalize_batch_and_arguments()
        sampling = SamplingParams(**request.sampling_params)
        sampling.normalize(None)
        sampling.verify(VOCABULARY)
    except (ValueError, TypeError) as error:
        return str(error)
    return None


OF_THE_POOL = {"more than the pool", "a longer answer than the context"}
"""Held against the model and its pool by SGLang's tokenizer manager, which a server alone has."""


@pytest.mark.parametrize("name", sorted(MALFORMED.keys() - OF_THE_POOL))
def test_a_request_is_refused_or_valid(name):
    assert (refused(MALFORMED[name]) is None) == (name == "a huge top-k"), name


def test_a_top_k_that_no_int32_holds_ends_every_server_of_sglang():
    """Nothing refuses it, and the scheduler makes a tensor of int32 of it: a defect of SGLang's, of every backend."""
    body = _asked(sampling={"temperature": 1.0, "top_k": 2**31})
    assert refused(body) is None
    with pytest.raises(RuntimeError, match="without overflow"):
        torch.tensor([body["sampling_params"]["top_k"]], dtype=torch.int32)
