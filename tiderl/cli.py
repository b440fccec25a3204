"""The command `tiderl`: one word a job, each imported only when it is asked for.

Invariants (tests/unit/test_cli.py):

1. `tiderl --help` loads neither torch nor a backend.
2. A `UserError` ends as one paragraph on stderr and exit code 2, Ctrl-C as exit code 130; a bug ends as a traceback.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from tiderl.errors import UserError

#: Words, what they do, and the module whose `add_arguments(parser)` and `run(arguments) -> int` do it.
_COMMANDS = (
    (("env", "serve"), "Serve an environment over HTTP.", "tiderl.envs.server"),
    (("model", "tiny"), "Make a tiny model that can be trained on a CPU.", "tiderl.agent.tiny_model"),
    (
        ("replay",),
        "Feed a run's journal to a fresh scheduling core and compare every decision.",
        "tiderl.coordinator.replay",
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code (argparse itself leaves by `SystemExit` for --help and misuse)."""
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = _parser(words).parse_args(words)
    try:
        return int(importlib.import_module(arguments.module).run(arguments))
    except UserError as error:
        print(f"tiderl: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of all commands; only the one that `words` names has its arguments, because they need its module."""
    parser = argparse.ArgumentParser(
        prog="tiderl", description="GRPO for LLM agents, scheduled trajectory by trajectory."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    groups: dict[str, argparse._SubParsersAction[argparse.ArgumentParser]] = {}
    for (first, *rest), summary, module in _COMMANDS:
        parent = commands
        if rest:
            if first not in groups:
                group = commands.add_parser(first, help=summary, description=summary)
                groups[first] = group.add_subparsers(required=True, metavar="COMMAND")
            parent = groups[first]
        command = parent.add_parser(rest[0] if rest else first, help=summary, description=summary)
        command.set_defaults(module=module)
        if list(words[: 1 + len(rest)]) == [first, *rest]:
            importlib.import_module(module).add_arguments(command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
