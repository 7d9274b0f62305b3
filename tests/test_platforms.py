"""Systems without the modules and files of Linux."""

import subprocess
import sys

import pytest

from tpu_rl.commands import cli

PROGRAM = """
import sys
from importlib.abc import MetaPathFinder


class Hidden(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in ("fcntl", "resource"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


for name in ("fcntl", "resource"):
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Hidden())
import tpu_rl.commands.cli
import tpu_rl.commands.evaluate.evaluate
import tpu_rl.commands.run
import tpu_rl.commands.serve.serve
import tpu_rl.commands.tools.export
import tpu_rl.commands.tools.doctor
import tpu_rl.runtime.worker_child

assert not {"fcntl", "resource"} & sys.modules.keys()
sys.exit(tpu_rl.commands.cli.main(["presets"]))
"""


def test_nothing_loads_modules_of_linux_at_its_start():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "arithmetic_grpo" in done.stdout


@pytest.mark.parametrize("argv", [["run"], ["presets"], []])
def test_windows_is_refused_in_one_line(argv, monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "win32")
    assert cli.main(argv) == 3
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert "WSL 2" in shown.err
