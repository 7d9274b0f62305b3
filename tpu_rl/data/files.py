"""Read rows of files and datasets, and check every line before a run begins.

Anything wrong with a file is one InputError that names its line. `warnings` lists what is valid but
rarely intended.
"""

from __future__ import annotations

import difflib
import glob
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tpu_rl.data import formats, python_rows
from tpu_rl.errors import InputError, MachineError

Row = dict[str, Any]
"""A data row: column -> value."""

TEXT_OR_MESSAGES = frozenset({"prompt", "completion", "chosen", "rejected"})
TEXTS = frozenset({"question"})
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""Roles of messages. A chat template may know only some of them."""
MAX_ROW_BYTES = 10_000_000
"""Bytes of a line. No model reads a longer text, so a longer line is a mistake."""


def read(
    path: str | Path,
    columns: Sequence[str] = ("prompt",),
    check: Callable[[Row], None] | None = None,
    split: str | None = None,
    config: str | None = None,
) -> list[Row]:
    """Return the rows of files, of a saved dataset, or of a dataset of the hub.

    Args:
        path: files or patterns, separated by commas; a folder of `datasets.save_to_disk`; a name
            OWNER/NAME of the hub; or the name of rows that a program passed (`python_rows`). What
            exists under this path is preferred.
        columns: columns that each row must have, with values of the right type.
        check: raises ValueError for a row that cannot be used.
        split: the split of a dataset. The default is `train`, or the only one.
        config: the configuration of a dataset of the hub.

    Raises:
        InputError: if a file cannot be read, has no rows, or has a row that is not valid.
        MachineError: if the format needs a package that is not installed.
    """
    rows = []
    # Column -> (type of its first value, where that is).
    kinds: dict[str, tuple[str, str]] = {}
    for where, original in _numbered_rows(path, split, config):
        row = _normalized(where, original, columns)
        _check_columns(where, row, columns)
        # The prompt of a row that is learned as a whole is empty.
        is_text = formats.is_plain_text(original)
        for column in columns:
            if column == "prompt" and is_text:
                continue
            kind = _check_value(where, column, row[column])
            first_kind, first_where = kinds.setdefault(column, (kind, where))
            if kind != first_kind:
                raise InputError(
                    f"`{column}` is {first_kind} in some rows and {kind} in others",
                    where=f"{first_where} and {where}",
                    fix="use one of them throughout",
                )
        try:
            formats.check_together(row, columns)
            if check is not None:
                check(row)
        except ValueError as error:
            raise InputError(
                "a row cannot be used",
                where=where,
                why=str(error),
                fix="correct it, or drop the row",
            ) from error
        rows.append(row)
    if not rows:
        raise InputError(
            "the data have 0 rows",
            where=str(path),
            fix="give another file, dataset or --data.split",
        )
    return rows


def _normalized(where: str, row: Row, columns: Sequence[str]) -> Row:
    """Return `formats.normalize` of a row. Raises InputError if it does not fit its shape."""
    try:
        return formats.normalize(row, columns)
    except ValueError as error:
        raise InputError(
            "a row does not fit its shape",
            where=where,
            why=str(error),
            fix="correct it, or drop the row",
        ) from error


_DATA_SUFFIXES = (".jsonl", ".json", ".gz", ".parquet", ".csv", ".arrow", ".tsv", ".txt")


def _numbered_rows(
    path: str | Path, split: str | None, config: str | None
) -> Iterator[tuple[str, Row]]:
    """Yield ("where", row) of each row of all parts of the path."""
    if python_rows.is_name(str(path)):
        _refuse_dataset_flags(str(path), split, config)
        yield from python_rows.read(str(path))
        return
    whole = Path(path).expanduser()
    parts = [str(whole)] if whole.exists() else [part.strip() for part in str(path).split(",")]
    for part in filter(None, parts) if any(parts) else [str(path)]:
        place = Path(part).expanduser()
        if place.is_dir() and formats.is_saved_dataset(place):
            yield from formats.saved_rows(place, split)
        elif place.exists() or not glob.has_magic(part):
            if _is_hub_name(part, place):
                yield from formats.hub_rows(part, config, split)
                continue
            _refuse_dataset_flags(part, split, config)
            yield from _file_rows(_existing_file(place))
        else:
            _refuse_dataset_flags(part, split, config)
            names = sorted(glob.glob(str(place), recursive=True))
            for name in names or [str(place)]:
                yield from _file_rows(_existing_file(Path(name)))


def _is_hub_name(part: str, place: Path) -> bool:
    """Return whether a path that does not exist can be the name of a dataset of the hub."""
    return (
        re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", part) is not None
        and not os.path.lexists(place)
        and not place.parent.exists()
        and not part.endswith(_DATA_SUFFIXES)
    )


def _refuse_dataset_flags(part: str, split: str | None, config: str | None) -> None:
    """Raise InputError if a file is given with the split or configuration of a dataset."""
    if split is not None or config is not None:
        raise InputError(
            "a file has no splits or configurations",
            where=f"{part}, --data.split, --data.config",
            fix="leave them out, or give a saved dataset or a name of the hub",
        )


def _file_rows(file: Path) -> Iterator[tuple[str, Row]]:
    """Yield ("where", row) of each row of a file. Raises InputError if it has none."""
    is_empty = True
    for where, row in _rows_of_any_format(file):
        is_empty = False
        yield where, row
    if is_empty:
        raise InputError(
            "the data file has 0 rows",
            where=str(file),
            fix="give a file with rows, or leave it out",
        )


def _rows_of_any_format(file: Path) -> Iterator[tuple[str, Row]]:
    """Yield ("where", row) of each row of a file, whose format its name and content tell."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise InputError(
            "cannot read the data file",
            where=str(file),
            why=error.strerror or str(error),
            fix="correct --data.path, or let this user read the file",
        ) from error
    name = file.name.lower()
    if content[:2] == b"\x1f\x8b" or name.endswith(".gz"):
        content = formats.gunzip(file, content)
        name = name.removesuffix(".gz")
    if content[:4] == b"PAR1":
        yield from _parquet_rows(file, content)
    elif name.endswith(".csv"):
        yield from formats.csv_rows(file, content)
    elif name.endswith(".json") and content.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
        yield from formats.array_rows(file, _array_text(file, content), _array_decoder.raw_decode)
    else:
        yield from _json_lines(file, content)


def _array_text(file: Path, content: bytes) -> str:
    """Return the text of a JSON array. Raises InputError if it cannot be text."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"byte {error.start + 1} is not UTF-8",
            where=str(file),
            why=error.reason,
            fix="convert the file to UTF-8 (iconv)",
        ) from error
    return text


def _existing_file(file: Path) -> Path:
    """Return the file. Raises InputError if it is missing or not a regular file."""
    if file.is_dir():
        names = sorted(
            str(entry) for entry in file.iterdir() if entry.suffix in (".jsonl", ".parquet")
        )
        raise InputError(
            "the data path is a directory",
            where=str(file),
            fix=f"give one file: {', '.join(names[:5])}"
            if names
            else "give a JSONL or Parquet file",
        )
    if glob.has_magic(str(file)) and not file.exists():
        raise InputError(
            "the data path is a pattern, not a file, and nothing matches it",
            where=str(file),
            fix="correct the pattern, or give a file's name",
        )
    if not file.exists():
        names = [entry.name for entry in file.parent.iterdir()] if file.parent.is_dir() else []
        nearest = difflib.get_close_matches(file.name, names, n=1)
        fix = f"did you mean {file.parent / nearest[0]}?" if nearest else ""
        raise InputError("no such data file", where=str(file), fix=fix)
    if not file.is_file():
        raise InputError(
            "the data path is not a regular file",
            where=str(file),
            why="reading a pipe or a device may never end",
            fix="write the rows to a file",
        )
    return file


def _json_lines(file: Path, content: bytes) -> Iterator[tuple[str, Row]]:
    """Yield ("file:line", row) of each line that is not blank."""
    _refuse_other_formats(file, content)
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{file}:{number}"
            yield where, _json_row(line, where, is_last=number == len(lines))


def _json_row(line: bytes, where: str, is_last: bool) -> Row:
    """Return the row of a line. Raises InputError if it is not a JSON object."""
    if len(line) > MAX_ROW_BYTES:
        raise InputError(
            f"a row has {len(line):,} bytes",
            where=where,
            why=f"the limit is {MAX_ROW_BYTES:,}, because no model reads a longer text",
            fix="are the line ends missing? write one row per line, and cut or drop longer rows",
        )
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"byte {error.start + 1} of the line, 0x{line[error.start]:02x}, is not UTF-8",
            where=where,
            why=error.reason,
            fix="convert the file to UTF-8 (iconv)",
        ) from error
    try:
        row = json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
        # Escapes such as \\ud800 are valid JSON, but half a character, which no tokenizer takes.
        if re.search(r"\\u[dD][89a-fA-F]", text):
            json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            "a text holds half of a surrogate pair",
            where=where,
            why=str(error),
            fix="correct the text: it was cut inside a character",
        ) from error
    except (ValueError, RecursionError) as error:
        if is_last and isinstance(error, json.JSONDecodeError):
            raise InputError(
                "the last line is cut off",
                where=where,
                why=str(error),
                fix="copy or download the file again, or leave the line out",
            ) from error
        raise InputError(
            "not a row in JSON",
            where=where,
            why=str(error),
            fix="write one JSON object per line, or leave the line out",
        ) from error
    if not isinstance(row, dict):
        raise InputError(
            "a row is a JSON object, {...}",
            where=where,
            why=f"this is {type(row).__name__}",
            fix='write one object per line, as in {"prompt": "..."}',
        )
    return row


_OTHER_FORMATS = {
    b"PK\x03\x04": ("a zip archive", "unzip it"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd it"),
    b"\xff\xfe": ("UTF-16", "convert it to UTF-8 (iconv)"),
    b"\xfe\xff": ("UTF-16", "convert it to UTF-8 (iconv)"),
    b"version https://git-lfs": ("a Git LFS pointer, not the data", "git lfs pull"),
    b"[": ("one JSON array", "name it .json, or write one object per line: jq -c '.[]'"),
    b"<": ("HTML or XML, perhaps the error page of a download", "download it again"),
}
"""First bytes -> (name of the format, how to get the data)."""


def _refuse_other_formats(file: Path, content: bytes) -> None:
    """Raise InputError if the content is not lines of JSON."""
    start = content.removeprefix(b"\xef\xbb\xbf")
    for magic, (name, fix) in _OTHER_FORMATS.items():
        if content.startswith(magic) or start.lstrip().startswith(magic):
            raise InputError(f"the data file is {name}", where=str(file), fix=fix)
    first = start.lstrip().partition(b"\n")[0].strip()
    if first == b"{":
        raise InputError(
            "the data file holds JSON spread over lines",
            where=str(file),
            why="its first line is an opening brace alone",
            fix="write one object per line: jq -c .",
        )
    if first and not first.startswith(b"{"):
        looks = "looks like CSV" if b"," in first or b"\t" in first else "is not JSON"
        raise InputError(
            f"the data file {looks}",
            where=f"{file}:1",
            why=repr(first[:80].decode("utf-8", "replace")),
            fix="write one JSON object per line",
        )


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object. Raises ValueError if a key comes twice."""
    row = dict(pairs)
    if len(row) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {repeated!r} comes twice")
    return row


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is beyond the largest float")
    return number


_array_decoder = json.JSONDecoder(
    object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_float=_finite
)


def _parquet_rows(file: Path, content: bytes) -> Iterator[tuple[str, Row]]:
    """Yield ("file, row number", row) of each row."""
    try:
        import pyarrow  # pyright: ignore[reportMissingImports]  (the extra [parquet])
        from pyarrow import parquet  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MachineError(
            "reading Parquet needs pyarrow",
            where=str(file),
            why="pyarrow is not installed",
            fix='pip install "tpu_rl[parquet]"',
        ) from error
    try:
        rows = parquet.read_table(pyarrow.BufferReader(content)).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(
            "a damaged Parquet file",
            where=str(file),
            why=str(error).splitlines()[0],
            fix="copy or download it again",
        ) from error
    for number, row in enumerate(rows, start=1):
        where = f"{file}, row {number}"
        for column, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise InputError(
                    f"`{column}` is {value}",
                    where=where,
                    why="it is not a finite number",
                    fix="give a number, or drop the row",
                )
        yield where, row


def _check_columns(where: str, row: Row, columns: Sequence[str]) -> None:
    """Raise InputError if the row lacks a column."""
    for column in columns:
        if column not in row:
            nearest = difflib.get_close_matches(column, row, n=1)
            rename = (
                f"rename the column that holds it to `{column}`, "
                "or choose the --data.format of the file"
            )
            raise InputError(
                f"a row lacks the column `{column}`",
                where=where,
                why=f"its columns are {', '.join(row) or 'none'}",
                fix=f"did you mean `{nearest[0]}`?" if nearest else rename,
            )


def _check_value(where: str, column: str, value: Any) -> str:
    """Return the type of a value, in words. Raises InputError if the column has another type."""
    may_be_text = column in TEXT_OR_MESSAGES | TEXTS
    may_be_messages = column in TEXT_OR_MESSAGES | {"messages"}
    if may_be_text and isinstance(value, str):
        if not value and column in ("prompt", "question", "chosen"):
            raise InputError(
                f"`{column}` is empty",
                where=where,
                fix="drop the row" if column == "chosen" else "write one, or drop the row",
            )
        return "a text"
    if may_be_messages and isinstance(value, list):
        _check_messages(where, column, value)
        return "messages"
    shown = json.dumps(value, default=repr)[:60]
    if column == "label" and value not in (True, False):
        raise InputError(
            f"`label` is true or false, not {shown}",
            where=where,
            fix="write true or false, without quotes",
        )
    if may_be_text or may_be_messages:
        types = ["a text"] * may_be_text + ["messages"] * may_be_messages
        raise InputError(
            f"`{column}` is {' or '.join(types)}, not {shown}",
            where=where,
            fix="correct it, or drop the row",
        )
    return "a value"


def _check_messages(where: str, column: str, messages: list[Any]) -> None:
    """Raise InputError if the messages are not a conversation that fits the column."""
    if not messages:
        raise InputError(
            f"`{column}` holds no message",
            where=where,
            why="the list of messages is empty",
            fix="add a message, or drop the row",
        )
    for number, message in enumerate(messages, start=1):
        if (
            not isinstance(message, dict)
            or not isinstance(message.get("role"), str)
            or not ("content" in message or message.get("tool_calls"))
        ):
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
                why=f"roles are {', '.join(ROLES)}",
                fix=f"did you mean {nearest[0]!r}?" if nearest else "use one of these",
            )
    if column == "prompt" and messages[-1]["role"] == "assistant":
        raise InputError(
            "the prompt's last message is the assistant's",
            where=where,
            why="the model is to write the assistant's next turn",
            fix="move that message to the column `completion`, or `chosen`",
        )


# --- warnings ---


def warnings(
    rows: Sequence[Row], held_out: Sequence[Row], max_duplicate_share: float = 0.1
) -> list[str]:
    """Return one line for each thing about valid rows that is rarely intended, with its count.

    Args:
        rows: the training rows.
        held_out: the held-out rows.
        max_duplicate_share: repeated prompts are reported above this share of the rows.
    """
    prompts = [_text(row["prompt"]) for row in rows if row.get("prompt")]
    num_duplicates = len(prompts) - len(set(prompts))
    # Pairs and graded completions have several rows per prompt.
    is_compared = any("chosen" in row or "label" in row for row in rows)
    if is_compared or num_duplicates <= max_duplicate_share * len(rows):
        num_duplicates = 0
    known_inputs = {_model_input(row) for row in rows}
    counts = (
        (sum("\x00" in _all_text(row) for row in rows), "rows hold the character NUL"),
        (sum(not prompt.strip() for prompt in prompts), "prompts are nothing but white space"),
        (num_duplicates, "prompts repeat earlier ones"),
        (
            sum(_model_input(row) in known_inputs for row in held_out),
            f"of the {len(held_out)} held-out rows are among the training rows: "
            "the evaluation flatters",
        ),
    )
    return [f"{count} {message}" for count, message in counts if count]


def _model_input(row: Row) -> str:
    """Return the prompt, or all messages of a conversation without a prompt."""
    return _text(row["prompt"]) if row.get("prompt") else _all_text(row)


def _all_text(row: Row) -> str:
    """Return all that a model would read of a row."""
    columns = sorted(TEXT_OR_MESSAGES | {"messages"})
    return "".join(_text(row[column]) for column in columns if column in row)


def _text(value: Any) -> str:
    """Return a text or the contents of messages; "" for other values."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(
            str(message.get("content") or message.get("tool_calls") or "") for message in value
        )
    return ""
