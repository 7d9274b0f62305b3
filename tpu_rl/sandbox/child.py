"""The program of the sandbox's process: confine itself, then run one model-written program.

It uses the standard library only, and is run by its path. The confinement, in this order:

1. its own mount, PID, network, IPC and UTS namespaces, and a user namespace if it is not root;
2. a root directory in memory with read-only binds of the Python library and nothing else: no /proc,
   no /dev;
3. resource limits;
4. the user nobody, without capabilities;
5. no_new_privs;
6. a list of allowed system calls (Linux on x86-64).

If the kernel refuses any of it, the process ends before the program begins.

The role "machine" (`machine.py`) runs shell commands: it has /usr and a few files of /etc besides,
read-only, a /proc and a /dev of its own, a root directory that it may write to, and a list of
refused system calls in place of the allowed ones.
"""

import ctypes
import marshal
import os
import resource
import signal
import struct
import sys

PROTOCOL = int(sys.argv[1])
"""The descriptor of the report: CONFINED, or the reason why not, and then a test's verdict."""
CONFINED = b"confined\n"
NOBODY = 65534
LIBC = ctypes.CDLL(None, use_errno=True)

# <linux/sched.h>, <linux/mount.h>, <linux/prctl.h>, <linux/seccomp.h>
CLONE_THREAD = 0x10000
# Mount, PID, network, IPC, UTS.
NAMESPACES = 0x20000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000
NEW_USER = 0x10000000
READ_ONLY = 1
NO_SUID = 2
NO_DEV = 4
REMOUNT = 32
BIND = 4096
RECURSIVE = 16384
PRIVATE = 1 << 18
DETACH = 2
SET_PARENT_DEATH_SIGNAL = 1
SET_DUMPABLE = 4
SET_SECCOMP = 22
SET_NO_NEW_PRIVILEGES = 38
PIVOT_ROOT = 155

# x86-64 system calls that a Python program with threads needs. None of them reaches another process
# or a socket.
ALLOWED = {
    # files
    **dict(read=0, write=1, open=2, close=3, stat=4, fstat=5, lstat=6, lseek=8, pread64=17),
    **dict(pwrite64=18, readv=19, writev=20, access=21, dup=32, dup2=33, fcntl=72, fsync=74),
    **dict(fdatasync=75, truncate=76, ftruncate=77, getdents=78, getcwd=79, chdir=80),
    **dict(rename=82, mkdir=83, rmdir=84, unlink=87, readlink=89, umask=95, getdents64=217),
    **dict(openat=257, mkdirat=258, newfstatat=262, unlinkat=263, renameat=264),
    **dict(readlinkat=267, faccessat=269, dup3=292, statx=332, faccessat2=439),
    # memory
    **dict(mmap=9, mprotect=10, munmap=11, brk=12, mremap=25, madvise=28),
    # waiting
    **dict(poll=7, pipe=22, select=23, sched_yield=24, nanosleep=35, epoll_create=213),
    **dict(epoll_wait=232, epoll_ctl=233, pselect6=270, ppoll=271, eventfd2=290),
    **dict(epoll_create1=291, pipe2=293),
    # time
    **dict(getitimer=36, alarm=37, setitimer=38, gettimeofday=96, times=100, time=201),
    **dict(clock_gettime=228, clock_getres=229, clock_nanosleep=230),
    # itself
    **dict(getpid=39, exit=60, uname=63, getrlimit=97, getrusage=98, getuid=102, getgid=104),
    **dict(geteuid=107, getegid=108, getppid=110, getpgrp=111, gettid=186),
    **dict(sched_getaffinity=204, exit_group=231, getrandom=318),
    # signals and threads
    **dict(rt_sigaction=13, rt_sigprocmask=14, rt_sigreturn=15, sigaltstack=131, futex=202),
    **dict(set_tid_address=218, tgkill=234, set_robust_list=273, get_robust_list=274),
    **dict(rseq=334),
}
REFUSED = (
    # ptrace, syslog, personality, pivot_root, chroot, acct, mount, umount2, swapon, swapoff, reboot
    *(101, 103, 135, 155, 161, 163, 165, 166, 167, 168, 169),
    # modules, quotactl, kexec, keys, unshare, perf_event_open, fanotify_init, handles of files
    *(175, 176, 313, 179, 246, 320, 248, 249, 250, 272, 298, 300, 303, 304),
    # setns, process_vm_readv, process_vm_writev, pidfd_getfd, bpf, userfaultfd, io_uring
    *(308, 310, 311, 438, 321, 323, 425, 426, 427),
    # open_tree, move_mount, fsopen, fsconfig, fsmount, mount_setattr
    *(428, 429, 430, 431, 432, 442),
)
"""x86-64 system calls that programs of a shell do not need, and that reach into the kernel."""
SOCKET = 41
LAST_FAMILY = 10
"""AF_UNIX, AF_INET and AF_INET6 are at most this; families beyond it may not know namespaces."""
CLONE = 56
CLONE3 = 435
FIRST_OF_X32 = 0x40000000
X86_64 = 0xC000003E


def main() -> None:
    """Read the request from stdin, confine this process, and run the program."""
    with os.fdopen(os.dup(0), "rb") as request_pipe:
        request = marshal.loads(request_pipe.read())
    os.close(0)
    try:
        if request["confine"]:
            sizes = request["memory_bytes"], request["disk_bytes"], request["cpu_seconds"]
            confine(*sizes, is_machine=request["role"] == "machine")
        else:
            limit(request["memory_bytes"], request["disk_bytes"], request["cpu_seconds"])
        give_stdin(request["stdin"].encode())
    except OSError as error:
        os.write(PROTOCOL, f"{error.filename or 'the sandbox'}: {error.strerror}\n".encode())
        os._exit(1)
    os.write(PROTOCOL, CONFINED)
    if request["role"]:
        converse(request["modules"], request["role"], request["arguments"])
    else:
        run(request["program"])


# --- the program ---


def run(program: str) -> None:
    """Run the program as __main__."""
    scope = {"__name__": "__main__", "__builtins__": __builtins__}
    try:  # noqa: SIM105  # contextlib takes milliseconds to import
        exec(compile(program, "program.py", "exec"), scope)
    except SystemExit:
        pass
    sys.stdout.flush()


def converse(modules, role: str, arguments) -> None:
    """Call a function of the channel's modules, by their names and code; report what it returns."""
    scope = {}
    for name, code in modules:
        sys.modules[name] = type(sys)(name)
        scope = vars(sys.modules[name])
        exec(code, scope)
    verdict = scope[role](*arguments)
    if verdict is not None:
        os.write(PROTOCOL, verdict.encode("unicode_escape") + b"\n")
        # Threads of a test have nothing to say any more.
        os._exit(0)


def give_stdin(content: bytes) -> None:
    """Make descriptor 0 an unnamed file with this content."""
    path = "stdin"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(path)
    while content:
        content = content[os.write(descriptor, content) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    if descriptor:
        os.dup2(descriptor, 0)
        os.close(descriptor)
    # The program uses it as long as it runs.
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115


# --- confinement ---


def confine(memory_bytes: int, disk_bytes: int, cpu_seconds: int, is_machine: bool = False) -> None:
    """Confine this process; `is_machine` if it will run shell commands.

    Raises OSError if the kernel refuses a step. Its file name is the step.
    """
    if (sys.platform, os.uname().machine) != ("linux", "x86_64"):
        raise OSError(1, "only Linux on x86-64 is known", "system calls")
    user = os.geteuid()
    group = os.getegid()
    # Root in a container may lack the right to make namespaces, and any user may have it inside a
    # user namespace.
    is_root = user == 0 and LIBC.unshare(NAMESPACES) == 0
    if not is_root:
        check("unshare", LIBC.unshare(NAMESPACES | NEW_USER))
        for file, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{NOBODY} {user} 1"),
            ("gid_map", f"{NOBODY} {group} 1"),
        ):
            write_file(f"/proc/self/{file}", text)
    enter_process_namespace()
    make_root(disk_bytes, is_machine)
    if not is_machine:
        limit(memory_bytes, disk_bytes, cpu_seconds)
    if is_root:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    drop_capabilities()
    # A change of user clears these, so they come after it.
    check("prctl", LIBC.prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0))
    check("prctl", LIBC.prctl(SET_DUMPABLE, 0, 0, 0, 0))
    check("no_new_privs", LIBC.prctl(SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    filter_system_calls(refuse_system_calls() if is_machine else allow_system_calls())


def enter_process_namespace() -> None:
    """Continue in a child that is process 1 of the new namespace.

    When process 1 ends, everything that it started ends with it.
    """
    check("prctl", LIBC.prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0))
    child = os.fork()
    if child:
        for descriptor in (1, 2, PROTOCOL):
            os.close(descriptor)
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    check("prctl", LIBC.prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0))


def make_root(disk_bytes: int, is_machine: bool) -> None:
    """Enter a root directory in memory.

    It has the Python library, and the libraries that it links to, read-only and at their paths.
    That of a machine has the programs of /usr, too, and all of it but these is its own.
    """
    # The user nobody must be able to enter what root makes here, whatever this user's mask is.
    os.umask(0o022)
    system = {path for path in ("/lib", "/lib64", "/usr/lib", "/usr/lib64") if os.path.isdir(path)}
    if is_machine:
        system |= {path for path in ("/usr", "/bin", "/sbin") if os.path.isdir(path)}
        system = {path for path in system if path[:5] != "/usr/"}
    links = {path for path in system if os.path.islink(path)}
    # If the interpreter has a directory of its own, its lib also has what extension modules link
    # to.
    python = {path for path in (*sys.path, sys.base_prefix + "/lib") if os.path.isdir(path)}
    visible = system | {path for path in python if not is_machine or path[:5] != "/usr/"}
    candidates = (path for path in ("/mnt", "/media", "/srv", "/tmp") if os.path.isdir(path))
    new = next(
        path for path in candidates if not any(other.startswith(path + "/") for other in visible)
    )
    mount("none", "/", None, RECURSIVE | PRIVATE)
    size = f"size={disk_bytes},nr_inodes=65536" if is_machine else "size=64k,nr_inodes=256"
    mount("tmpfs", new, "tmpfs", NO_SUID | NO_DEV, f"{size},mode=0755")
    for path in sorted(visible):
        source = os.path.realpath(path)
        target = new + path
        if path in links:
            os.symlink(os.readlink(path), target)
            continue
        os.makedirs(target, exist_ok=True)
        mount(source, target, None, BIND | RECURSIVE)
        # A remount must repeat the flags that are locked at the source.
        locked = os.statvfs(source).f_flag
        flags = {
            os.ST_NOEXEC: 8,
            os.ST_NOATIME: 1024,
            os.ST_NODIRATIME: 2048,
            os.ST_RELATIME: 1 << 21,
        }
        repeated = sum(flag for bit, flag in flags.items() if locked & bit)
        mount("none", target, None, REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEV | repeated)
    if is_machine:
        furnish(new)
        enter_root(new)
        return
    os.mkdir(new + "/tmp")
    mount(
        "tmpfs",
        new + "/tmp",
        "tmpfs",
        NO_SUID | NO_DEV,
        f"size={disk_bytes},nr_inodes=1024,mode=1777",
    )
    mount("none", new, None, REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEV)
    enter_root(new)
    os.chdir("/tmp")


def furnish(new: str) -> None:
    """Put what programs of a shell look for into a root directory, which becomes nobody's."""
    os.mkdir(new + "/proc")
    mount("proc", new + "/proc", "proc", NO_SUID | NO_DEV)
    os.mkdir(new + "/dev")
    for name in ("null", "zero", "full", "random", "urandom"):
        # Devices are binds: a user namespace may not make them.
        write_file(f"{new}/dev/{name}", "")
        mount(f"/dev/{name}", f"{new}/dev/{name}", None, BIND)
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"{new}/dev/{name}")
    os.mkdir(new + "/etc")
    write_file(new + "/etc/passwd", f"nobody:x:{NOBODY}:{NOBODY}:nobody:/root:/bin/sh\n")
    write_file(new + "/etc/group", f"nogroup:x:{NOBODY}:\n")
    write_file(new + "/etc/hosts", "127.0.0.1 localhost\n")
    for source in ("/etc/ld.so.cache", "/etc/alternatives"):
        if os.path.isdir(source):
            os.mkdir(new + source)
        elif os.path.exists(source):
            write_file(new + source, "")
        else:
            continue
        mount(source, new + source, None, BIND)
        mount("none", new + source, None, REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEV)
    for name in ("tmp", "root", "home", "opt", "srv", "mnt", "var", "var/tmp", "dev/shm", ""):
        os.makedirs(f"{new}/{name}", exist_ok=True)
        # In a user namespace this user is nobody already.
        if os.geteuid() == 0:
            os.chown(f"{new}/{name}", NOBODY, NOBODY)


def enter_root(new: str) -> None:
    """Make a directory the root, and leave the old one."""
    os.chdir(new)
    check("pivot_root", LIBC.syscall(PIVOT_ROOT, b".", b"."))
    check("umount", LIBC.umount2(b".", DETACH))
    os.chdir("/")


def limit(memory_bytes: int, disk_bytes: int, cpu_seconds: int) -> None:
    """Set the resource limits."""
    for kind, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_FSIZE, disk_bytes),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))


def drop_capabilities() -> None:
    """Give up all capabilities."""
    # _LINUX_CAPABILITY_VERSION_3 of <linux/capability.h>
    header = struct.pack("Ii", 0x20080522, 0)
    check("capset", LIBC.capset(header, bytes(24)))


Instruction = tuple[int, int, int, int]
"""(code, jump if true, jump if false, operand), of <linux/bpf_common.h>."""
LOAD = 0x20
EQUAL = 0x15
GREATER = 0x25
AT_LEAST = 0x35
ANY_BIT = 0x45
GIVE = 0x06
# Verdicts, of <linux/seccomp.h>: EPERM is 1 and ENOSYS is 38.
KILL = 0x80000000
ALLOW = 0x7FFF0000
REFUSE = 0x00050000 | 1
UNKNOWN = 0x00050000 | 38


def allow_system_calls() -> list[Instruction]:
    """Return the filter of one program: calls of ALLOWED and threads, and no new processes."""
    numbers = sorted(ALLOWED.values())
    return [
        (EQUAL, 0, 4, CLONE),
        (LOAD, 0, 0, 16),  # its flags
        (ANY_BIT, 0, 1, CLONE_THREAD),
        (GIVE, 0, 0, ALLOW),
        (GIVE, 0, 0, REFUSE),
        *((EQUAL, len(numbers) - position, 0, number) for position, number in enumerate(numbers)),
        (GIVE, 0, 0, REFUSE),
        (GIVE, 0, 0, ALLOW),
    ]


def refuse_system_calls() -> list[Instruction]:
    """Return the filter of a machine: no calls of REFUSED, new namespaces, or rare sockets."""
    numbers = sorted(REFUSED)
    return [
        (EQUAL, 0, 4, CLONE),
        (LOAD, 0, 0, 16),  # its flags
        (ANY_BIT, 0, 1, NAMESPACES | NEW_USER),
        (GIVE, 0, 0, REFUSE),
        (GIVE, 0, 0, ALLOW),
        (EQUAL, 0, 4, SOCKET),
        (LOAD, 0, 0, 16),  # its family
        (GREATER, 0, 1, LAST_FAMILY),
        (GIVE, 0, 0, REFUSE),
        (GIVE, 0, 0, ALLOW),
        *((EQUAL, len(numbers) - position, 0, number) for position, number in enumerate(numbers)),
        (GIVE, 0, 0, ALLOW),
        (GIVE, 0, 0, REFUSE),
    ]


def filter_system_calls(of_calls: list[Instruction]) -> None:
    """Install a seccomp filter. What it refuses fails with EPERM.

    Calls by the numbers of another architecture kill the process.
    """
    code = [
        (LOAD, 0, 0, 4),  # the architecture
        (EQUAL, 1, 0, X86_64),
        (GIVE, 0, 0, KILL),
        (LOAD, 0, 0, 0),  # the call
        (AT_LEAST, 0, 1, FIRST_OF_X32),
        (GIVE, 0, 0, KILL),
        # The filter cannot read the flags of clone3, which are in memory. libc then uses clone.
        (EQUAL, 0, 1, CLONE3),
        (GIVE, 0, 0, UNKNOWN),
        *of_calls,
    ]
    instructions = b"".join(struct.pack("HBBI", *instruction) for instruction in code)
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    program = struct.pack("HxxxxxxP", len(code), ctypes.addressof(buffer))
    check("seccomp", LIBC.prctl(SET_SECCOMP, 2, program, 0, 0))


def mount(
    source: str, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    """Mount a file system."""
    kind_bytes = kind.encode() if kind else None
    option_bytes = options.encode() if options else None
    result = LIBC.mount(source.encode(), target.encode(), kind_bytes, flags, option_bytes)
    check(f"mount {target}", result)


def write_file(path: str, text: str) -> None:
    """Write a file of /proc."""
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def check(step: str, result: int) -> None:
    """Raise OSError, with the step as its file name, if a call failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), step)


if __name__ == "__main__":
    main()
