"""The command `tpu-rl watch`: draw a run in the terminal."""

import importlib
import os
import sys

COMMAND = "watch"


def main(argv: list[str]) -> int:
    """Run the command in this process, and return its exit code."""
    return importlib.import_module("tpu_rl.commands.cli").command(COMMAND).main(argv)


if __name__ == "__main__":
    # Python puts this folder on the path, where `import evaluate` would find that file here.
    here = os.path.dirname(os.path.realpath(__file__))
    sys.path = [folder for folder in sys.path if folder != here]
    from tpu_rl.commands import cli

    sys.exit(cli.main([COMMAND, *sys.argv[1:]]))
