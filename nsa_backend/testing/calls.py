"""The calls that the installed generation of SGLang makes to a backend: `nsa_calls` or `dsa_calls`, as its adapter is.

Both offer the same names:

- `LENGTHS_DTYPE`: of the static lengths that SGLang's graph runners read;
- `publish(num_steps, num_draft_tokens, decode=, prefill=)`: set the options; returns what a model runner knows of them;
- `choose(runner, decode=, prefill=)`: other implementations for the backends that are built next;
- `builtin()`: SGLang's own backends; `quantize_k_cache()`: its packing of an FP8 KV cache;
- `mla_pool(dtype, packed_dim, device)`: SGLang's KV pool of one layer, for its write of new tokens;
- `one_rank()`: around that write, in a process without SGLang's parallel groups;
- `topk_plan(lengths)`: its plan of the top-k v2 kernel, where it has that kernel (0.5.17 on);
- `host_lengths(seq_lens)`: the fields of a batch that say the lengths on the host;
- `draft_factory(runner, num_steps)`: SGLang's factory of draft backends;
- `batch_fields(model)`, `attention_backend(batch)`, `running(backend)`: how a forward finds its pools and its backend;
- `before_capture`, `at_graph_head`, `before_replay`: what SGLang calls around the graph of one forward;
- `before_round_capture`, `at_round_head`, `before_round_replay`: the same around the graph of a draft round;
- `replay_call`, `launch_call`, `round_replay_call`, `round_launch_call`: what is to be timed as a function of nothing, its
  arguments made once: the call before a replay, and the metadata launch that the graph holds;
- `worker_fields(num_requests, num_steps)`: what SGLang's `draft_forward` reads from its worker, beyond what all releases do;
- `step_batch(batch)`: what SGLang's model runner makes of a draft step's batch before the model sees it.
"""

from __future__ import annotations

from importlib import import_module

from nsa_backend.adapters.installed import adapter

calls = import_module(f"nsa_backend.testing.{adapter.BACKEND_NAMES[0]}_calls")
