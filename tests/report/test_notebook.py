"""Runs in a notebook."""

import html
import re

import pytest

import tpu_rl
from tests.fixtures.run_folders import make_run
from tpu_rl.commands.python_run import read_run
from tpu_rl.errors import InputError


def shown(value) -> str:
    """Return the page in the frame that a notebook shows."""
    [page] = re.findall(r'<iframe srcdoc="([^"]*)"', value._repr_html_())
    return html.unescape(page)


def test_a_run_and_several_are_pages_and_charts(tmp_path):
    runs = [read_run(str(make_run(tmp_path / name, steps=4))) for name in ("a<", "b")]
    assert "<h1>a&lt;</h1>" in shown(runs[0])
    both = tpu_rl.compare([runs[0], str(runs[1].run_dir)])
    assert "Settings that differ" in shown(both)
    charts = shown(both.plot("reward/mean", "policy/entropy"))
    assert re.findall("<figcaption><b>(.*?)</b>", charts) == ["reward/mean", "policy/entropy"]
    assert charts.count('title="a&lt;">') == charts.count('title="b">') == 2
    assert "Accuracy" in shown(runs[0].plot())
    with pytest.raises(InputError, match="unknown metric 'nothing'"):
        runs[0].plot("nothing")
