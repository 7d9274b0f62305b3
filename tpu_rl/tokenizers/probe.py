"""Try a tokenizer in a process with limits before this process loads it.

The files of a tokenizer are programs of their author: normalizers, patterns and decoders that may
loop, fill memory, or end the process from within their library. A tokenizer that has done well once
is known on this machine by the hash of its file.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tpu_rl.errors import InputError

SECONDS = 6
"""Processor time of the whole trial."""
WALL_TIME_FACTOR = 10
"""Multiple of SECONDS after which the process is ended by the clock."""
MEMORY_BYTES = 2**30
VERSION = "1"
"""Part of the hashes; change it with the trial."""
_OUT_OF_MEMORY = 3

_TRIAL = f"""
import json, os, re, resource, sys
file, sys.path[:] = sys.argv[1], json.loads(sys.argv[2])
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_CPU, ({SECONDS}, {SECONDS}))
if sys.platform == "linux":
    resource.setrlimit(resource.RLIMIT_DATA, ({MEMORY_BYTES}, {MEMORY_BYTES}))

def texts(parts):
    yield from ("a", "The 1st of 2,000 words: don't!", "  x\\t\\n\\r\\n y  ")
    yield "\\u00e9\\u4f60\\U0001f600\\u0301"
    yield "".join(map(chr, range(32, 127)))
    # Repetitions of what the patterns name make them try all ways, if they can.
    characters = dict.fromkeys("a0 \\n!_" + "".join(parts)[:2000])
    for character in list(characters)[:150]:
        yield character * 50 + "\\x00!"
        yield (character + "a") * 30 + "\\x00!"
    yield "a" * 5000

def require(is_right, message):
    if not is_right:
        raise ValueError(message)

def try_out(encode, decode, size, parts):
    for text in texts(parts):
        length = len(text.encode())
        plain = encode(text, False)
        require(len(plain) <= 64 + 16 * length, f"{{length}} bytes become {{len(plain)}} tokens")
        whole = encode(text, True)
        added = len(whole) - len(plain)
        require(added <= 64, f"it adds {{added}} tokens to a text")
        back = decode(plain)
        most = 64 + 256 * (length + len(plain))
        require(len(back) <= most, f"{{length}} bytes come back as {{len(back)}} characters")
    for number in [*range(min(size, 512)), *range(512, size, max(size // 512, 1))]:
        length = len(decode([number]))
        require(length <= 10000, f"a token becomes {{length}} characters")

try:
    if file.endswith(".model"):
        import sentencepiece
        processor = sentencepiece.SentencePieceProcessor()
        processor.Load(file)
        try_out(lambda text, special: processor.encode(text), processor.decode,
                processor.get_piece_size(), [])
    else:
        import tokenizers
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        tokenizer = tokenizers.Tokenizer.from_file(file)
        with open(file, encoding="utf-8") as opened:
            # Parsed, the vocabulary would take more memory than the tokenizer.
            parts = re.findall(r'"(?:Regex|String)"\\s*:\\s*"((?:[^"\\\\]|\\\\.)*)"', opened.read())
        try_out(
            lambda text, special: tokenizer.encode(text, add_special_tokens=special).ids,
            lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
            tokenizer.get_vocab_size(), parts)
except MemoryError:
    os._exit({_OUT_OF_MEMORY})
# A panic of the library is no Exception.
except BaseException as error:
    print(f"{{type(error).__name__}}: {{error}}"[:300].splitlines()[0])
    sys.stdout.flush()
    os._exit(1)
print("good")
"""


def require_harmless(file: Path, message: str) -> None:
    """Check a tokenizer.json or a sentencepiece model by a trial.

    Args:
        message: the first line of the error.

    Raises:
        InputError: if it fails, or exceeds the limits of time and memory.
    """
    hashed = hashlib.sha256(file.read_bytes() + VERSION.encode()).hexdigest()
    _require_harmless(hashed, str(file), message)


@functools.cache
def _require_harmless(hashed: str, file: str, message: str) -> None:
    known = _folder() / hashed
    if known.exists():
        return
    process = subprocess.Popen(
        [sys.executable, "-c", _TRIAL, file, json.dumps(sys.path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env=os.environ | {"RUST_BACKTRACE": "0", "TOKENIZERS_PARALLELISM": "false"},
    )
    try:
        printed, errors = process.communicate(timeout=WALL_TIME_FACTOR * SECONDS)
    except subprocess.TimeoutExpired:
        printed = b""
        errors = b""
        process.returncode = -signal.SIGXCPU
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if printed.decode(errors="replace").endswith("good\n"):
        # Without a folder for it, the next start tries again.
        with contextlib.suppress(OSError):
            known.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            known.touch()
        return
    raise InputError(
        message,
        where=file,
        why=_reason(process.returncode, printed, errors),
        fix="download its files again; do not use this one if it stays so: it may have been made "
        "to do harm",
    )


def _folder() -> Path:
    """Return the folder of this user with the hashes of good tokenizers."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "tpu_rl" / "tokenizers"


def _reason(code: int, printed: bytes, errors: bytes) -> str:
    """Return the reason for which a trial failed."""
    memory = f"it takes more than {MEMORY_BYTES >> 20} MiB of memory"
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"it takes more than {SECONDS} s"
    if code == _OUT_OF_MEMORY or b"memory allocation" in errors:
        return memory
    if code == -signal.SIGABRT:
        return "its library aborted"
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return printed.decode(errors="replace").strip()[:300] or f"exit code {code}"
