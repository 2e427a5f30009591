"""``python -m deepcompile`` (installed: ``deepcompile``)."""

from __future__ import annotations

import argparse
import pathlib
import sys

from deepcompile._version import __version__
from deepcompile.engine.checkpoint import CheckpointError, consolidate
from deepcompile.plan.__main__ import main as planner
from deepcompile.runtime import doctor

#: Commands that the planner parses itself, with their help texts.
_PLANNER = {
    "plan": "plan a step graph that is written in a file",
    "simulate": "predict the step of a known model on a described machine",
}


def _program() -> str:
    """The program's name for help texts: ``deepcompile`` if installed, ``python -m deepcompile`` in a source tree."""
    called = pathlib.Path(sys.argv[0]).name
    return called if called == "deepcompile" else "python -m deepcompile"


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in _PLANNER:
        return planner(arguments, _program())
    parser = argparse.ArgumentParser(
        prog=_program(), description="ZeRO-1, 2 and 3 for PyTorch: checkpoints, this machine, and the planner."
    )
    parser.add_argument("--version", action="version", version=f"deepcompile {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("consolidate", help="whole parameters of a checkpoint as one safetensors file")
    one.add_argument("folder", help="the folder that was given to engine.save_checkpoint")
    one.add_argument("out", help="the file to write, for example model.safetensors")
    one.add_argument("--name", help="which checkpoint of the folder; the latest when left out")
    commands.add_parser("doctor", help="what is active on this machine: CUDA, NCCL, shared memory")
    for name, meaning in _PLANNER.items():
        commands.add_parser(name, help=meaning)
    options = parser.parse_args(arguments)
    if options.command == "doctor":
        return doctor.main()
    try:
        count = consolidate(options.folder, options.out, options.name)
    except (CheckpointError, OSError, ValueError) as error:
        print(f"deepcompile: {error}", file=sys.stderr)
        return 1
    print(f"{count} tensors written to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
