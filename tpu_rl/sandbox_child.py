"""What runs in the sandbox's process: confines itself, then runs one program. Standard library only, run by its path.

Confinement, in this order: its own mount, PID, network, IPC and UTS namespaces (and a user namespace where it is not
root); a root directory in memory that holds read-only binds of the Python library and nothing else, no /proc, no /dev;
resource limits; the user nobody without capabilities; no_new_privs; a list of allowed system calls (Linux on x86-64).
Whatever the kernel refuses ends the process before the program begins.
"""

import ctypes
import marshal
import os
import resource
import signal
import struct
import sys

PROTOCOL = int(sys.argv[1])
"""The descriptor on which the harness is told CONFINED, or why not, and then the values of expressions."""
CONFINED = b"confined\n"
NOBODY = 65534
LIBC = ctypes.CDLL(None, use_errno=True)

# <linux/sched.h>, <linux/mount.h>, <linux/prctl.h>, <linux/seccomp.h>
CLONE_THREAD = 0x10000
NAMESPACES = 0x20000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000  # mount, PID, network, IPC, UTS
NEW_USER = 0x10000000
READ_ONLY, NO_SUID, NO_DEV, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
DETACH = 2
SET_PARENT_DEATH_SIGNAL, SET_DUMPABLE, SET_SECCOMP, SET_NO_NEW_PRIVILEGES = 1, 4, 22, 38
PIVOT_ROOT = 155

# x86-64 system calls that a Python program with threads needs; none of them reaches another process or a socket.
ALLOWED = {
    "read": 0, "write": 1, "open": 2, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8, "mmap": 9,
    "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15,
    "pread64": 17, "pwrite64": 18, "readv": 19, "writev": 20, "access": 21, "pipe": 22, "select": 23, "sched_yield": 24,
    "mremap": 25, "madvise": 28, "dup": 32, "dup2": 33, "nanosleep": 35, "getitimer": 36, "alarm": 37, "setitimer": 38,
    "getpid": 39, "exit": 60, "uname": 63, "fcntl": 72, "fsync": 74, "fdatasync": 75, "truncate": 76, "ftruncate": 77,
    "getdents": 78, "getcwd": 79, "chdir": 80, "rename": 82, "mkdir": 83, "rmdir": 84, "unlink": 87, "readlink": 89,
    "umask": 95, "gettimeofday": 96, "getrlimit": 97, "getrusage": 98, "times": 100, "getuid": 102, "getgid": 104,
    "geteuid": 107, "getegid": 108, "getppid": 110, "getpgrp": 111, "sigaltstack": 131, "gettid": 186, "time": 201,
    "futex": 202, "sched_getaffinity": 204, "epoll_create": 213, "getdents64": 217, "set_tid_address": 218,
    "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230, "exit_group": 231, "epoll_wait": 232,
    "epoll_ctl": 233, "tgkill": 234, "openat": 257, "mkdirat": 258, "newfstatat": 262, "unlinkat": 263, "renameat": 264,
    "readlinkat": 267, "faccessat": 269, "pselect6": 270, "ppoll": 271, "set_robust_list": 273, "get_robust_list": 274,
    "eventfd2": 290, "epoll_create1": 291, "dup3": 292, "pipe2": 293, "getrandom": 318, "statx": 332, "rseq": 334,
    "faccessat2": 439,
}  # fmt: skip
CLONE, CLONE3, FIRST_OF_X32 = 56, 435, 0x40000000
X86_64 = 0xC000003E


def main() -> None:
    with os.fdopen(os.dup(0), "rb") as request_pipe:
        request = marshal.loads(request_pipe.read())
    os.close(0)
    try:
        if request["confine"]:
            confine(request["memory_bytes"], request["disk_bytes"], request["cpu_seconds"])
        else:
            limit(request["memory_bytes"], request["disk_bytes"], request["cpu_seconds"])
        give_stdin(request["stdin"].encode())
    except OSError as error:
        os.write(PROTOCOL, f"{error.filename or 'the sandbox'}: {error.strerror}\n".encode())
        os._exit(1)
    os.write(PROTOCOL, CONFINED)
    run(request["program"], request["steps"])


# --- the program -----------------------------------------------------------------------------------------------------


def run(program: str, steps: list[list[str]]) -> None:
    """The program as __main__, then each step: ["do", statements] or ["value", an expression that is reported]."""
    # Deep recursion is the program's to survive; the interpreter's own limit stands.
    scope = {"__name__": "__main__", "__builtins__": __builtins__}
    report, show = os.write, source
    try:  # noqa: SIM105  # contextlib takes milliseconds to import
        exec(compile(program, "program.py", "exec"), scope)
    except SystemExit:
        pass
    for kind, code in steps:
        if kind == "do":
            exec(compile(code, "test", "exec"), scope)
        else:
            value = show(eval(compile(code, "test", "eval"), scope))
            report(PROTOCOL, value.encode("unicode_escape") + b"\n")
    sys.stdout.flush()


def source(value) -> str:  # of any kind; typing takes milliseconds to import
    """An expression whose value compares equal: of literals and of what `program_tests.MAKERS` names.

    Containers of a kind of their own (Counter, named tuples) are the plain ones that they compare equal to. What an
    iterator gives is taken out of it. Of anything else it is `repr`, which is then no such expression.
    """

    def listed(values) -> str:
        return ", ".join([source(item) for item in values])

    kind = type(value).__name__
    if isinstance(value, dict):
        return "{" + ", ".join([f"{source(key)}: {source(item)}" for key, item in value.items()]) + "}"
    if isinstance(value, tuple):
        return f"({listed(value)},)" if value else "()"
    if isinstance(value, list):
        return f"[{listed(value)}]"
    if isinstance(value, (set, frozenset)):
        return f"{'set' if isinstance(value, set) else 'frozenset'}([{listed(value)}])"
    if kind == "dict_keys":
        return "{" + ", ".join([f"{source(key)}: None" for key in value]) + "}.keys()"
    if kind == "dict_values":
        return "{" + ", ".join([f"{n}: {source(item)}" for n, item in enumerate(value)]) + "}.values()"
    if kind == "dict_items":
        return source(dict(value)) + ".items()"
    if kind == "deque":
        return f"collections.deque([{listed(value)}])"
    if kind in ("Fraction", "Decimal"):
        return f"{'fractions' if kind == 'Fraction' else 'decimal'}.{repr(value)}"
    if hasattr(value, "__next__"):
        return f"iter([{listed(value)}])"
    if isinstance(value, float) and value - value != 0:
        return f"float('{float.__repr__(value)}')"
    if isinstance(value, int) and not isinstance(value, bool):  # hex: of thousands of digits repr refuses to be
        return repr(int(value)) if abs(value) < 10**4000 else hex(value)
    return repr(value)


def give_stdin(content: bytes) -> None:
    """`content` as descriptor 0: a file that has no name."""
    path = "stdin"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(path)
    while content:
        content = content[os.write(descriptor, content) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    if descriptor:
        os.dup2(descriptor, 0)
        os.close(descriptor)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  # the program's, for as long as it runs


# --- confinement -----------------------------------------------------------------------------------------------------


def confine(memory_bytes: int, disk_bytes: int, cpu_seconds: int) -> None:
    """Raises OSError, with the step as its file name, where the kernel refuses any of it."""
    if (sys.platform, os.uname().machine) != ("linux", "x86_64"):
        raise OSError(1, "only Linux on x86-64 is known", "system calls")
    user, group = os.geteuid(), os.getegid()
    # Root in a container may be without the right to: anybody may have the right to in a user namespace.
    root = user == 0 and LIBC.unshare(NAMESPACES) == 0
    if not root:
        check("unshare", LIBC.unshare(NAMESPACES | NEW_USER))
        for file, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{NOBODY} {user} 1"),
            ("gid_map", f"{NOBODY} {group} 1"),
        ):
            write_file(f"/proc/self/{file}", text)
    enter_process_namespace()
    make_root(disk_bytes)
    limit(memory_bytes, disk_bytes, cpu_seconds)
    if root:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    drop_capabilities()
    # Only now: a change of user clears it.
    check("prctl", LIBC.prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0))
    check("prctl", LIBC.prctl(SET_DUMPABLE, 0, 0, 0, 0))
    check("no_new_privs", LIBC.prctl(SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    allow_system_calls()


def enter_process_namespace() -> None:
    """Go on in a child that is process 1 of the new namespace: when it ends, whatever it started ends with it."""
    check("prctl", LIBC.prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0))
    child = os.fork()
    if child:
        for descriptor in (1, 2, PROTOCOL):
            os.close(descriptor)
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    check("prctl", LIBC.prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0))


def make_root(disk_bytes: int) -> None:
    """A root directory in memory with the Python library, and what it links to, at their places, read-only."""
    os.umask(0o022)  # nobody must be able to enter what root makes here, whatever this user's own mask
    kept = {place for place in ("/lib", "/lib64", "/usr/lib", "/usr/lib64") if os.path.isdir(place)}
    links = {place for place in kept if os.path.islink(place)}
    # Of an interpreter with a directory of its own, lib also holds what its extension modules link to.
    kept |= {place for place in (*sys.path, sys.base_prefix + "/lib") if os.path.isdir(place)}
    free = (place for place in ("/mnt", "/media", "/srv", "/tmp") if os.path.isdir(place))
    new = next(place for place in free if not any(other.startswith(place + "/") for other in kept))
    mount("none", "/", None, RECURSIVE | PRIVATE)
    mount("tmpfs", new, "tmpfs", NO_SUID | NO_DEV, "size=64k,nr_inodes=256,mode=0755")
    for place in sorted(kept):
        source, target = os.path.realpath(place), new + place
        if place in links:
            os.symlink(os.readlink(place), target)
            continue
        os.makedirs(target, exist_ok=True)
        mount(source, target, None, BIND | RECURSIVE)
        # A remount must repeat the flags that were locked where the mount came from.
        locked = os.statvfs(source).f_flag & (os.ST_NOEXEC | os.ST_NOATIME | os.ST_NODIRATIME | os.ST_RELATIME)
        flags = {os.ST_NOEXEC: 8, os.ST_NOATIME: 1024, os.ST_NODIRATIME: 2048, os.ST_RELATIME: 1 << 21}
        again = sum(flags[bit] for bit in flags if locked & bit)
        mount("none", target, None, REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEV | again)
    os.mkdir(new + "/tmp")
    mount("tmpfs", new + "/tmp", "tmpfs", NO_SUID | NO_DEV, f"size={disk_bytes},nr_inodes=1024,mode=1777")
    mount("none", new, None, REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEV)
    os.chdir(new)
    check("pivot_root", LIBC.syscall(PIVOT_ROOT, b".", b"."))
    check("umount", LIBC.umount2(b".", DETACH))
    os.chdir("/tmp")


def limit(memory_bytes: int, disk_bytes: int, cpu_seconds: int) -> None:
    for what, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_FSIZE, disk_bytes),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))


def drop_capabilities() -> None:
    header = struct.pack("Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3 of <linux/capability.h>
    check("capset", LIBC.capset(header, bytes(24)))


def allow_system_calls() -> None:
    """The seccomp filter: another machine's call numbers kill, calls that are not listed fail with EPERM, new processes
    too; threads are allowed."""
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    kill, allow, refuse, unknown = 0x80000000, 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38
    numbers = sorted(ALLOWED.values())
    code = [
        (load, 0, 0, 4),  # the architecture
        (equal, 1, 0, X86_64),
        (give, 0, 0, kill),
        (load, 0, 0, 0),  # the call
        (at_least, 0, 1, FIRST_OF_X32),
        (give, 0, 0, kill),
        (equal, 0, 1, CLONE3),  # its flags lie in memory, where they cannot be looked at: libc then uses clone
        (give, 0, 0, unknown),
        (equal, 0, 4, CLONE),
        (load, 0, 0, 16),  # its flags
        (any_bit, 0, 1, CLONE_THREAD),
        (give, 0, 0, allow),
        (give, 0, 0, refuse),
        *((equal, len(numbers) - position, 0, number) for position, number in enumerate(numbers)),
        (give, 0, 0, refuse),
        (give, 0, 0, allow),
    ]
    instructions = b"".join(struct.pack("HBBI", *one) for one in code)
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    program = struct.pack("HxxxxxxP", len(code), ctypes.addressof(buffer))
    check("seccomp", LIBC.prctl(SET_SECCOMP, 2, program, 0, 0))


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    kind_bytes, option_bytes = (text.encode() if text else None for text in (kind, options))
    check(f"mount {target}", LIBC.mount(source.encode(), target.encode(), kind_bytes, flags, option_bytes))


def write_file(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def check(what: str, result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


if __name__ == "__main__":
    main()
