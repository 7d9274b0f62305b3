"""Rows from JSONL and Parquet files, each line checked before a run begins.

Whatever is wrong with a file is one InputError that names its line; what is only doubtful, `doubts` says.
"""

from __future__ import annotations

import difflib
import glob
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tpu_rl.errors import InputError, MachineError

Row = dict[str, Any]

TEXT_OR_MESSAGES = frozenset({"prompt", "completion", "chosen", "rejected"})
TEXTS = frozenset({"question"})
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""Who may speak in a conversation; a template refuses what it does not know of these."""
MAX_ROW_BYTES = 10_000_000
"""Of one line: no model reads a text of that length, so it is a mistake."""


def read(
    path: str | Path, columns: Sequence[str] = ("prompt",), check: Callable[[Row], None] | None = None
) -> list[Row]:
    """The rows of a JSONL or Parquet file, each with at least `columns`. Raises InputError for anything amiss, and
    where `check` of a row raises ValueError."""
    file = _existing_file(Path(path).expanduser())
    try:
        content = file.read_bytes()
    except OSError as error:
        why, fix = error.strerror or str(error), "correct --data.path, or let this user read the file"
        raise InputError("cannot read the data file", where=str(file), why=why, fix=fix) from error
    numbered = _parquet_rows(file) if content[:4] == b"PAR1" else _json_lines(file, content)
    rows = []
    kinds: dict[str, tuple[str, str]] = {}
    for where, row in numbered:
        _check_columns(where, row, columns)
        for column in columns:
            kind = _check_value(where, column, row[column])
            first_kind, first_where = kinds.setdefault(column, (kind, where))
            if kind != first_kind:
                raise InputError(
                    f"`{column}` is {first_kind} in some rows and {kind} in others",
                    where=f"{first_where} and {where}",
                    fix="use one of them throughout",
                )
        try:
            if check is not None:
                check(row)
        except ValueError as error:
            raise InputError("a row cannot be used", where=where, why=str(error), fix="correct or drop it") from error
        rows.append(row)
    if not rows:
        raise InputError("the data file has 0 rows", where=str(file), fix="give one with a JSON object a line")
    return rows


def _existing_file(file: Path) -> Path:
    if file.is_dir():
        inside = sorted(str(entry) for entry in file.iterdir() if entry.suffix in (".jsonl", ".parquet"))
        fix = f"give one file: {', '.join(inside[:5])}" if inside else "give a JSONL or Parquet file"
        raise InputError("the data path is a directory", where=str(file), fix=fix)
    if glob.has_magic(file.name) and not file.exists():
        matches = sorted(str(entry) for entry in file.parent.glob(file.name))
        fix = f"give one file: {', '.join(matches[:5])}" if matches else "nothing matches it; give a file's name"
        raise InputError("the data path is a pattern, not a file", where=str(file), fix=fix)
    if not file.exists():
        names = [entry.name for entry in file.parent.iterdir()] if file.parent.is_dir() else []
        nearest = difflib.get_close_matches(file.name, names, n=1)
        fix = f"did you mean {file.parent / nearest[0]}?" if nearest else ""
        raise InputError("no such data file", where=str(file), fix=fix)
    if not file.is_file():
        # Reading a pipe or a device may never end.
        raise InputError("the data path is not a regular file", where=str(file), fix="write the rows to a file")
    return file


def _json_lines(file: Path, content: bytes) -> Iterator[tuple[str, Row]]:
    """("file:line", row) of each line that is not blank."""
    _refuse_other_formats(file, content)
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        if len(line) > MAX_ROW_BYTES:
            raise InputError(
                f"a row of {len(line):,} bytes",
                where=where,
                why=f"the most is {MAX_ROW_BYTES:,}: no model reads a text of that length",
                fix="are the line ends missing? write one row a line, and cut or drop what is longer",
            )
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(
                f"byte {error.start + 1} of the line, 0x{line[error.start]:02x}, is not UTF-8",
                where=where,
                fix="convert the file to UTF-8 (iconv)",
            ) from error
        try:
            row = json.loads(
                text,
                object_pairs_hook=_unique_keys,
                parse_constant=_refuse_constant,
                parse_float=_finite,
            )
            # Escapes such as \ud800 are JSON, but half of a character: no tokenizer takes it.
            if re.search(r"\\u[dD][89a-fA-F]", text):
                json.dumps(row, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            fix = "correct the text: it was cut inside a character"
            raise InputError("a text holds half of a surrogate pair", where=where, why=str(error), fix=fix) from error
        except (ValueError, RecursionError) as error:
            is_cut = number == len(lines) and isinstance(error, json.JSONDecodeError)
            what, fix = "not a row in JSON", "write one JSON object a line, or leave the line out"
            if is_cut:
                what, fix = "the last line is cut off", "copy or download the file again, or leave the line out"
            raise InputError(what, where=where, why=str(error), fix=fix) from error
        if not isinstance(row, dict):
            fix = 'write one object a line, as in {"prompt": "..."}'
            raise InputError("a row is a JSON object, {...}", where=where, why=f"this is {type(row).__name__}", fix=fix)
        yield where, row


_MAGIC = {
    b"\x1f\x8b": ("gzip", "gunzip it"),
    b"PK\x03\x04": ("a zip archive", "unzip it"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd it"),
    b"\xff\xfe": ("UTF-16", "convert it to UTF-8 (iconv)"),
    b"\xfe\xff": ("UTF-16", "convert it to UTF-8 (iconv)"),
    b"version https://git-lfs": ("a Git LFS pointer, not the data", "git lfs pull"),
    b"[": ("one JSON array", "write one object a line: jq -c '.[]'"),
    b"<": ("HTML or XML, perhaps the error page of a download", "download it again"),
}


def _refuse_other_formats(file: Path, content: bytes) -> None:
    start = content.removeprefix(b"\xef\xbb\xbf")
    for magic, (name, fix) in _MAGIC.items():
        if content.startswith(magic) or start.lstrip().startswith(magic):
            raise InputError(f"the data file is {name}", where=str(file), fix=fix)
    first = start.lstrip().partition(b"\n")[0].strip()
    if first == b"{":
        raise InputError(
            "the data file holds JSON spread over lines", where=str(file), fix="one object a line: jq -c ."
        )
    if first and not first.startswith(b"{"):
        looks = "looks like CSV" if b"," in first or b"\t" in first else "is not JSON"
        raise InputError(
            f"the data file {looks}",
            where=f"{file}:1",
            why=repr(first[:80].decode("utf-8", "replace")),
            fix="write one JSON object a line",
        )


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} comes twice")
    return row


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is beyond the largest float")
    return number


def _parquet_rows(file: Path) -> Iterator[tuple[str, Row]]:
    """("file, row number", row) of each row."""
    try:
        import pyarrow  # pyright: ignore[reportMissingImports]  (the extra [parquet])
        from pyarrow import parquet  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MachineError("reading Parquet needs pyarrow", fix='pip install "tpu_rl[parquet]"') from error
    try:
        rows = parquet.read_table(file).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        why, fix = str(error).splitlines()[0], "copy or download it again"
        raise InputError("a damaged Parquet file", where=str(file), why=why, fix=fix) from error
    for number, row in enumerate(rows, 1):
        where = f"{file}, row {number}"
        infinite = [name for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
        if infinite:
            raise InputError(
                f"`{infinite[0]}` is {row[infinite[0]]}", where=where, fix="give a number, or drop the row"
            )
        yield where, row


def _check_columns(where: str, row: Row, columns: Sequence[str]) -> None:
    for column in columns:
        if column not in row:
            nearest = difflib.get_close_matches(column, row, n=1)
            other = f"rename the column that holds it to `{column}`, or choose the --data.format that the file has"
            raise InputError(
                f"a row lacks the column `{column}`",
                where=where,
                why=f"its columns are {', '.join(row) or 'none'}",
                fix=f"did you mean `{nearest[0]}`?" if nearest else other,
            )


def _check_value(where: str, column: str, value: Any) -> str:
    """What kind of value it is. Raises InputError where the column wants another."""
    if column in TEXT_OR_MESSAGES | TEXTS and isinstance(value, str):
        if not value and column in ("prompt", "question", "chosen"):
            fix = "drop the row" if column == "chosen" else "write one, or drop the row"
            raise InputError(f"`{column}` is empty", where=where, fix=fix)
        return "a text"
    if column in TEXT_OR_MESSAGES | {"messages"} and isinstance(value, list):
        _check_messages(where, column, value)
        return "messages"
    if column == "label" and value not in (True, False):
        what = f"`label` is true or false, not {json.dumps(value, default=repr)[:60]}"
        raise InputError(what, where=where, fix="write true or false, without quotes")
    if column in TEXT_OR_MESSAGES | TEXTS | {"messages"}:
        wanted = "a text" if column in TEXTS else "messages" if column == "messages" else "a text or messages"
        what = f"`{column}` is {wanted}, not {json.dumps(value, default=repr)[:60]}"
        raise InputError(what, where=where, fix="correct or drop the row")
    return "a value"


def _check_messages(where: str, column: str, messages: list[Any]) -> None:
    if not messages:
        raise InputError(f"`{column}` holds no message", where=where, fix="add one, or drop the row")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise InputError(
                f"message {number} of `{column}` is not an object with `role` and `content`",
                where=where,
                why=json.dumps(message, default=repr)[:120],
                fix='as in {"role": "user", "content": "..."}',
            )
        if message["role"] not in ROLES:
            nearest = difflib.get_close_matches(message["role"], ROLES, n=1)
            raise InputError(
                f"message {number} of `{column}` has the unknown role {message['role'][:40]!r}",
                where=where,
                fix=f"did you mean {nearest[0]!r}?" if nearest else f"roles are {', '.join(ROLES)}",
            )
    if column == "prompt" and messages[-1]["role"] == "assistant":
        raise InputError(
            "the prompt's last message is the assistant's",
            where=where,
            why="the model is to write the assistant's next turn",
            fix="move that message to the column `completion`, or `chosen`",
        )


# --- doubts ------------------------------------------------------------------------------------------------------


def doubts(rows: Sequence[Row], held_out: Sequence[Row], most_duplicates: float = 0.1) -> list[str]:
    """What people should know of rows that can be learned from: counts of what is rarely meant, one line each."""
    prompts = [_text(row["prompt"]) for row in rows if "prompt" in row]
    several = len(prompts) - len(set(prompts))
    compared = any("chosen" in row or "label" in row for row in rows)
    known = {_asked(row) for row in rows}
    counts = (
        (sum("\x00" in _spoken(row) for row in rows), "rows hold the character NUL"),
        (sum(not prompt.strip() for prompt in prompts), "prompts are nothing but white space"),
        (0 if compared or several <= most_duplicates * len(rows) else several, "prompts repeat earlier ones"),
        (
            sum(_asked(row) in known for row in held_out),
            f"of the {len(held_out)} held-out rows are among the training rows: the evaluation flatters",
        ),
    )
    return [f"{count} {what}" for count, what in counts if count]


def _asked(row: Row) -> str:
    """The prompt, which decides whether an answer is known; of conversations everything."""
    return _text(row["prompt"]) if "prompt" in row else _spoken(row)


def _spoken(row: Row) -> str:
    """All that a model would read of a row."""
    return "".join(_text(row[column]) for column in sorted(TEXT_OR_MESSAGES | {"messages"}) if column in row)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "\n".join(str(message["content"]) for message in value) if isinstance(value, list) else ""
