"""Right programs of many kinds: none gets 0 where its row has a solution."""

import pytest

from tests.fixtures.sandboxes import confined
from tpu_rl import rewards, sandbox
from tpu_rl.rewards import registry
from tpu_rl.sandbox import unit_tests

PROGRAMS = {
    "unary invert": (
        ("class V:\n    def __init__(s,x): s.x=x\n    def __invert__(s): return V(~s.x)"),
        "assert (~V(3)).x == -4",
    ),
    "shift": (
        ("class V:\n    def __init__(s,x): s.x=x\n    def __lshift__(s,n): return V(s.x<<n)"),
        "assert (V(1)<<3).x == 8",
    ),
    "divmod": (
        (
            "class V:\n"
            "    def __init__(s,x): s.x=x\n"
            "    def __divmod__(s,n): return (V(s.x//n),V(s.x%n))"
        ),
        ("a,b=divmod(V(7),2)\nassert a.x==3 and b.x==1"),
    ),
    "abs": (
        ("class V:\n    def __init__(s,x): s.x=x\n    def __abs__(s): return V(abs(s.x))"),
        "assert abs(V(-3)).x == 3",
    ),
    "int": (
        ("class V:\n    def __init__(s,x): s.x=x\n    def __int__(s): return s.x"),
        "assert int(V(3)) == 3",
    ),
    "float": (
        ("class V:\n    def __float__(s): return 2.5"),
        "assert float(V()) == 2.5",
    ),
    "complex": (
        ("class V:\n    def __complex__(s): return 1j"),
        "assert complex(V()) == 1j",
    ),
    "floor": (
        ("import math\nclass V:\n    def __floor__(s): return 2"),
        ("import math\nassert math.floor(V()) == 2"),
    ),
    "iadd": (
        (
            "class V:\n"
            "    def __init__(s): s.a=[]\n"
            "    def __iadd__(s,o):\n"
            "        s.a.append(o)\n"
            "        return s"
        ),
        ("v=V()\nv += 3\nassert v.a == [3]"),
    ),
    "range index": (
        ("class V:\n    def __index__(s): return 3"),
        "assert list(range(V())) == [0,1,2]",
    ),
    "abs plain": (
        ("class V:\n    def __abs__(s): return 3"),
        "assert abs(V()) == 3",
    ),
    "pos": (
        ("class V:\n    def __pos__(s): return 3"),
        "assert +V() == 3",
    ),
    "round": (
        ("class V:\n    def __round__(s, n=None): return 3"),
        "assert round(V()) == 3",
    ),
    "enum": (
        ("from enum import Enum\nclass C(Enum):\n    R=1\n    G=2"),
        "assert C.R.value == 1 and C(2) is C.G and C['R'] is C.R and len(C) == 2",
    ),
    "intenum": (
        ("from enum import IntEnum\nclass C(IntEnum):\n    R=1\n    G=2"),
        "assert C.R.name == 'R' and C.R < C.G and C.R == 1",
    ),
    "flag": (
        ("from enum import Flag\nclass P(Flag):\n    R=1\n    W=2"),
        "assert (P.R|P.W).value == 3 and P.R in (P.R|P.W)",
    ),
    "str sub": (
        ("class S(str):\n    def shout(s): return s.upper()"),
        "assert S('a').shout() == 'A' and S('a') == 'a'",
    ),
    "int sub": (
        ("class I(int):\n    def double(s): return s*2"),
        "assert I(3).double() == 6 and I(3)+1 == 4",
    ),
    "float sub": (
        ("class F(float):\n    def half(s): return s/2"),
        "assert F(3).half() == 1.5",
    ),
    "list sub": (
        ("class L(list):\n    def first(s): return s[0]"),
        ("x=L([1,2])\nassert x.first()==1 and x == [1,2] and len(x)==2"),
    ),
    "dict sub": (
        ("class D(dict):\n    def __missing__(s,k): return 0"),
        ("d=D(a=1)\nassert d['a']==1 and d['z']==0"),
    ),
    "match class": (
        ("class V:\n    __match_args__=('x',)\n    def __init__(s,x): s.x=x"),
        (
            "match V(1):\n"
            "    case V(x=1):\n"
            "        ok=True\n"
            "    case _:\n"
            "        ok=False\n"
            "assert ok"
        ),
    ),
    "deque maxlen": (
        ("from collections import deque\ndef f(): return deque([1,2],maxlen=2)"),
        "assert f().maxlen == 2",
    ),
    "annotations": (
        "def f(x: int) -> str: return ''",
        "assert f.__annotations__['x'] is int",
    ),
    "type is int": (
        "def f(x): return int",
        "assert f(1) is int",
    ),
    "linked list own class": (
        ("def rev(h):\n    p=None\n    while h:\n        h.n,p,h = p,h,h.n\n    return p"),
        (
            "class Node:\n"
            "    def __init__(self, v, n=None): self.v, self.n = v, n\n"
            "h=rev(Node(1,Node(2,Node(3))))\n"
            "assert [h.v,h.n.v,h.n.n.v]==[3,2,1] and h.n.n.n is None"
        ),
    ),
    "tree": (
        "def depth(t): return 0 if t is None else 1+max(depth(t.l),depth(t.r))",
        (
            "class T:\n"
            "    def __init__(s,l=None,r=None): s.l,s.r=l,r\n"
            "assert depth(T(T(),T(T())))==3"
        ),
    ),
    "hasattr": (
        ("class V:\n    def go(s): return 1"),
        ("ok = hasattr(V(),'go')\nassert ok and not hasattr(V(),'stop')"),
    ),
    "hasattr of none": (
        ("class V:\n    def go(s): return 1"),
        ("v = V()\nx = 1 if hasattr(v, 'stop') else v.go()\nassert x == 1"),
    ),
    "getattr default": (
        ("class V:\n    a = 1"),
        "x = getattr(V(), 'b', 7)\nassert x == 7 and getattr(V(), 'a', 7) == 1",
    ),
    "subclass of program": (
        ("class B:\n    def f(s): return 1"),
        ("class C(B):\n    def g(s): return s.f()+1\nassert C().g()==2"),
    ),
    "except program": (
        ("class E(Exception): pass\ndef f(): raise E('x')"),
        ("try:\n    f()\n    assert False\nexcept E as e:\n    assert str(e)=='x'"),
    ),
    "pytest style": (
        "def f(): raise ValueError('x')",
        ("ok=False\ntry: f()\nexcept ValueError: ok=True\nassert ok"),
    ),
    "generator": (
        ("def f():\n    yield from range(3)"),
        ("g=f()\nassert next(g)==0 and list(g)==[1,2]"),
    ),
    "context": (
        ("class C:\n    def __enter__(s): return 5\n    def __exit__(s,*a): return False"),
        ("with C() as x:\n    assert x==5"),
    ),
    "decorator": (
        ("def twice(f):\n    return lambda *a: f(f(*a))"),
        ("@twice\ndef inc(x): return x+1\nassert inc(1)==3"),
    ),
    "dataclass": (
        ("from dataclasses import dataclass\n@dataclass\nclass P:\n    x:int\n    y:int=0"),
        "assert P(1)==P(1,0) and P(1)!=P(2) and repr(P(1))=='P(x=1, y=0)'",
    ),
    "namedtuple": (
        ("from collections import namedtuple\nP=namedtuple('P','x y')"),
        ("p=P(1,2)\nassert p.x==1 and p==(1,2) and p._replace(x=3).x==3"),
    ),
    "frozen set": (
        "def f(): return {frozenset([1,2])}",
        "assert f()=={frozenset([2,1])}",
    ),
    "matrix op": (
        (
            "class M:\n"
            "    def __init__(s,a): s.a=a\n"
            "    def __matmul__(s,o): return M(s.a*o.a)\n"
            "    def __eq__(s,o): return s.a==o.a"
        ),
        "assert M(2)@M(3)==M(6)",
    ),
    "ordering": (
        (
            "from functools import total_ordering\n"
            "@total_ordering\n"
            "class V:\n"
            "    def __init__(s,x): s.x=x\n"
            "    def __eq__(s,o): return s.x==o.x\n"
            "    def __lt__(s,o): return s.x<o.x"
        ),
        "assert V(1)<V(2) and sorted([V(2),V(1)])[0].x==1 and max(V(1),V(3)).x==3",
    ),
    "callable": (
        ("class A:\n    def __call__(s,x): return x+1"),
        "assert A()(1)==2 and list(map(A(),[1,2]))==[2,3]",
    ),
    "getitem": (
        ("class A:\n    def __getitem__(s,i): return i*2\n    def __len__(s): return 3"),
        ("a=A()\nassert a[2]==4 and len(a)==3"),
    ),
    "slice": (
        ("class A:\n    def __getitem__(s,i): return list(range(10))[i]"),
        "assert A()[2:5]==[2,3,4]",
    ),
    "contains": (
        ("class A:\n    def __contains__(s,x): return x>3"),
        "assert 5 in A() and 2 not in A()",
    ),
    "iter": (
        ("class A:\n    def __iter__(s): return iter([1,2])"),
        "assert list(A())==[1,2] and sum(A())==3",
    ),
    "bool": (
        ("class A:\n    def __bool__(s): return False"),
        "assert not A()",
    ),
    "hash": (
        (
            "class A:\n"
            "    def __init__(s,x): s.x=x\n"
            "    def __eq__(s,o): return s.x==o.x\n"
            "    def __hash__(s): return hash(s.x)"
        ),
        "assert len({A(1),A(1),A(2)})==2",
    ),
    "format": (
        ("class A:\n    def __format__(s,spec): return 'A'+spec"),
        "assert f'{A():x}'=='Ax'",
    ),
    "class attr": (
        ("class A:\n    n=0\n    def __init__(s): A.n+=1"),
        ("A();A()\nassert A.n==2"),
    ),
    "property": (
        ("class A:\n    @property\n    def x(s): return 3"),
        "assert A().x==3",
    ),
    "static": (
        (
            "class A:\n"
            "    @staticmethod\n"
            "    def f(x): return x\n"
            "    @classmethod\n"
            "    def g(c): return c"
        ),
        "assert A.f(1)==1 and A.g() is A",
    ),
    "closure": (
        (
            "def f():\n"
            "    n=0\n"
            "    def g():\n"
            "        nonlocal n\n"
            "        n+=1\n"
            "        return n\n"
            "    return g"
        ),
        ("g=f()\ng()\nassert g()==2"),
    ),
    "mixed num": (
        (
            "class V:\n"
            "    def __init__(s,x): s.x=x\n"
            "    def __add__(s,o): return V(s.x+(o.x if isinstance(o,V) else o))\n"
            "    __radd__=__add__\n"
            "    def __eq__(s,o): return s.x==getattr(o,'x',o)"
        ),
        "assert (V(1)+2).x==3 and (1+V(2)).x==3 and sum([V(1),V(2)]).x==3",
    ),
    "equal number": (
        (
            "class V:\n"
            "    def __init__(s,x): s.x=x\n"
            "    def __eq__(s,o): return s.x==getattr(o,'x',o)"
        ),
        "assert V(3)==3",
    ),
    "money sub": (
        ("class V:\n    def __init__(s,x): s.x=x\n    def __sub__(s,o): return s.x-o.x"),
        "assert V(3)-V(1)==2",
    ),
    "regex": (
        ("import re\ndef f(): return re.compile('a+')"),
        "assert f().match('aa').group()=='aa'",
    ),
    "bytes": (
        "def f(): return bytearray(b'ab')",
        "assert f()==b'ab'",
    ),
    "nan": (
        "def f(): return float('nan')",
        ("import math\nassert math.isnan(f())"),
    ),
    "decimal": (
        ("from decimal import Decimal\ndef f(): return Decimal('1.10')"),
        ("from decimal import Decimal\nassert f()==Decimal('1.1')"),
    ),
    "date": (
        ("import datetime\ndef f(): return datetime.date(2024,1,2)"),
        "assert f().year==2024",
    ),
    "isinstance int": (
        ("class I(int): pass\ndef f(): return I(3)"),
        "assert isinstance(f(), int)",
    ),
    "isinstance list": (
        ("class L(list): pass\ndef f(): return L()"),
        "assert isinstance(f(), list)",
    ),
    "big linked list": (
        (
            "class ListNode:\n"
            "    def __init__(s,v,n=None): s.val,s.next=v,n\n"
            "def build(xs):\n"
            "    h=None\n"
            "    for x in reversed(xs): h=ListNode(x,h)\n"
            "    return h"
        ),
        ("n=build([1,2])\nassert n.val==1 and n.next.val==2 and n.next.next is None"),
    ),
}
"""Name -> (program, test)."""
CARRIED = (
    *("unary invert", "shift", "abs", "int", "float", "floor", "iadd", "range index", "pos"),
    *("enum", "deque maxlen", "ordering", "dataclass", "mixed num", "hasattr", "getitem"),
    "hasattr of none",
)
"""Kinds that the judge of two processes carries, as no test says otherwise."""
QUICK = ("shift", "iadd", "str sub", "match class")


def judge(names, solutions):
    programs, tests = zip(*(PROGRAMS[name] for name in names), strict=True)
    columns = [[test] for test in tests]
    found = unit_tests.all_pass(programs, columns, True, programs if solutions else None)
    return dict(zip(names, found, strict=True))


@confined
@pytest.mark.parametrize(
    "names", [QUICK, pytest.param(tuple(PROGRAMS), marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_no_right_program_gets_0_beside_its_rows_solution(names):
    assert judge(names, True) == dict.fromkeys(names, True)


@confined
@pytest.mark.slow
def test_the_judge_of_two_processes_carries_most_of_them():
    assert judge(CARRIED, False) == dict.fromkeys(CARRIED, True)
    found = judge(tuple(PROGRAMS), False)
    assert sum(value is True for value in found.values()) >= 46
    assert [name for name, value in found.items() if value is False] == []


@confined
@pytest.mark.parametrize(
    ("program", "test", "why"),
    [
        (*PROGRAMS["str sub"], "'str' object has no attribute 'shout'"),
        (*PROGRAMS["linked list own class"], "does not change in this call: n"),
        (
            "def f(x):\n    x.append(1)\n    return x",
            "xs = []\nassert f(xs) is xs",
            "line 2 of the test",
        ),
        (
            "def f():\n    return __import__('collections').defaultdict(int)",
            "assert f()[1] == 0",
            "KeyError",
        ),
        ("class A:\n    __bool__ = lambda s: False", "assert not A()", "line 1 of the test"),
    ],
)
def test_what_two_processes_do_not_carry_is_named(program, test, why):
    verdict = unit_tests.verdict_on(program, test)
    assert isinstance(verdict, unit_tests.Uncarried)
    assert why in verdict.why


@confined
def test_a_program_that_is_wrong_is_only_wrong():
    loops = "def f(x):\n    while True: pass"
    limits = sandbox.SandboxLimits(seconds=1)
    for program in ("def f(x): return x", "def f(x): return [x]", loops):
        assert unit_tests.verdict_on(program, "x = 1\nassert f(x) == 2", limits) is False


@confined
@pytest.mark.parametrize(
    "test",
    [
        # BigCodeBench's form: nothing runs the class.
        "import unittest\nclass T(unittest.TestCase):\n"
        "    def test_a(self): self.assertEqual(f(1), 2)",
        "import os\ndef check(f):\n    assert f(1) == 2",
    ],
)
def test_a_test_that_runs_nothing_is_refused_whatever_the_solution(test):
    right, wrong = "def f(x): return x + 1", "print(1)"
    found = unit_tests.all_pass([right, wrong], [[test]] * 2, True, [right] * 2)
    assert all(isinstance(verdict, ValueError) for verdict in found)


@confined
def test_rows_of_two_processes_only():
    program, test = PROGRAMS["str sub"]
    plain = "def f(): return 1"
    columns = {"tests": [[test], ["assert f() == 1"]], "solution": [program, plain]}
    found = [
        registry.resolve(name)(["q"] * 2, [program, plain], **columns)
        for name in ("python_tests", "python_tests(plain=false)")
    ]
    assert found == [[1, 1], [None, 1]]


@confined
def test_the_reason_of_a_0_is_kept_beside_it():
    program, test = PROGRAMS["str sub"]
    function = registry.resolve("python_tests")
    scores = rewards.score({"python_tests": function}, ["q"], [program], {"tests": [[test]]}, 0.0)
    assert scores.totals.tolist() == [0.0]
    assert "has no attribute 'shout'" in scores.faults[0].message
    half = registry.resolve("brier(of=python_tests)")
    assert rewards.score({"brier": half}, ["q"], [program], {"tests": [[test]]}).totals[0] == -1


@confined
def test_a_row_that_is_judged_plainly_still_judges_wrong_programs():
    program, test = PROGRAMS["str sub"]
    wrong = program.replace("upper", "lower")
    exits = "import os\nprint('passed')\nos._exit(0)"
    found = unit_tests.all_pass([wrong, exits, program], [[test]] * 3, True, [program] * 3)
    assert found == [False, False, True]


ZERO = """
class Zero:
    def __init__(self, *a): pass
    def __sub__(self, other): return Zero()
    def __len__(self): return 0
    def __lshift__(self, other): return Zero()
    def __int__(self): return 4
def f(x): return Zero()
"""


@confined
@pytest.mark.parametrize(
    "test",
    [
        "assert not (f(2) - 4)",
        "assert not (f(2) - 4 - f(1))",
        "assert not (f(2) << 4)",
        "x = f(2)\nx -= 4\nassert not x",
        "assert int(f(2) - 4) == 4",
    ],
)
def test_the_truth_of_an_operators_result_is_not_the_programs(test):
    assert not unit_tests.passes(ZERO, test)
