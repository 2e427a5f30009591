"""python -m deepcompile.plan: the planner's commands, plan and simulate."""

import sys
from collections.abc import Sequence

from . import command


def main(argv: Sequence[str] | None = None, program: str = "python -m deepcompile.plan") -> int:
    """Runs one command; the exit status is its result. ``program`` is how the user called it."""
    status, out, error = command(list(sys.argv[1:] if argv is None else argv), program)
    sys.stdout.write(out)
    sys.stderr.write(error)
    return status


if __name__ == "__main__":
    sys.exit(main())
