"""Speculative rounds in one CUDA graph, on the releases of this generation that have them.

`served` says which servers and batches have them, `by_release` how SGLang's releases differ, `capture` and `own_round` what is
captured, `worker` what SGLang calls, `ranks` what differs under DP attention, `pages` what the host prepares. Beneath are
`nsa_backend.round_graph`, which knows nothing of SGLang, and its kernels `round_tensors`; `nsa_backend.adapters.naive_eagle` is
the option that asks for them.
"""
