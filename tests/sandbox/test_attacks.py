"""No program that attacks the judge passes or is left out, and honest programs pass."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fixtures.sandboxes import confined
from tests.sandbox.corpus import ATTACKS, HONEST
from tpu_rl import sandbox
from tpu_rl.sandbox import unit_tests

QUICK = 1
"""Programs of each family in the quick suite."""


def verdicts(pairs, seconds):
    """Judge (test, program) pairs, two at a time. A test that is refused raises ValueError."""
    limits = sandbox.SandboxLimits(seconds=seconds)
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda pair: unit_tests.passes(pair[1], pair[0], limits), pairs))


@confined
def test_no_attack_passes():
    pairs = [pair for family in ATTACKS.values() for pair in family[:QUICK]]
    assert verdicts(pairs, 2.0) == [False] * len(pairs)


@pytest.mark.slow
@confined
@pytest.mark.parametrize("family", ATTACKS)
def test_no_attack_of_a_family_passes(family):
    assert verdicts(ATTACKS[family], 3.0) == [False] * len(ATTACKS[family])


@confined
@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_honest_programs_pass(part):
    names = list(HONEST)[part::2]
    passed = verdicts([HONEST[name] for name in names], 5.0)
    assert [name for name, verdict in zip(names, passed, strict=True) if not verdict] == []


def test_there_are_many_attacks():
    assert (len(ATTACKS), sum(map(len, ATTACKS.values())), len(HONEST)) == (18, 217, 62)
