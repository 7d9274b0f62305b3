"""A run outlives whatever reads what it says."""

import subprocess
import sys

import pytest

TALKER = """
import pathlib, sys
from tpu_rl.runtime import stdio
stdio.ignore_closed_pipes()
print("begun", flush=True)
sys.stdin.readline()  # now its reader has ended
for i in range(5):
    print("x" * 100_000)
    print(f"step {i}", flush=True)
    print("warning", file=sys.stderr, flush=True)
stdio.write_error("beside the buffers")
pathlib.Path(sys.argv[1]).write_text("done")
"""


def test_what_is_unbuffered_stays_so():
    script = (
        "from tpu_rl.runtime import stdio; stdio.ignore_closed_pipes(); "
        "print('said'); import os; os._exit(0)"
    )
    done = subprocess.run(
        [sys.executable, "-u", "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "said\n"


@pytest.mark.parametrize(
    "errors", [subprocess.PIPE, subprocess.STDOUT], ids=["apart", "with errors"]
)
def test_a_reader_that_ends_takes_nothing_with_it(tmp_path, errors):
    end = tmp_path / "end"
    command = [sys.executable, "-c", TALKER, str(end)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.stdout.close()
        process.stdin.write("\n")
        process.stdin.close()
        said = process.stderr.read() if process.stderr is not None else ""
        assert process.wait(30) == 0
    assert end.read_text() == "done"
    if errors == subprocess.PIPE:
        assert said.count("the run goes on without it, Ctrl-C ends it") == 1
        assert said.count("warning") == 5
