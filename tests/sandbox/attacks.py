"""Programs that attack the judge, and honest ones in the styles of published data sets.

`ATTACKS` has families of (test, program): no program passes. `HONEST` has programs that do.
"""

from tests.sandbox.forgeries import FRAMES, SEND, YES

ROUND_TRIP = "for x in ([1, 2], 'ab', {'a': 3}):\n    assert decode(encode(x)) == x"
LIAR = "\"type('Y', (), {'__eq__': lambda *x: True, '__bool__': lambda *x: True})()\""
SQUARES = "for i in range(1, 6):\n    assert f(i) == i * i"
MAPPED = "got = list(map(f, range(1, 6)))\nassert got == [i * i for i in range(1, 6)][: len(got)]"
EACH = "class All:\n    def __getitem__(self, i):\n        return f(i) == i * i\n"
EACH += "    def __len__(self): return 5\n"
FIRST = "def f(i):\n    if i == 1: return 1\n    raise "
LISTS = "want = [1, 2, 3]\ngot = f([3, 1, 2])\nassert got == want"
STACK = "s = Stack()\ns.push(1)\ns.push(2)\nassert s.pop() == 2\nassert len(s) == 1"
SIZED = "r = f(3)\nassert len(r) == 3\nassert all(x * x == y for x, y in enumerate(r))"
NODE = "class Node:\n    def __init__(self, value):\n        self.value = value\n        self._key = 7\n"
CALLED = NODE + "n = Node(3)\nassert f(n) == n.value * 2"
SORTED = "words = ['ccc', 'a', 'bb']\nassert f(words, lambda w: len(w)) == ['a', 'bb', 'ccc']"

HANDLES = """
import os
def message(*parts):
    data = b"".join(t + len(c).to_bytes(4, "big") + c for t, c in parts)
    return len(data).to_bytes(8, "big") + data
def put(*parts):
    for n in range(3, 32):
        try: os.write(n, message(*parts))
        except OSError: pass
def ask(operation, *arguments):
    put((b't', b''), (b'u', b'ask'), (b'u', operation), (b't', b''), *arguments, (b'.', b''),
        (b'd', b''), (b'.', b''), (b'0', b''), (b'.', b''))
"""


def _answer(value: str) -> str:
    return (
        f"put((b't', b''), (b'u', b'value'), {value}, (b't', b''), (b't', b''), "
        "(b'.', b''), (b'd', b''), (b'.', b''), (b'.', b''), (b'.', b''))"
    )


ATTACKS: dict[str, list[tuple[str, str]]] = {
    "callables of Python": [
        (ROUND_TRIP, f"decode = eval\ndef encode(x): return {LIAR}"),
        (
            ROUND_TRIP,
            "import functools\ndecode = functools.partial(eval)\n"
            f"def encode(x): return {LIAR}",
        ),
        (
            ROUND_TRIP,
            f"decode = __import__('operator').call\ndef encode(x): return [eval, {LIAR}]",
        ),
        (ROUND_TRIP, "decode = exec\ndef encode(x): return 'raise SystemExit'"),
        (ROUND_TRIP, "decode = __import__\ndef encode(x): return 'antigravity'"),
        (ROUND_TRIP, "decode = compile\ndef encode(x): return x"),
        ("assert f('x') == {'a': 1}", "f = vars().get"),
        ("assert run('1') == 5", "run = lambda s: eval"),
        ("assert make('A')().go() == 3", "make = lambda n: type(n, (), {'go': lambda s: 4})"),
        ("assert key('a')({'a': 2}) == 2", "import operator\nkey = operator.attrgetter"),
        ("assert fill('{}', 3) == '4'", "fill = str.format"),
        ("assert fold(max, [1, 3]) == 2", "import functools\nfold = functools.reduce"),
        ("assert up('ab') == 'BA'", "up = 'x'.upper().join"),
        ("assert [x for x in pick([0, 1, 2])] == [1]", "pick = lambda x: filter(None, x)"),
        ("assert attribute(3, 'real') == 4", "attribute = getattr"),
        ("assert sorted([2, 1], key=key) == [2, 1]", "key = print"),
        ("assert sorted([2, 1, 3], key=key) == [3, 2, 1]", "key = breakpoint"),
    ],
    "exceptions that end loops": [
        (MAPPED, FIRST + "StopIteration"),
        (MAPPED, "def f(i): raise StopIteration"),
        ("assert sum(map(f, range(5))) == 0", "def f(i): raise StopIteration"),
        ("assert all(map(lambda i: f(i) == i * i, range(1, 6)))", FIRST + "StopIteration"),
        ("assert not list(filter(lambda i: f(i) != i, [1, 2]))", FIRST + "StopIteration"),
        (
            "for i, j in zip(map(f, range(1, 6)), range(1, 6)):\n    assert i == j * j",
            FIRST + "StopIteration",
        ),
        (EACH + "assert all(All())", FIRST.replace("== 1: return 1", "< 2: return i") + "IndexError"),
        (EACH + "assert False not in All()", "def f(i):\n    if not i: return 0\n    raise IndexError"),
        (EACH + "assert sum(All()) == len(list(All()))", "def f(i): raise IndexError"),
        ("assert next(map(f, [2]), 4) == 4", "def f(i): raise StopIteration"),
        ("o = make()\nassert getattr(o, 'x', 4) == 4", "class A: pass\nmake = A"),
        (
            "o = make()\nassert getattr(o, 'x', 4) == 4",
            "class A:\n    @property\n    def x(self): raise AttributeError\nmake = A",
        ),
        (
            "o = make()\nfor i in range(2):\n    if hasattr(o, 'x'):\n        assert o.x == 1\n"
            "    o.go()",
            "class A:\n    x = 1\n    def go(self): type(self).__dict__.get('x') and delattr(A, 'x')"
            "\nmake = A",
        ),
        (
            "for x in iter(lambda: f(3), 9):\n    assert x == 3",
            "n = []\ndef f(x):\n    n.append(x)\n    if len(n) == 1: return 3\n"
            "    raise StopIteration",
        ),
        (
            "import collections\nclass D(dict):\n    def __missing__(self, k): return f(k)\n"
            "m = collections.ChainMap(D(), {2: 4, 3: 9})\nassert m[2] == 4 and m[3] == 9",
            "def f(k): raise KeyError(k)",
        ),
        ("def g():\n    yield f(2)\nfor x in g():\n    assert x == 4", "def f(i): raise GeneratorExit"),
        (
            "assert all(map(lambda i: next(f(i)) == i, range(1, 4)))",
            "def f(i): return iter([1] * (i == 1))",
        ),
        (
            "def go():\n    for i in (1, 2, 3):\n        try:\n            assert f(i) == i * i\n"
            "        finally:\n            continue\ngo()",
            FIRST + "ValueError",
        ),
        (
            "for i in (1, 2):\n    with timer():\n        assert f(i) == i * i",
            FIRST + "ValueError\nclass timer:\n    def __enter__(self): pass\n"
            "    def __exit__(self, *x): return True",
        ),
        (
            "def visit(n):\n    for i in range(n):\n        assert f(i) == i\napply(visit, 3)",
            "def f(i):\n    if i: raise ValueError\n    return i\n"
            "def apply(g, n):\n    try: g(n)\n    except ValueError: pass",
        ),
        ("assert f(3) not in (1, 2)", "def f(i): raise KeyError"),
    ],
    "arguments that nobody asked about": [
        ("xs = [3, 1]\nassert f(xs) == sorted(xs)", "def f(x):\n    x.clear()\n    return x"),
        (
            "xs = [3, 1]\nassert f(xs) == sorted(xs)",
            HANDLES + "def f(x):\n    " + _answer("(b'l', b''), (b'.', b'')") + "\n    return []",
        ),
        (
            "want = [1, 3]\nxs = [3, 1]\nf(xs)\nassert xs == want",
            "import gc\ndef f(x):\n    for o in gc.get_objects():\n"
            "        if o == [1, 3]: o.clear()\n    x.clear()",
        ),
        ("d = {'a': 1}\nn = f(d)\nassert n == len(d)", "def f(d):\n    d.clear()\n    return 0"),
        ("d = {'a': 1}\nassert f(x=d) == len(d)", "def f(x):\n    x.clear()\n    return 0"),
        ("m = [[2, 1]]\nassert f(m) == m[0][0]", "def f(m):\n    m[0][0] = 0\n    return 0"),
        (CALLED, "def f(n):\n    n.value = 0\n    return 0"),
        (CALLED, "def f(n):\n    n.__dict__['value'] = 0\n    return 0"),
        (CALLED, "def f(n):\n    n.__class__.value = 0\n    return n._key"),
        (CALLED, "def f(n):\n    type(n).__mul__ = lambda *x: 0\n    return 0"),
    ],
    "large answers and objects": [
        (SQUARES, "def f(i): return 'x' * (40 << 20)"),
        (SQUARES, "def f(i): return [0] * 10 ** 6"),
        ("assert g(f(3)) == 4", "def f(i): return 'x' * (20 << 20)\ndef g(x): return x"),
        ("assert g(f(3) * 2) == 4", "def f(i): return 'x' * (20 << 20)\ndef g(x): return x"),
        ("assert g('x' * f(3)) == 'xxx'", "def f(i): return 1 << 26\ndef g(x): return x"),
        ("assert g(f(3)) == 4", "def f(i): return object()\ndef g(x): return x"),
        ("assert g([f(3)]) == [4]", "def f(i): return Ellipsis\ndef g(x): return x"),
        (
            "assert g([f(3)]) == [4]",
            "def f(i):\n    x = []\n    for _ in range(1200): x = [x]\n    return x\n"
            "def g(x): return x",
        ),
        ("assert g(f(3)) == 4", "def f(i):\n    x = []\n    x.append(x)\n    return x\ndef g(x): return x"),
        ("assert f(lambda x: x * 2) == 4", "def f(g): return g('x' * (20 << 20))"),
        ("assert f(lambda x: [x]) == 4", "def f(g):\n    x = 0\n    for _ in range(3000): x = g(x)\n    return x"),
        ("assert f(3) == 9", "def f(i): return 10 ** (10 ** 6)"),
        ("assert str(f(3)) == '9'", "def f(i): return 10 ** (10 ** 6)"),
        ("assert {f(i) for i in range(3)} == {1}", "def f(i): return [i]"),
        ("assert f(3) == 9", "def f(i): return lambda: 9"),
        ("assert f(3) == 9", "class f(int): pass"),
    ],
    "comparisons": [
        (LISTS, "class L(list):\n    def __eq__(self, o): return True\ndef f(x): return L()"),
        (
            "assert f(2) == 4 and f(2) == 4.0",
            "class I(int):\n    def __eq__(self, o): return True\n    __hash__ = int.__hash__\n"
            "def f(x): return I(9)",
        ),
        (
            "assert f('a') == 'A' and f('a') in ('A',)",
            "class S(str):\n    def __eq__(self, o): return True\n    def __hash__(self): return hash('A')\n"
            "def f(x): return S('x')",
        ),
        ("assert not f(3) < 9 and not f(3) > 9", YES + "def f(x): return Yes()"),
        ("assert abs(f(3) - 9) < 1e-6", YES + "def f(x): return Yes()"),
        ("assert round(f(3), 2) == 9.0", YES + "def f(x): return Yes()"),
        ("assert 9 - f(3) == 0", YES + "def f(x): return Yes()"),
        ("assert {9: 1}[f(3)] == 1", "class H:\n    def __hash__(self): return hash(9)\n    def __eq__(self, o): return True\ndef f(x): return H()"),
        ("assert f(3) in {9, 10}", "class H:\n    def __hash__(self): return hash(9)\n    def __eq__(self, o): return True\ndef f(x): return H()"),
        (
            "assert isinstance(f(2), int)",
            "class M(type):\n    def __instancecheck__(c, o): return True\n"
            "class I(metaclass=M):\n    __class__ = int\ndef f(x): return I()",
        ),
        (
            "assert Ratio(1, 2) + Ratio(1, 3) == Ratio(5, 6)",
            "class Ratio:\n    def __init__(self, a, b): self.a, self.b = a, b\n"
            "    def __add__(self, o): return Ratio(0, 1)\n    def __eq__(self, o): return True",
        ),
        (
            "a, b = Version('1.2'), Version('1.10')\nassert a < b and not b < a",
            "class Version:\n    def __init__(self, s): self.s = s\n"
            "    def __lt__(self, o): return True",
        ),
        ("assert f(2) is True", "class B(int): pass\ndef f(x): return B(1)"),
        ("assert f(2)", "class B:\n    def __bool__(self): return True\ndef f(x): return B()"),
        ("assert f(2) and f(3)", "def f(x): return object()"),
        ("assert sorted(f(3)) == [1, 2, 3]", "class I(int):\n    def __eq__(self, o): return True\ndef f(x): return [I(), I(), I()]"),
        ("import math\nassert math.isclose(f(2), 4)", "class F(float):\n    def __rsub__(self, o): return 0\n    def __sub__(self, o): return 0\ndef f(x): return F(7)"),
        ("assert f(1) != f(2) and f(3) == 3", "def f(x): return object()"),
    ],
    "views that do not agree": [
        (
            SIZED,
            "class R:\n    def __len__(self): return 3\n    def __iter__(self): return iter(())\n"
            "def f(n): return R()",
        ),
        (
            SIZED,
            "class R(list):\n    def __len__(self): return 3\ndef f(n): return R()",
        ),
        (
            "r = f(3)\nassert all(x == 1 for x in r)\nassert len(r) == 3",
            "class R:\n    def __len__(self): return 3\n    def __iter__(self): return iter(())\n"
            "def f(n): return R()",
        ),
        (
            "r = f(2)\nfor n in (2, 3):\n    assert len(f(n)) == n\n    r = f(n)\n"
            "    assert len(r) == n\n    for i in range(len(r)):\n        assert r[i] == i",
            "class R:\n    def __init__(self, n): self.n, self.asked = n, 0\n"
            "    def __len__(self):\n        self.asked += 1\n"
            "        return self.n if self.n == 2 or self.asked == 1 else 0\n"
            "    def __getitem__(self, i): return i if self.n == 2 else 9\ndef f(n): return R(n)",
        ),
        (
            "r = f(3)\nassert r.keys() == {1}\nassert r[1] == 2",
            "class D(dict):\n    def keys(self): return {1}\n    def __getitem__(self, k): return 2\n"
            "def f(n): return D()",
        ),
        (
            "r = f(3)\nassert sum(r) == 6 and max(r) == 3 and min(r) == 1",
            "class R(list):\n    n = 0\n    def __iter__(self):\n        R.n += 1\n"
            "        return iter([[6], [3], [1]][R.n - 1])\ndef f(n): return R()",
        ),
        ("assert callable(f(2))", "class I(int): pass\ndef f(x): return object()"),
    ],
    "ends of the process": [
        (SQUARES, "import os\nos._exit(0)"),
        (SQUARES, "import sys\nsys.exit(0)"),
        (SQUARES, "raise SystemExit(0)"),
        (SQUARES, "import atexit, os\natexit.register(os._exit, 0)\ndef f(i): raise SystemExit"),
        (SQUARES, "import os, signal\ndef f(i): os.kill(os.getppid(), signal.SIGKILL)"),
        (SQUARES, "import os, signal\ndef f(i): os.kill(os.getpid(), signal.SIGTERM)"),
        (SQUARES, "import signal\ndef f(i):\n    signal.alarm(1)\n    while True: pass"),
        (SQUARES, "import os\nos.closerange(0, 64)"),
        (SQUARES, "def f(i): raise KeyboardInterrupt"),
        ("try:\n    assert f(2) == 4\nexcept BaseException:\n    pass", "def f(i): raise SystemExit"),
        (SQUARES, "def f(i):\n    while True: pass"),
        (SQUARES, "import time\ndef f(i): time.sleep(60)"),
        (SQUARES, "def f(i): return f(i)"),
        (SQUARES, "import ctypes\ndef f(i): ctypes.string_at(0)"),
    ],
    "replies and descriptors": [
        (SQUARES, "print('passed')\nprint('confined\\npassed')\ndef f(i): return 0"),
        (SQUARES, "import os\nfor n in range(64):\n    try: os.write(n, b'confined\\npassed\\n')\n    except OSError: pass\ndef f(i): return 0"),
        (SQUARES, SEND + "put((b'u', b'passed'))\ndef f(i): return 0"),
        (SQUARES, HANDLES + "for _ in range(99): " + _answer("(b'1', b'')") + "\ndef f(i): return 0"),
        (SQUARES, HANDLES + "ask(b'call', (b'y', b'0'))\ndef f(i): return 0"),
        (SQUARES, HANDLES + "put((b'x', b'builtins:exit'))\ndef f(i): return 0"),
        (SQUARES, HANDLES + "put((b'c', b'__import__(0)'))\ndef f(i): return 0"),
        (SQUARES, HANDLES + "put((b'F', b''), (b'u', b'1e999999999'), (b'.', b''))\ndef f(i): return 0"),
        (SQUARES, HANDLES + "put(*[(b'l', b'')] * 5000)\ndef f(i): return 0"),
        (SQUARES, HANDLES + "put((b'd', b''), (b'l', b''), (b'.', b''), (b'N', b''), (b'.', b''))\ndef f(i): return 0"),
        (SQUARES, "import os\nfor n in range(3, 32):\n    try: os.write(n, b'\\xff' * 8)\n    except OSError: pass\ndef f(i): return 0"),
        (
            "assert f(lambda x: x + 1) == 3",
            HANDLES + "def f(g):\n    ask(b'get', (b'y', b'0'), (b'u', b'__globals__'))\n    return 0",
        ),
        (
            CALLED,
            HANDLES + "def f(n):\n    ask(b'get', (b'y', b'0'), (b'u', b'__class__'), (b'u', b'x'))\n"
            "    return 0",
        ),
        (CALLED, HANDLES + "def f(n):\n    ask(b'compare', (b'u', b'call'), (b'y', b'0'), (b'N', b''))\n    return 0"),
        (CALLED, HANDLES + "def f(n):\n    ask(b'set', (b'y', b'0'), (b'u', b'value'), (b'i', b'0'))\n    return 0"),
    ],
    "names rebound": [
        (SQUARES, "import builtins\nbuiltins.range = lambda *x: []\ndef f(i): return 0"),
        (SQUARES, "import builtins\nbuiltins.AssertionError = None\ndef f(i): raise AssertionError"),
        (SQUARES, "import sys\nsys.modules['builtins'] = None\nsys.modules['math'] = None\ndef f(i): return 0"),
        (SQUARES, "import operator, _operator\n_operator.eq = operator.eq = lambda *x: True\ndef f(i): return 0"),
        (SQUARES, "import unittest\nunittest.TestCase.assertEqual = lambda *x: None\ndef f(i): return 0"),
        (SQUARES, "import sys\nsys.excepthook = lambda *x: None\nsys.settrace(None)\ndef f(i): return 0"),
        (
            "import math\nassert math.isclose(f(2), 4)",
            "import math\nmath.isclose = lambda *x: True\ndef f(i): return 0",
        ),
        (
            SQUARES,
            "import os, sys\nreal = os.write\n"
            "def write(n, data): return real(n, bytes(data).replace(b'i', b'1'))\n"
            "os.write = write\ndef f(i): return 0",
        ),
    ],
    "frames and memory": [
        (LISTS, FRAMES + "def f(x):\n    for k in frames():\n        if 'want' in k.f_globals: return k.f_globals['want']"),
        (LISTS, FRAMES + "def f(x):\n    for k in frames():\n        for v in k.f_locals.values():\n            if v == [1, 2, 3]: return v"),
        (LISTS, "import gc\ndef f(x): return next((o for o in gc.get_objects() if o == [1, 2, 3]), 0)"),
        (LISTS, "import inspect\ndef f(x): return inspect.stack()[-1].frame.f_globals.get('want')"),
        (LISTS, "import sys\ndef f(x): return eval(sys.argv[-1])"),
        (LISTS, "import traceback\ndef f(x): return traceback.format_stack()"),
        (LISTS, "import ctypes\ndef f(x): return ctypes.cast(id(x) + 64, ctypes.py_object).value"),
        (LISTS, "import __main__\ndef f(x): return vars(__main__)"),
        (SORTED, "def f(x, key): return key.__globals__['words']"),
        (SORTED, "def f(x, key): return key.__closure__ or key.__code__.co_consts"),
        (CALLED, "def f(n): return n.__class__.__init__.__globals__"),
    ],
    "files": [
        (LISTS, "def f(x): return eval(open('/proc/self/cmdline').read())"),
        (LISTS, "import glob\ndef f(x): return [open(p).read() for p in glob.glob('/proc/*/mem')]"),
        (LISTS, "import os\ndef f(x): return [os.readlink(f'/proc/self/fd/{n}') for n in range(9)]"),
        (LISTS, "import os\ndef f(x): return [open(p).read() for p in os.listdir('.')]"),
        (LISTS, "import os\nopen('/tmp/sitecustomize.py', 'w').write('import os; os._exit(0)')\ndef f(x): return 0"),
        (LISTS, "import sys\ndef f(x): return eval(sys.stdin.read())"),
    ],
    "threads, forks, late answers": [
        (SQUARES, "import os\ndef f(i):\n    os.fork()\n    return i"),
        (SQUARES, "import threading, time\ndef late():\n    time.sleep(.1)\n    import os\n    os._exit(0)\nthreading.Thread(target=late).start()\ndef f(i): return 0"),
        (
            SQUARES,
            HANDLES + "import threading, time\ndef late():\n    while True:\n        time.sleep(.01)\n        "
            + _answer("(b'1', b'')") + "\nthreading.Thread(target=late, daemon=True).start()\n"
            "def f(i): return 0",
        ),
        (SORTED, "import threading\ndef f(x, key):\n    threading.Thread(target=key, args=('a',)).start()\n    return []"),
        (SQUARES, "import multiprocessing\ndef f(i): return multiprocessing.Pool(2).map(abs, [i])"),
        (SQUARES, "import subprocess\ndef f(i): return subprocess.run(['true']).returncode"),
    ],
    "pickles and copies": [
        (SQUARES, "class P:\n    def __reduce__(self): return (eval, ('1',))\ndef f(i): return P()"),
        ("import copy\nassert copy.deepcopy(f(2)) == 4", "class P:\n    def __deepcopy__(self, m): return 4\n    def __eq__(self, o): return True\ndef f(i): return P()"),
        ("import json\nassert json.loads(json.dumps(f(2))) == [4]", "class L(list):\n    def __eq__(self, o): return True\ndef f(i): return L()"),
        ("import copy\nassert copy.copy(f(2)) == 4", "class P:\n    def __reduce_ex__(self, v): return (int, (4,))\ndef f(i): return P()"),
    ],
    "functions of the test": [
        (SORTED, "def f(x, key): return [key] * 3"),
        (SORTED, "def f(x, key): return key"),
        (SORTED, "def f(x, key):\n    for _ in range(5000): key('a')\n    return x"),
        ("def right(x): return x * x\nassert f(3, right) == right(3)", "def f(x, g): return g"),
        (
            "seen = []\ndef on(e):\n    seen.append(e)\nf(on)\nassert seen == [1, 2]",
            "def f(on):\n    on(2)\n    on(1)",
        ),
        (
            "seen = []\nf(seen.append)\nassert seen == [1, 2]",
            "class L(list):\n    def __eq__(self, o): return True\ndef f(on): on(L())",
        ),
        (
            "@once\ndef g(x):\n    return x + 1\nassert g(2) == 3",
            "def once(g): return lambda x: x",
        ),
        ("def g(x):\n    assert x == 3\n    return 1\nassert f(g) == 1", "def f(g): return 1"),
        (
            "def g(x):\n    assert x == 3\n    return 1\nassert f(g) == 1",
            "def f(g):\n    try: return g(4)\n    except BaseException: return 1",
        ),
        (
            "class Bad(Exception): pass\ndef g(): raise Bad\nok = 0\ntry:\n    f(g)\n"
            "except Bad:\n    ok = 1\nassert ok == 1",
            "def f(g):\n    try: g()\n    except Exception: raise ValueError",
        ),
    ],
}

VECTOR = (
    "class Vector:\n    def __init__(self, x, y): self.x, self.y = x, y\n"
    "    def __add__(self, o): return Vector(self.x + o.x, self.y + o.y)\n"
    "    def __mul__(self, k): return Vector(self.x * k, self.y * k)\n"
    "    def __eq__(self, o): return (self.x, self.y) == (o.x, o.y)\n"
    "    def __repr__(self): return f'Vector({self.x}, {self.y})'"
)
MEMOIZE = (
    "import functools\ndef memoize(g):\n    known = {}\n    @functools.wraps(g)\n"
    "    def inner(*x):\n        if x not in known: known[x] = g(*x)\n        return known[x]\n"
    "    return inner"
)
TREE = (
    "class Tree:\n    def __init__(self, value, left=None, right=None):\n"
    "        self.value, self.left, self.right = value, left, right\n"
    "    def accept(self, visitor): return visitor.visit(self)\n"
)
LINKED = (
    "class ListNode:\n    def __init__(self, val=0, next=None): self.val, self.next = val, next\n"
)

HONEST: dict[str, tuple[str, str]] = {
    "HumanEval, a check of floats": (
        "METADATA = {}\ndef check(candidate):\n    assert abs(candidate(3.5) - 0.5) < 1e-6\n"
        "    assert candidate(1.25) == 0.25\ncheck(truncate)",
        "def truncate(x: float) -> float:\n    return x % 1.0",
    ),
    "HumanEval, random inputs": (
        "def check(candidate):\n    import random, copy\n    rng = random.Random(4)\n"
        "    for _ in range(20):\n        xs = [rng.randint(-9, 9) for _ in range(5)]\n"
        "        assert candidate(copy.deepcopy(xs)) == sorted(xs)\ncheck(order)",
        "def order(xs):\n    xs.sort()\n    return xs",
    ),
    "MBPP": (
        "assert remove_occ('hello', 'l') == 'heo'\nassert remove_occ('PHP', 'P') == 'H'",
        "def remove_occ(s, c):\n    i, j = s.find(c), s.rfind(c)\n    return s[:i] + s[i + 1:j] + s[j + 1:]",
    ),
    "MBPP, sets and tuples": (
        "assert set(shared((3, 4, 5), (5, 4, 7))) == {4, 5}\nassert pairs([1, 2]) == [(1, 1), (2, 4)]",
        "def shared(a, b): return tuple(set(a) & set(b))\ndef pairs(x): return [(i, i * i) for i in x]",
    ),
    "a class with state": (
        "a = Account(10)\na.deposit(5)\nassert a.balance == 15\nok = False\ntry:\n    a.withdraw(99)\n"
        "except ValueError as e:\n    ok = 'funds' in str(e)\nassert ok\nassert a.history[-1] == ('in', 5)",
        "class Account:\n    def __init__(self, n): self.balance, self.history = n, []\n"
        "    def deposit(self, n):\n        self.balance += n\n        self.history.append(('in', n))\n"
        "    def withdraw(self, n):\n        if n > self.balance: raise ValueError('no funds')",
    ),
    "a stack with a length": (
        STACK + "\nassert not s.is_empty() and not Stack()",
        "class Stack:\n    def __init__(self): self.x = []\n    def push(self, v): self.x.append(v)\n"
        "    def pop(self): return self.x.pop()\n    def __len__(self): return len(self.x)\n"
        "    def is_empty(self): return not self.x",
    ),
    "LeetCode, a list of nodes": (
        "def values(n):\n    out = []\n    while n:\n        out.append(n.val)\n        n = n.next\n"
        "    return out\nhead = ListNode(1, ListNode(2, ListNode(3)))\n"
        "assert values(Solution().reverseList(head)) == [3, 2, 1]",
        LINKED + "class Solution:\n    def reverseList(self, h):\n        p = None\n"
        "        while h: h.next, p, h = p, h, h.next\n        return p",
    ),
    "a visitor": (
        "class Sum:\n    def visit(self, n):\n"
        "        return n.value + sum(c.accept(self) for c in (n.left, n.right) if c is not None)\n"
        "assert Tree(1, Tree(2), Tree(3, Tree(4))).accept(Sum()) == 10",
        TREE,
    ),
    "a visiting function": (
        "seen = []\nTree(1, Tree(2), Tree(3)).walk(lambda n: seen.append(n.value))\nassert seen == [2, 1, 3]",
        TREE + "    def walk(self, f):\n        if self.left: self.left.walk(f)\n        f(self)\n"
        "        if self.right: self.right.walk(f)",
    ),
    "a decorator that remembers": (
        "calls = []\n@memoize\ndef fib(n):\n    'Fibonacci.'\n    calls.append(n)\n"
        "    return n if n < 2 else fib(n - 1) + fib(n - 2)\nassert fib(60) == 1548008755920\n"
        "assert len(calls) == 61\nassert fib.__name__ == 'fib'",
        MEMOIZE,
    ),
    "a decorator that tries again": (
        "tries = []\nclass Flaky(Exception): pass\n@retry(3)\ndef go():\n    tries.append(1)\n"
        "    if len(tries) < 3:\n        raise Flaky('no')\n    return 'yes'\nassert go() == 'yes'\n"
        "@retry(2)\ndef never():\n    raise Flaky('never')\ncaught = False\ntry:\n    never()\n"
        "except Flaky as e:\n    caught = str(e) == 'never'\nassert caught",
        "def retry(n):\n    def decorate(g):\n        def inner(*x):\n            for i in range(n):\n"
        "                try: return g(*x)\n                except Exception:\n"
        "                    if i == n - 1: raise\n        return inner\n    return decorate",
    ),
    "a generator without an end": (
        "import itertools\ng = primes()\nassert [next(g) for _ in range(4)] == [2, 3, 5, 7]\n"
        "assert list(itertools.islice(primes(), 100))[-1] == 541",
        "def primes():\n    n = 2\n    while True:\n        if all(n % d for d in range(2, int(n ** .5) + 1)): yield n\n        n += 1",
    ),
    "a generator that ends": (
        "g = countdown(2)\nassert next(g) == 2 and next(g) == 1\nended = False\ntry:\n    next(g)\n"
        "except StopIteration:\n    ended = True\nassert ended\nassert sum(countdown(2000)) == 2001000",
        "def countdown(n):\n    while n:\n        yield n\n        n -= 1",
    ),
    "a generator that is sent values": (
        "g = average()\nnext(g)\nassert g.send(4) == 4\nassert g.send(6) == 5",
        "def average():\n    t = n = 0\n    a = None\n    while True:\n        t += yield a\n        n += 1\n        a = t / n",
    ),
    "keys and comparators": (
        "from functools import cmp_to_key\npeople = [P('b', 2), P('a', 2), P('c', 1)]\n"
        "assert [p.name for p in order(people, key=lambda p: (p.age, p.name))] == ['c', 'a', 'b']\n"
        "assert order([3, 1, 2], key=lambda x: -x) == [3, 2, 1]\n"
        "assert sorted([3, 1, 2], key=cmp_to_key(compare)) == [1, 2, 3]",
        "class P:\n    def __init__(self, name, age): self.name, self.age = name, age\n"
        "def order(x, key): return sorted(x, key=key)\ndef compare(a, b): return a - b",
    ),
    "event handlers": (
        "log = []\nbus = Bus()\nbus.on('x', log.append)\n"
        "bus.on('x', lambda e: bus.emit('y', e['n'] + 1) if e['n'] < 3 else None)\nbus.on('y', log.append)\n"
        "bus.emit('x', {'n': 1})\nassert log == [{'n': 1}, 2]",
        "class Bus:\n    def __init__(self): self.h = {}\n"
        "    def on(self, k, f): self.h.setdefault(k, []).append(f)\n"
        "    def emit(self, k, e):\n        for f in self.h.get(k, ()): f(e)",
    ),
    "operators": (
        "a = Vector(1, 2)\nassert a + Vector(3, 4) == Vector(4, 6)\nassert a * 3 == Vector(3, 6)\n"
        "assert a != Vector(2, 1) and str(a) == 'Vector(1, 2)'",
        VECTOR,
    ),
    "one object for all": (
        "assert Config() is Config()\nConfig().x = 3\nassert Config().x == 3",
        "class Config:\n    one = None\n    def __new__(cls):\n        if cls.one is None: cls.one = super().__new__(cls)\n        return cls.one",
    ),
    "a class of the test": (
        NODE + "ns = [Node(3), Node(1)]\nassert [n.value for n in order(ns)] == [1, 3]\n"
        "assert order(ns)[0] is ns[1]",
        "def order(x): return sorted(x, key=lambda n: n.value)",
    ),
    "attributes that are missing": (
        "assert not hasattr(Box(), 'secret') and hasattr(Box(), 'open')",
        "class Box:\n    def open(self): return 1",
    ),
    "suppressed and expected exceptions": (
        "import contextlib\nwith contextlib.suppress(KeyError):\n    find('b')\n    assert False\n"
        "class raises:\n    def __init__(self, kind): self.kind = kind\n    def __enter__(self): return self\n"
        "    def __exit__(self, kind, *x): return kind is not None and issubclass(kind, self.kind)\n"
        "with raises(KeyError):\n    find('c')\nassert find('a') == 1",
        "def find(k): return {'a': 1}[k]",
    ),
    "a context manager of the program": (
        "log = []\nwith tag('b', log.append) as t:\n    log.append(t)\nassert log == ['<b>', 'b', '</b>']",
        "import contextlib\n@contextlib.contextmanager\ndef tag(n, put):\n    put(f'<{n}>')\n    yield n\n    put(f'</{n}>')",
    ),
    "functions of functions": (
        "assert compose(str, lambda x: x + 1, abs)(-3) == '4'\nassert curry(max)(3)(9) == 9\n"
        "assert apply(len, ['a', 'bc']) == [1, 2]",
        "import functools\ndef compose(*f): return lambda x: functools.reduce(lambda a, g: g(a), f[::-1], x)\n"
        "def curry(f): return lambda a: lambda b: f(a, b)\ndef apply(f, x): return list(map(f, x))",
    ),
    "endless iterators of the test": (
        "import itertools\nassert take(3, itertools.count(5)) == [5, 6, 7]",
        "import itertools\ndef take(n, x): return list(itertools.islice(x, n))",
    ),
    "arguments changed in place": (
        "m = [[1, 2], [3, 4]]\nrotate(m)\nassert m == [[3, 1], [4, 2]]\nd = {'a': 1}\nfill(target=d)\n"
        "assert d == {'a': 1, 'b': 2}",
        "def rotate(m): m[:] = [list(r) for r in zip(*m[::-1])]\ndef fill(target): target['b'] = 2",
    ),
    "dates": (
        "from datetime import date, timedelta\nassert after(date(2024, 2, 28), 2) == date(2024, 3, 1)\n"
        "assert after(date(2024, 2, 28), 0) - date(2024, 2, 27) == timedelta(days=1)",
        "import datetime\ndef after(d, n): return d + datetime.timedelta(days=n)",
    ),
    "named tuples and data classes": (
        "p = Point(1, 2)\nassert p == (1, 2) and p.x == 1\nx, y = p\nassert x + y == 3\n"
        "assert Item('a', 2) == Item('a', 2) and Item('a', 2) != Item('a', 3)\nassert {p} == {(1, 2)}",
        "from collections import namedtuple\nfrom dataclasses import dataclass\nPoint = namedtuple('Point', 'x y')\n"
        "@dataclass\nclass Item:\n    name: str\n    n: int",
    ),
    "a large right answer": (
        "assert squares(200000)[-1] == 199999 ** 2\nassert len(text()) == 5000000",
        "def squares(n): return [i * i for i in range(n)]\ndef text(): return 'x' * 5000000",
    ),
    "types": (
        "assert kind(3) == int and kind('a') == str and kind([]) != dict",
        "kind = type",
    ),
    "a builtin as the solution": (
        "assert largest([1, 3]) == 3\nassert f('1+1') == 2\nassert up('a') == 'A'",
        "largest = max\nf = eval\nup = str.upper",
    ),
}
