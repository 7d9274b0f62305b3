"""No program passes a test that it does not solve, whatever the test consists of."""

import pytest

from tests.fixtures.sandboxes import confined
from tests.sandbox import forgeries
from tpu_rl import sandbox
from tpu_rl.sandbox import unit_tests

LIMITS = sandbox.SandboxLimits(seconds=2.0)

CASES = [
    pytest.param(test, program, marks=[pytest.mark.slow] if number else [], id=f"{family} {number}")
    for family, pairs in forgeries.FAMILIES.items()
    for number, (test, program) in enumerate(pairs)
]


def test_there_are_many_forgeries():
    assert (len(forgeries.FAMILIES), len(CASES)) == (10, 66)


@confined
@pytest.mark.parametrize(("test", "program"), CASES)
def test_no_forgery_is_rewarded(test, program):
    assert not unit_tests.passes(program, test, LIMITS)


HONEST = {
    forgeries.CHECK: "def f(x): return x * x",
    forgeries.LOOP: "def f(x): return x * x",
    forgeries.ALL: "def f(x): return x * x",
    forgeries.HELD: "f = sorted",
    forgeries.REFERENCE: "def f(x): return [i * i for i in x]",
    forgeries.FLAG: "def f(x):\n    if x < 0: raise ValueError(x)\n    return x * x",
    forgeries.CAUGHT: "def f(x): return x * x",
    forgeries.CLASS: (
        "class Stack:\n    def __init__(self): self.all = []\n"
        "    def push(self, x): self.all.append(x)\n    def items(self): return self.all"
    ),
    forgeries.CLOSE: "def f(x): return x * x",
    forgeries.MAP: "def f(g, x): return list(map(g, x))",
    "assert f(2)(3) == 5": "def f(x): return lambda y: x + y",
    "xs = [2, 1]\nf(xs)\nassert xs == [1, 2]": "def f(x): x.sort()",
    "class Node:\n    def __init__(self, x): self.x = x\nassert f(Node(2).x) == 2": (
        "def f(x): return x"
    ),
    "p = f(2)\np.x = 3\nassert p.x == 3 and isinstance(p, P) and str(p) == 'P3'": (
        "class P:\n    def __str__(self): return f'P{self.x}'\ndef f(x): return P()"
    ),
    "import random\nx = random.random()\nassert f(x) == x + 1": "def f(x): return x + 1",
}


@confined
@pytest.mark.parametrize(("test", "program"), HONEST.items())
def test_honest_programs_pass(test, program):
    assert unit_tests.passes(program, test, LIMITS)


@pytest.mark.parametrize(
    ("test", "why"),
    [
        ("try:\n    f()\nexcept Mine:\n    pass\nassert f() == 1", "line 3"),
        ("x = 1\nclass Sub(Base): pass\nassert Sub().f() == 1", "line 2"),
        ("want = 1\nassert f() == 1\nassert want == 1", "line 3"),
        ("assert f() == 1\nimport numpy", "line 2"),
        ("def check(g):\n    assert g(1) == 1", "asks nothing"),
    ],
)
def test_tests_that_cannot_be_judged_are_refused_by_their_line(test, why):
    with pytest.raises(ValueError, match=why):
        unit_tests.prepare(test)


@confined
def test_test_that_gives_the_program_what_cannot_be_sent_is_refused():
    with pytest.raises(ValueError, match="an object of Pattern, which is no plain value"):
        unit_tests.passes("def f(x): return 1", "import re\nassert f(re.compile('a')) == 1")
