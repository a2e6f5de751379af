"""python -m nsa_backend: look at an installation, decode on the CPU, measure on a GPU, draw what was measured."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

COMMANDS = {
    "doctor": "versions, what the plugin takes over, which kernels can run here; --all: why the others cannot",
    "demo": "decode speculatively on the CPU, with the right draft lengths and with SGLang's one shared length",
    "bench": "metadata, attention, draft, serve, profile, capture or memory: measured on this GPU beside SGLang's own backend",
    "plot": "figures from result files, as SVG and PNG",
}
"""Name to help; each is a module of `nsa_backend.cli` with EXAMPLE, `add_arguments(parser)` and `run(args) -> exit code`."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m nsa_backend", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        module = import_module(f"nsa_backend.cli.{name}")
        command = commands.add_parser(
            name,
            help=text,
            description=module.__doc__,
            epilog=f"example: {module.EXAMPLE}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    args.argv = sys.argv[1:] if argv is None else argv
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
