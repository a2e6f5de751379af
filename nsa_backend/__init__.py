"""DeepSeek sparse attention for SGLang with multi-token prediction whose drafts attend to what they should."""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path

__version__ = "0.1.0"


def _map_folder_of_a_checkout(name: str) -> None:
    """Make ../`name` importable as nsa_backend.`name`, as the wheel's package-dir does.

    An editable install cannot: setuptools' finder serves a namespace package only at the top level, and kernels/ may not
    have an __init__.py (it would shadow PyPI's `kernels` for a server started in the checkout).
    """
    package = Path(__file__).resolve().parent
    if (package / name).is_dir():
        return
    spec = ModuleSpec(f"{__name__}.{name}", None, is_package=True)
    spec.submodule_search_locations = [str(package.parent / name)]
    sys.modules[spec.name] = module_from_spec(spec)


for _name in ("kernels", "benchmarks"):
    _map_folder_of_a_checkout(_name)
