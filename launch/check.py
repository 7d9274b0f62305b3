"""The command `tpu-rl check`: run the proofs of the built-in algorithms on one of your own."""

import os
import sys

if __name__ == "__main__":
    # Python puts this folder on the path, where `import evaluate` would find that file here.
    here = os.path.dirname(os.path.realpath(__file__))
    sys.path = [folder for folder in sys.path if folder != here]
    from tpu_rl.commands import cli

    sys.exit(cli.main(["check", *sys.argv[1:]]))
