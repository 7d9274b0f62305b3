"""What long work says about its time."""

import pytest

from tpu_rl.experience import text_log_probs


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(59.0, ""), (61.0, "audit of 9 pairs: about 1 minutes more\n")],
)
def test_work_of_more_than_a_minute_says_how_long_it_takes(capsys, seconds, expected):
    text_log_probs.announce("audit of 9 pairs", seconds)
    assert capsys.readouterr().err == expected
