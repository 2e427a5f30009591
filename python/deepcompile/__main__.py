"""``python -m deepcompile`` (installed: ``deepcompile``)."""

from __future__ import annotations

import argparse
import sys

from deepcompile.checkpoint import CheckpointError, consolidate


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="deepcompile", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("consolidate", help="whole parameters of a checkpoint as one safetensors file")
    one.add_argument("folder", help="the folder that was given to engine.save_checkpoint")
    one.add_argument("out", help="the file to write, for example model.safetensors")
    one.add_argument("--name", help="which checkpoint of the folder; the latest when left out")
    options = parser.parse_args(arguments)
    try:
        count = consolidate(options.folder, options.out, options.name)
    except (CheckpointError, OSError, ValueError) as error:
        print(f"deepcompile: {error}", file=sys.stderr)
        return 1
    print(f"{count} tensors written to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
