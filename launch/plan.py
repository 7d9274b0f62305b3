"""The command `tpu-rl plan`: plan a run without an accelerator."""

import os
import sys

if __name__ == "__main__":
    # Python puts this folder on the path, where `import evaluate` would find that file here.
    here = os.path.dirname(os.path.realpath(__file__))
    sys.path = [folder for folder in sys.path if folder != here]
    from tpu_rl.commands import cli

    sys.exit(cli.main(["plan", *sys.argv[1:]]))
