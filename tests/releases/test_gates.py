"""Where SGLang names its own backend class: an isinstance check there keeps a feature from every other backend.

A release's new check fails here by file and function, to be looked at before the release is served.
"""

import ast
import re
from pathlib import Path

import sglang

from nsa_backend.adapters.installed import adapter

CLASS = re.compile(r"(Deepseek|Native)SparseAttn(MultiStep)?Backend")

DRAFT_EXTEND_GATE = "srt/speculative/eagle_worker_v2.py:EagleDraftWorker._capture_cuda_graphs"

KNOWN = {
    # Built by name; ours is built in their place.
    "srt/layers/attention/attention_registry.py:create_nsa_backend",
    "srt/layers/attention/attention_registry.py:create_dsa_backend",
    "srt/speculative/draft_utils.py:DraftBackendFactory._create_nsa_decode_backend",
    "srt/speculative/draft_utils.py:DraftBackendFactory._create_nsa_prefill_backend",
    "srt/speculative/draft_utils.py:DraftBackendFactory._create_dsa_decode_backend",
    "srt/speculative/draft_utils.py:DraftBackendFactory._create_dsa_prefill_backend",
    # The built-in backend's own parts.
    "srt/layers/attention/nsa_backend.py:NativeSparseAttnMultiStepBackend.__init__",
    "srt/layers/attention/dsa_backend.py:DeepseekSparseAttnMultiStepBackend.__init__",
    "srt/layers/attention/dsa_backend.py:",
    "srt/layers/attention/dsa/dsa_metadata_manager.py:DSAMetadataManagementMixin._copy_replay_metadata_from_sibling",
    # Checks of the class, which ours passes as a virtual subclass: the draft-extend graph, and prefill graphs off CUDA.
    DRAFT_EXTEND_GATE,
    "srt/model_executor/runner/prefill_cuda_graph_runner.py:PrefillCudaGraphRunner._attn_backend_is_dsa",
}


def uses(node: ast.AST, scope: tuple[str, ...] = ()) -> set[str]:
    """Names of the functions under `node` that read the class, or compare with its name."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        scope = (*scope, node.name)
    names = {
        ast.Name: lambda n: n.id if isinstance(n.ctx, ast.Load) else "",
        ast.Attribute: lambda n: n.attr,
        ast.Constant: lambda n: n.value if isinstance(n.value, str) else "",
    }
    name = names.get(type(node), lambda n: "")(node)
    found = {".".join(scope)} if CLASS.fullmatch(name) else set()
    return found.union(*(uses(child, scope) for child in ast.iter_child_nodes(node)))


def found_in_the_release() -> set[str]:
    root = Path(sglang.__file__).parent
    found = set()
    for path in (root / "srt").rglob("*.py"):
        text = path.read_text()
        if CLASS.search(text):
            found |= {f"{path.relative_to(root)}:{function}" for function in uses(ast.parse(text))}
    return found


def test_every_use_of_the_builtin_class_is_known():
    found = found_in_the_release()
    assert not found - KNOWN
    assert any("attention_registry" in use for use in found), "the scan found nothing where the backend is registered"


def test_draft_extend_is_captured_one_way_or_the_other():
    """Either SGLang names the class and ours passes for it, or the plugin captures draft-extend itself."""
    assert (DRAFT_EXTEND_GATE in found_in_the_release()) != hasattr(adapter, "draft_extend_graph_runner")
