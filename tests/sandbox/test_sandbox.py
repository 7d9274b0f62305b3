"""Model-written programs: no attack reaches anything outside, and no program passes a test that it
does not solve."""

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from tests.fixtures.sandboxes import confined
from tpu_rl import rewards, sandbox
from tpu_rl.errors import MachineError
from tpu_rl.rewards import registry
from tpu_rl.sandbox import processes, unit_tests
from tpu_rl.verifiers import programs

LIMITS = sandbox.SandboxLimits(seconds=2.0)

# Each program prints ESCAPED if it succeeds. PORT, SECRET and PID stand for a server, a file and a
# process outside the sandbox.
ATTACKS = {
    "internet": "import socket; socket.create_connection(('1.1.1.1', 53), 1); print('ESCAPED')",
    "loopback": "import socket; socket.create_connection(('127.0.0.1', PORT), 1); print('ESCAPED')",
    "an abstract unix socket": (
        "import socket; socket.socket(socket.AF_UNIX).connect('\\0' + 'PID'); print('ESCAPED')"
    ),
    "reads a file": "open(SECRET).read(); print('ESCAPED')",
    "reads accounts": "open('/etc/passwd').read(); print('ESCAPED')",
    "reads by way of ..": "open('../../../..' + SECRET).read(); print('ESCAPED')",
    "reads by a link": "import os; os.symlink(SECRET, 'x'); open('x').read(); print('ESCAPED')",
    "writes beside a file": "open(SECRET + '.written', 'w').write('x'); print('ESCAPED')",
    "writes to the library": "import os; open(os.__file__, 'a'); print('ESCAPED')",
    "makes a directory in the root": "import os; os.mkdir('/new'); print('ESCAPED')",
    "its environment": "import os; print('ESCAPED' if 'TPU_RL_TOKEN' in os.environ else '')",
    "others' environments": (
        "import glob; [open(p).read() for p in glob.glob('/proc/*/environ')][0]; print('ESCAPED')"
    ),
    "memory by /proc": "open('/proc/self/mem', 'r+b'); print('ESCAPED')",
    "open files": (
        "import os\nfor n in range(3, 256):\n    try: os.fstat(n)\n    except OSError: continue\n"
        "    print('ESCAPED' * (n != PROTOCOL))"
    ),
    "forks": "import os; os.fork(); print('ESCAPED')",
    "executes": "import os, sys; os.execv(sys.executable, ['python', '-c', 'print(\"ESCAPED\")'])",
    "executes a setuid program": "import os; os.execv('/bin/su', ['su', '-c', 'echo ESCAPED'])",
    "a subprocess": "import subprocess; subprocess.run(['/bin/echo', 'ESCAPED']); print('ESCAPED')",
    "memory": "x = bytearray(3 << 30); print('ESCAPED')",
    "disk": "for n in range(300): open(f'{n}', 'wb').write(bytes(1 << 20))\nprint('ESCAPED')",
    "many files": "for n in range(10000): open(f'{n}', 'w').close()\nprint('ESCAPED')",
    "sees the trainer": "import os; os.kill(PID, 0); print('ESCAPED')",
    "signals everybody": "import os; os.kill(-1, 9); print('ESCAPED')",
    "raises its limits": (
        "import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1)); print('ESCAPED')"
    ),
    "becomes root": "import os; os.setuid(0); print('ESCAPED')",
    "changes its root": "import os; os.chroot('/tmp'); print('ESCAPED')",
    "a device": (
        "import os, stat; os.mknod('x', 0o666 | stat.S_IFCHR, os.makedev(1, 1)); print('ESCAPED')"
    ),
}

CALLS = {
    "ptrace": (101, 16, os.getpid()),
    "mount": (165, 0, 0),
    "unshare a user namespace": (272, 0x10000000),
    "clone a namespace": (56, 0x10000000 | 17),
    "clone3": (435, 0, 88),
    "io_uring_setup": (425, 8, 0),
    "userfaultfd": (323, 0),
    "keyctl": (250, 0, -3, 0),
    "bpf": (321, 0, 0, 0),
    "perf_event_open": (298, 0, 0, -1, -1, 0),
    "process_vm_readv": (310, os.getpid()),
    "open_by_handle_at": (304, 0, 0, 0),
    "setns": (308, 3, 0),
    "pivot_root": (155, 0, 0),
    "memfd_create": (319, 0, 0),
    "socket": (41, 2, 1, 0),
    "fork": (57,),
    "vfork": (58,),
    "execveat": (322, 0, 0, 0, 0, 0),
    "kexec_load": (246, 0, 0, 0, 0),
    "init_module": (175, 0, 0, 0),
    "pidfd_open": (434, 1, 0),
    "sched_setaffinity": (203, 0, 0, 0),
    "personality": (135, 0x0040000),
}


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """Return the values of PORT, SECRET and PID in the attacks."""
    secret = tmp_path_factory.mktemp("outside") / "secret"
    secret.write_text("secret")
    secret.chmod(0o666)
    with socket.socket() as server, socket.socket(socket.AF_UNIX) as abstract:
        server.bind(("127.0.0.1", 0))
        server.listen()
        abstract.bind(f"\0{os.getpid()}")
        abstract.listen()
        yield {
            "PORT": str(server.getsockname()[1]),
            "SECRET": repr(str(secret)),
            "PID": str(os.getpid()),
        }
        assert not list(secret.parent.glob("*.written"))
        assert secret.read_text() == "secret"


def fill_in(program: str, outside: dict[str, str]) -> str:
    for name, value in (outside | {"PROTOCOL": "int(__import__('sys').argv[1])"}).items():
        program = program.replace(name, value)
    return program


@confined
@pytest.mark.parametrize("attack", ATTACKS)
def test_no_attack_reaches_anything(attack, outside, monkeypatch):
    monkeypatch.setenv("TPU_RL_TOKEN", "secret")
    outcome = sandbox.run(fill_in(ATTACKS[attack], outside), limits=LIMITS)
    assert "ESCAPED" not in outcome.printed
    assert outcome.ended or attack in ("its environment", "open files")


@confined
def test_dangerous_system_calls_are_refused():
    program = (
        "import ctypes\nfor n, a in CALLS.items():\n print(n, ctypes.CDLL(None).syscall(*a))\n"
    )
    outcome = sandbox.run(program.replace("CALLS", repr(CALLS)), limits=LIMITS)
    assert outcome.printed.splitlines() == [f"{name} -1" for name in CALLS]
    x32 = sandbox.run(
        "import ctypes; ctypes.CDLL(None).syscall(0x40000000 + 39); print('ESCAPED')", limits=LIMITS
    )
    assert (x32.printed, bool(x32.ended)) == ("", True)


@confined
def test_attacks_fail_without_the_capability_of_administration(outside):
    """The sandbox then needs a user namespace, as for users who are not root, and in most
    containers."""
    attacks = {name: fill_in(code, outside) for name, code in ATTACKS.items()}
    program = textwrap.dedent(f"""
        import ctypes
        drop, administration = 24, 21  # PR_CAPBSET_DROP, CAP_SYS_ADMIN
        assert ctypes.CDLL(None).prctl(drop, administration) in (0, -1)
        from tpu_rl import sandbox
        if sandbox.refusal():
            print("refused:", sandbox.refusal())
        for name, attack in {attacks!r}.items():
            if "ESCAPED" in sandbox.run(attack, limits=sandbox.SandboxLimits(seconds=2.0)).printed:
                print("escaped:", name)
        print("done")
    """)
    environment = os.environ | {
        "PYTHONPATH": str(Path(sandbox.__file__).parents[2]),
        "TPU_RL_TOKEN": "secret",
    }
    process = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    if process.stdout.startswith("refused:"):
        pytest.skip(process.stdout)
    assert process.stdout == "done\n"


@pytest.mark.slow
@confined
@pytest.mark.parametrize(
    ("program", "ended"),
    [
        ("while True: pass", "time"),
        ("import time; time.sleep(1000)", "time"),
        ("while True: print('x' * 1000)", "output"),
        ("import os\nwhile True: os.write(2, b'x' * 1000)", "output"),
        ("import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(): f()\nf()", ("exit", "time")),
        ("import ctypes; ctypes.string_at(0)", "exit"),
        (
            (
                "import threading as t, time\n"
                "while True: t.Thread(target=time.sleep, args=(9,)).start()"
            ),
            ("exit", "time"),
        ),
        ("1 / 0", "exit 1"),
        ("import os; os._exit(0)", ""),
        ("import sys; sys.exit(0)", ""),
        ("import os, time; os.closerange(1, 64); time.sleep(1000)", "time"),
        ("import os, time; os.closerange(1, 64); time.sleep(0.1)", ""),
        (
            (
                "import threading\nt = threading.Thread(target=print, args=(1,))\n"
                "t.start()\nt.join()"
            ),
            "",
        ),
    ],
)
def test_outcome_tells_why_a_program_ended(program, ended):
    assert sandbox.run(program, limits=LIMITS).ended.startswith(ended)
    if not ended:
        assert sandbox.run(program, limits=LIMITS).ended == ""


@confined
def test_programs_import_the_standard_library_with_any_umask():
    mask = os.umask(0o077)
    try:
        assert sandbox.run("import heapq, fractions\nprint(1)").printed == "1\n"
    finally:
        os.umask(mask)


# --- verdicts ---

TEST = (
    "want = [1, 4, 9]\nassert squares(3) == want\n"
    "assert abs(squares(2)[1] - 4) < 1e-9 and len(squares(5)) == 5"
)
HONEST = "def squares(n):\n    return [i * i for i in range(1, n + 1)]\n"

FORGERIES = {
    "exits": "import os\nos._exit(0)",
    "exits when asked": "import sys\ndef squares(n): sys.exit(0)",
    "prints a verdict": "print('PASS', True)\ndef squares(n): return True",
    "equals everything": (
        "class Any(list):\n    def __eq__(self, other): return True\n"
        "    def __getitem__(self, i): return self\n"
        "    def __sub__(self, other): return 0\n"
        "    def __len__(self): return 5\n"
        "def squares(n): return Any()"
    ),
    "shows itself as true": (
        "class Any:\n    def __repr__(self): return 'True'\n"
        "    def __getitem__(self, i): return 4\n"
        "def squares(n): return Any()"
    ),
    "patches builtins": (
        "import builtins\nbuiltins.abs = lambda x: 0\n"
        "builtins.len = lambda x: 5\n"
        "builtins.repr = lambda x: '[1, 4]'\n"
        "builtins.bool = lambda x: True\ndef squares(n): return [0, 0, 0]"
    ),
    "reads the stack": (
        "import sys\ndef squares(n):\n    frame = sys._getframe()\n    while frame:\n"
        "        for scope in (frame.f_locals, frame.f_globals):\n"
        "            if 'want' in scope: return scope['want']\n"
        "        frame = frame.f_back\n    return []"
    ),
    "searches all objects": (
        "import gc\ndef squares(n):\n"
        "    return next((o for o in gc.get_objects() if o == [1, 4, 9]), [])"
    ),
    "reads its arguments": "import sys\ndef squares(n): return eval(sys.argv[-1])",
    "writes to every descriptor": (
        "import os\nfor n in range(3, 64):\n"
        "    try:\n        for _ in range(9): os.write(n, b'True\\n')\n"
        "    except OSError: pass\ndef squares(n): return []"
    ),
    "patches the harness": (
        "import __main__, sys\n__main__.plain = lambda x: True\nsys.modules['ast'] = None\n"
        "def squares(n): return [1, 4]"
    ),
    "patches the writer": (
        "import os\nreal = os.write\n"
        "os.write = lambda fd, data: real(fd, b'True\\n')\n"
        "def squares(n): return [0] * n"
    ),
}


@confined
@pytest.mark.parametrize("forgery", FORGERIES)
def test_no_forged_verdict_is_rewarded(forgery):
    assert not unit_tests.passes(FORGERIES[forgery], TEST, LIMITS)


@confined
def test_honest_programs_pass():
    assert unit_tests.passes(HONEST, TEST)
    assert not unit_tests.passes(HONEST.replace("n + 1", "n"), TEST)
    echo = {"input": "2\n3\n", "output": "5"}
    assert unit_tests.passes("print(int(input()) + int(input()))", echo)
    assert unit_tests.passes(
        "import sys\nprint(sum(map(int, sys.stdin.read().split())), ' \\n\\n')", echo
    )
    assert not unit_tests.passes("print(int(input()) * int(input()))", echo)
    assert not unit_tests.passes("print(5)\n1 / 0", echo | {"output": "6"})
    stack = "class Stack(list):\n    push = list.append\n    def size(self): return len(self)"
    assert unit_tests.passes(
        stack, "s = Stack()\ns.push(1)\nassert s.size() == 1 and not s.size() == 2\nassert s == [1]"
    )
    assert unit_tests.passes("def sort(x): x.sort()", "xs = [2, 1]\nsort(xs)\nassert xs == [1, 2]")
    counts = "import collections\ndef count(x): return collections.Counter(x)"
    assert unit_tests.passes(counts, "assert count('aab') == {'a': 2, 'b': 1}")


@confined
@pytest.mark.parametrize(
    "test",
    [
        "from math import isclose\nassert isclose(f(), 1.0)",
        (
            "import math as m, collections.abc\n"
            "assert m.isclose(f(), 1.0) and isinstance(f(), collections.abc.Hashable)"
        ),
        "from fractions import Fraction\nwant = Fraction(2, 2)\nassert f() == want",
    ],
)
def test_tests_may_import_known_modules(test):
    assert unit_tests.passes("def f(): return 1", test)
    assert not unit_tests.passes("def f(): return 2", test)
    assert not unit_tests.passes("def f(): return want", test)


# Expression -> a program with a function f for which it is true.
VALUES = {
    "list(f(3)) == [0, 1, 2]": "def f(n):\n    yield from range(n)",
    "sorted(f(3)) == [0, 1, 2] and f(3)[1] == 1": "def f(n): return range(n)",
    "list(f('ab')) == ['A', 'B']": "def f(x): return map(str.upper, x)",
    "''.join(f('ab')) == 'AB'": "def f(x): return (c.upper() for c in x)",
    "set(f()) == {1, 2} and f() == {1, 2} and len(f()) == 2": "def f(): return {1: 0, 2: 0}.keys()",
    "sum(f()) == 3 and dict(g()) == {1: 2}": (
        "def f(): return {1: 0, 2: 3}.values()\ndef g(): return {1: 2}.items()"
    ),
    "f() == float('inf') and f(-1) == -float('inf')": "def f(x=1): return x * float('inf')",
    "math.isnan(f()[0])": "def f(): return (float('nan'),)",
    "f() == fractions.Fraction(1, 2) == 0.5": (
        "import fractions\ndef f(): return fractions.Fraction(1, 2)"
    ),
    "f() == decimal.Decimal('0.1')": "from decimal import Decimal\ndef f(): return Decimal('0.1')",
    "f() == collections.deque([1, 2])": (
        "from collections import deque\ndef f(): return deque([1, 2])"
    ),
    "f() == {frozenset({1}), frozenset()}": "def f(): return {frozenset(), frozenset([1])}",
    "f() == 10 ** 5000": "def f(): return 10 ** 5000",
    "f() == 2 and f() is not True": (
        "import enum\nclass E(enum.IntEnum): A = 2\ndef f(): return E.A"
    ),
    "f() == ((), (1,), set(), frozenset(), {}, [], None, -1.5, 1 - 2j, b'x', 'a\\n')": (
        "def f(): return (), (1,), set(), frozenset(), {}, [], None, -1.5, 1 - 2j, b'x', 'a\\n'"
    ),
}


@confined
@pytest.mark.parametrize("claim", VALUES)
def test_values_that_are_not_literals_are_compared(claim):
    assert unit_tests.passes(VALUES[claim], f"assert {claim}")
    assert not unit_tests.passes("def f(*x): return [7]\ng = f", f"assert {claim}")


@confined
def test_statement_that_raises_after_the_asserts_fails_the_test():
    assert not unit_tests.passes("def f(): return 1", "assert f() == 1\nf(2)")


@pytest.mark.parametrize(
    "test",
    [
        *(
            "",
            "f(1)",
            "assert",
            "import numpy as np\nassert np.allclose(f(1), 1)",
        ),
        "assert sum(10, 15) == 6",
        "want = 1\nassert f() == 1\nassert want == 1",
        "from numpy import isclose\nassert isclose(f(), 1.0)",
        "from math import *\nassert f() == 1",
    ],
)
def test_tests_that_cannot_be_judged_are_refused(test):
    with pytest.raises(ValueError, match="test"):
        unit_tests.prepare(test)


# --- the reward ---

TESTS = [
    ["assert f(1) == 2", {"input": "", "output": ""}],
    {"inputs": ["1"], "outputs": ["2"]},
    '["assert f(1) == 2"]',
    ["assert f(1) == 2"],
    [],
]
COMPLETIONS = [
    (
        "First:\n```python\ndef f(x): return 0\n"
        "```\nNo:\n```py\ndef f(x): return x + 1\n"
        "```\nThat is it."
    ),
    "```\nprint(int(input()) + 1)\n```",
    "def f(x): return x + 1",
    "I cannot.",
    "pass",
]


@confined
def test_reward_of_programs():
    function = registry.resolve("python_tests")
    scores = rewards.score({"python_tests": function}, COMPLETIONS, COMPLETIONS, {"tests": TESTS})
    np.testing.assert_array_equal(scores.totals, np.array([1, 1, 1, 0, np.nan], np.float32))
    assert "no tests" in scores.faults[0].message


def test_no_program_runs_without_a_sandbox_unless_allowed(monkeypatch):
    for module in (sandbox, processes):
        monkeypatch.setattr(module, "refusal", lambda: "unshare: Operation not permitted")
    for use_reward in (
        lambda: registry.resolve("python_tests"),
        lambda: programs.python_tests(["p"], ["c"], tests=TESTS[:1]),
    ):
        with pytest.raises(MachineError, match="cannot sandbox") as error:
            use_reward()
        assert "unshare: Operation not permitted" in error.value.why
        assert "--allow-unsandboxed-code" in error.value.fix
    allowed = registry.resolve("python_tests", allow_unsandboxed_code=True)
    assert allowed(COMPLETIONS[:4], COMPLETIONS[:4], tests=TESTS[:4]) == [1, 1, 1, 0]


@pytest.mark.parametrize("broken", ["unshare", "mount", "pivot_root", "capset", "prctl"])
def test_program_does_not_run_if_a_step_of_the_sandbox_fails(broken, tmp_path, monkeypatch):
    """The system call fails, as in an older or stricter kernel."""
    child = tmp_path / "child.py"
    name = "syscall" if broken == "pivot_root" else broken
    source = processes.CHILD.read_text().replace(
        "LIBC = ctypes.CDLL(None, use_errno=True)",
        f"LIBC = ctypes.CDLL(None, use_errno=True)\nLIBC.{name} = lambda *_: -1",
    )
    child.write_text(source)
    monkeypatch.setattr(processes, "CHILD", child)
    with pytest.raises(sandbox.Refused, match=broken):
        sandbox.run("print('ran')")
