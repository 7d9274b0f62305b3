"""The command `tpu-rl run`: post-train a language model."""

import os
import sys


def main(argv: list[str]) -> int:
    """Run the command with these arguments, and return its exit code."""
    from tpu_rl.commands import run

    return run.main(argv)


if __name__ == "__main__":
    # Python puts this folder on the path, where `import evaluate` would find that file here.
    here = os.path.dirname(os.path.realpath(__file__))
    sys.path = [folder for folder in sys.path if folder != here]
    from tpu_rl.commands import cli

    sys.exit(cli.main(["run", *sys.argv[1:]]))
