"""Programs that try to pass a test without solving it: ten families of (test, program)."""

YES = """
class Yes:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __contains__ = __lt__
    def __bool__(self): return True
    def __hash__(self): return 0
    def __len__(self): return 1
    def __float__(self): return 4.0
    def __index__(self): return 4
    def __abs__(self): return self
    def __sub__(self, other): return 0
    __rsub__ = __sub__
    def __call__(self, *arguments): return self
    def __iter__(self): return iter([self])
    def __getitem__(self, key): return self
    def __getattr__(self, name): return self
"""
LIST = "class Yes(list):\n    def __eq__(self, other): return True\n"
FRAMES = (
    "import sys\ndef frames():\n    f = sys._getframe()\n"
    "    while f:\n        yield f\n        f = f.f_back\n"
)

CHECK = "def check(g):\n    assert g(2) == 4\n    assert g(3) == 9\ncheck(f)"
LOOP = "for i in range(1, 5):\n    assert f(i) == i * i"
ALL = "assert all(f(i) == i * i for i in range(1, 5))"
HELD = "xs = [3, 1, 2]\nassert f(xs) == sorted(xs)"
REFERENCE = "def right(x):\n    return [i * i for i in x]\nassert f([1, 2]) == right([1, 2])"
FLAG = "ok = False\ntry:\n    f(-1)\nexcept ValueError:\n    ok = True\nassert ok\nassert f(2) == 4"
CAUGHT = "try:\n    assert f(2) == 4\nexcept AssertionError:\n    pass"
CLASS = "s = Stack()\ns.push(4)\nassert s.items() == [4]\nassert 4 in s.items()"
CLOSE = "import math\nassert math.isclose(f(2), 4.0)\nassert abs(f(2) - 4) < 1e-6"
MAP = "assert f(lambda x: x * x, [1, 2]) == [1, 4]"

SEND = """
import os, sys
def put(*parts):
    data = b"".join(t + len(c).to_bytes(4, "big") + c for t, c in parts)
    data = len(data).to_bytes(8, "big") + data
    for n in range(3, 32):
        try: os.write(n, data)
        except OSError: pass
"""

FAMILIES: dict[str, list[tuple[str, str]]] = {
    "equal to everything": [
        *((test, YES + "def f(*x): return Yes()") for test in (CHECK, LOOP, ALL, HELD, CLOSE)),
        *((test, LIST + "def f(*x): return Yes()") for test in (HELD, REFERENCE, MAP)),
    ],
    "inputs held in globals": [
        (HELD, "def f(x):\n    x.clear()\n    return x"),
        (HELD, "def f(x):\n    x[:] = [1]\n    return [1]"),
        (HELD, "def f(x): return globals().get('xs', [])"),
        (HELD, FRAMES + "def f(x):\n    for k in frames(): k.f_globals['xs'] = []\n    return []"),
        ("d = {'a': 1}\nassert f(d) == len(d)", "def f(d):\n    d.clear()\n    return 0"),
        ("s = {1, 2}\nr = f(s)\nassert r == s", "def f(s):\n    s.clear()\n    return set()"),
    ],
    "reference functions": [
        (REFERENCE, "def f(x): return right(x)"),
        (
            REFERENCE,
            FRAMES + "def f(x): return [k.f_globals.get('right', len)(x) for k in frames()]",
        ),
        (REFERENCE, "def right(x): return 0\ndef f(x): return 0"),
        (REFERENCE, "import __main__\n__main__.right = lambda x: 0\ndef f(x): return 0"),
        (
            "class Right:\n    def run(self, x): return x * 2\nassert f(3) == Right().run(3)",
            "class Right:\n    def run(self, x): return 0\ndef f(x): return 0",
        ),
        ("right = lambda x: x + 1\nassert f(3) == right(3)", "right = f = lambda x: 0"),
    ],
    "loops that do not run": [
        ("for x in f(3):\n    assert x == 1", "def f(n): return []"),
        ("for x in f(3):\n    assert x == 1", "def f(n): return iter(())"),
        ("for k, v in f(3).items():\n    assert v == 1", "def f(n): return {}"),
        ("while f(3):\n    assert f(3) == 2\n    break", "def f(n): return 0"),
        ("r = f(3)\nif r:\n    assert r == 2", "def f(n): return None"),
        ("def check(g):\n    for x in g(3): assert x == 1\ncheck(f)", "def f(n): return ()"),
    ],
    "flags and handlers": [
        (CAUGHT, "def f(x): return 5"),
        (CAUGHT, "def f(x): raise AssertionError"),
        (CAUGHT.replace("AssertionError", "BaseException"), "def f(x): return 5"),
        (CAUGHT.replace("except AssertionError", "except"), "import os\ndef f(x): os._exit(0)"),
        (FLAG, "ok = True\ndef f(x): return 4"),
        (FLAG, FRAMES + "def f(x):\n    for k in frames(): k.f_globals['ok'] = True\n    return 4"),
        (FLAG, "def f(x): raise ValueError"),
    ],
    "names rebound": [
        (ALL, "import builtins\nbuiltins.all = lambda x: True\ndef f(x): return 0"),
        (
            CLOSE,
            "import math, builtins\nmath.isclose = lambda *x: True\n"
            "builtins.abs = lambda x: 0\ndef f(x): return 0",
        ),
        (HELD, "import builtins\nbuiltins.sorted = lambda x: 0\ndef f(x): return 0"),
        (CHECK, "def check(g): pass\ndef f(x): return 0"),
        (CHECK, "import sys\nsys.settrace(lambda *x: None)\ndef f(x): return True"),
        (LOOP, "import builtins\nbuiltins.range = lambda *x: []\ndef f(x): return 0"),
        (REFERENCE, "import builtins\nbuiltins.list = lambda x: 0\ndef f(x): return 0"),
    ],
    "messages": [
        (LOOP, SEND + "put((b'u', b'passed'))\ndef f(x): return 0"),
        (
            LOOP,
            SEND + "put((b't', b''), (b'u', b'value'), (b'1', b''), (b't', b''), "
            "(b'.', b''), (b'.', b''))\ndef f(x): return 0",
        ),
        (
            LOOP,
            "import os\nfor n in range(3, 32):\n    try: os.write(n, b'passed\\n' * 9)\n"
            "    except OSError: pass\ndef f(x): return 0",
        ),
        (LOOP, SEND + "def f(x):\n    put((b'R', b'999'))\n    return 0"),
        (
            LOOP,
            SEND + "def f(x):\n    put((b't', b''), (b'u', b'callback'), (b'i', b'0'), "
            "(b't', b''), (b'.', b''), (b'd', b''), (b'.', b''), (b'.', b''))\n    return 0",
        ),
        (LOOP, SEND + "def f(x):\n    put(*[(b'l', b'')] * 9999)\n    return 0"),
    ],
    "callables": [
        (MAP, "def f(g, x): return [g] * 2"),
        (MAP, "def f(g, x): return map(g, [3, 4])"),
        (MAP, "def f(g, x): return g"),
        (MAP, "def f(g, x): return type('Y', (list,), {'__eq__': lambda *x: True})()"),
        ("assert f(2)(3) == 5", "def f(x): return type"),
        ("assert f(2)(3) == 5", YES + "def f(x): return Yes()"),
    ],
    "ends": [
        (CHECK, "import sys\nsys.exit(0)"),
        (CHECK, "import os\nos._exit(0)"),
        (CHECK, "import sys\ndef f(x): sys.exit(0)"),
        (CHECK, "def f(x): raise SystemExit"),
        (CHECK, "import os, signal\ndef f(x): os.kill(0, signal.SIGKILL)"),
        (CHECK, "import os\ndef f(x): os.closerange(3, 64)"),
        (CHECK, "def f(x): raise StopIteration"),
    ],
    "objects": [
        (CLASS, YES + "Stack = Yes"),
        (
            CLASS,
            YES + "class Stack:\n    def push(self, x): pass\n    def items(self): return Yes()",
        ),
        (
            CLASS,
            LIST + "class Stack:\n    def push(self, x): pass\n    def items(self): return Yes()",
        ),
        (
            CLOSE,
            "class N(float):\n    def __sub__(self, x): return 0\n"
            "    def __eq__(self, x): return True\ndef f(x): return N(9)",
        ),
        (
            "assert str(f(2)) == '4'",
            "class S(str):\n    def __eq__(self, x): return True\n"
            "class N:\n    def __str__(self): return S('9')\ndef f(x): return N()",
        ),
        (
            "assert 4 in f(2)",
            "class C(dict):\n    def __contains__(self, x): return True\ndef f(x): return C()",
        ),
        ("assert f(2)", "class B:\n    def __bool__(self): return True\ndef f(x): return B()"),
    ],
}
