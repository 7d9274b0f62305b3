"""Read rows of files and datasets, and check every line before a run begins.

Anything wrong with a file is one InputError that names its line. `warnings` lists what is valid but
rarely intended.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import glob
import os
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tpu_rl.data import formats, python_rows, shapes, stored_rows
from tpu_rl.data import messages as message_forms
from tpu_rl.data.json_lines import BOM, JsonLines, array_rows
from tpu_rl.data.stored_rows import Source, StoredRows
from tpu_rl.data.values import shown
from tpu_rl.errors import InputError, did_you_mean, missing_file, refused
from tpu_rl.storage import gcs, local_copies

Row = dict[str, Any]
"""A data row: column -> value."""

KINDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("prompt", "completion", "chosen", "rejected"), ("a text", "messages")),
    "question": ("a text",),
    "messages": ("messages",),
    "label": ("true or false",),
}
"""Column -> what its values may be. Other columns have any values."""
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""Roles of messages. A chat template may know only some of them."""


def read(
    path: str | Path,
    columns: Sequence[str] = ("prompt",),
    check: Callable[[Row], Any] | None = None,
    split: str | None = None,
    config: str | None = None,
    column_names: Sequence[str] = (),
) -> StoredRows:
    """Return the rows of files, of a saved dataset, or of a dataset of the hub.

    All rows are read and checked here, and decoded again when they are asked for. Of a file of more
    than `json_lines.MANY_LINES` lines, a sample is, and every other row when it is asked for.

    Args:
        path: files or patterns, separated by commas, on disks or in buckets (gs://); a folder of
            `datasets.save_to_disk`; a name OWNER/NAME of the hub; or the name of rows that a
            program passed (`python_rows`). What exists under this path is preferred.
        columns: columns that each row must have, with values of the right type.
        check: raises ValueError or InputError for a row that cannot be used.
        split: the split of a dataset. The default is `train`, or the only one.
        config: the configuration of a dataset of the hub.
        column_names: columns by other names, as NAME=COLUMN.

    Raises:
        InputError: if a file cannot be read, has no rows, or has a row that is not valid.
        MachineError: if the format needs a package that is not installed.
    """
    key = (str(path), tuple(columns), check, split, config, tuple(column_names), _stamp(path))
    if key in _READ:
        return _READ[key]
    sources = []
    parts = []
    names: dict[str, None] = {}
    # Column -> (type of its first value, where that is).
    kinds: dict[str, tuple[str, str]] = {}

    def check_row(where: str, original: Row) -> None:
        with _refused("a row does not fit its shape", where):
            row = shapes.normalize(original, columns, column_names)
        _check_row(where, original, row, columns, kinds)
        with _refused("a row cannot be used", where):
            shapes.check_together(row, columns)
            if check is not None:
                check(row)
        if not row.keys() <= names.keys():
            names.update(dict.fromkeys(row))

    for part, source in _sources(path, split, config):
        # Digests of rows with pictures are about the files of these, too.
        if not (isinstance(source, JsonLines) and source.samples(check_row, names)):
            for where, original in source.scan():
                check_row(where, original)
        sources.append(source)
        parts.append(part)
    joined = sources[0] if len(sources) == 1 else stored_rows.Joined(sources, parts)
    if not len(joined):
        raise InputError(
            "the data have 0 rows",
            where=str(path),
            fix="give another file, dataset or --data.split",
        )
    rows = StoredRows(joined, columns=tuple(names))
    rows = rows.map(
        functools.partial(shapes.normalize, columns=tuple(columns), names=tuple(column_names))
    )
    if len(rows) >= MIN_KEPT_ROWS:
        _READ[key] = rows
        while len(_READ) > MAX_KEPT:
            del _READ[next(iter(_READ))]
    return rows


def first_row(
    path: str | Path,
    split: str | None = None,
    config: str | None = None,
    column_names: Sequence[str] = (),
) -> Row:
    """Return the first row, without checks of its columns; {} if there is none."""
    where, row = _first(path, split, config)
    with _refused("a row does not fit its shape", where):
        return shapes.normalize(row, (), column_names) if row else {}


def first_shape(
    path: str | Path,
    split: str | None = None,
    config: str | None = None,
    column_names: Sequence[str] = (),
) -> shapes.Shape | None:
    """Return the published shape of the first row, or None if it has our columns."""
    _, row = _first(path, split, config)
    return shapes.shape_of(shapes.renamed(row, column_names)) if row else None


def _first(path: str | Path, split: str | None, config: str | None) -> tuple[str, Row]:
    """Return where the first row is, and the row as it was published; {} without any."""
    sources = _sources(path, split, config)
    return next((found for _, source in sources for found in source.scan()), ("", {}))


MIN_KEPT_ROWS = 10_000
MAX_KEPT = 4
_READ: dict[Any, StoredRows] = {}
"""Large data that were read and checked in this process. A run reads its data several times."""


def close_all() -> None:
    """Close the files that were read, and drop their rows."""
    _READ.clear()


def _stamp(path: str | Path) -> tuple[Any, ...]:
    """Return a stamp of the path, which differs once a file or folder of it has changed."""
    stamps = []
    for _, part in _parts(path):
        for name in [part, *sorted(glob.glob(part, recursive=True))]:
            place = Path(name).expanduser()
            # Other folders are refused, and may hold a whole disk.
            is_dataset = place.is_dir() and formats.is_saved_dataset(place)
            for file in [place, *(sorted(place.rglob("*")) if is_dataset else ())]:
                if file.is_file():
                    status = file.stat()
                    stamps.append((str(file), status.st_size, status.st_mtime_ns, status.st_ino))
    return tuple(stamps)


def _check_row(
    where: str, original: Row, row: Row, columns: Sequence[str], kinds: dict[str, tuple[str, str]]
) -> None:
    """Raise InputError if the row lacks a column, or a value has another type than it should.

    `kinds` says for each column the type of its first value, and where that is.
    """
    _check_columns(where, row, columns)
    # The prompt of a row that is learned as a whole is empty.
    is_text = shapes.is_plain_text(original)
    for column in columns:
        if column == "prompt" and is_text:
            continue
        kind = _check_value(where, column, row[column])
        if column not in kinds:
            kinds[column] = (kind, where)
        elif kind != kinds[column][0]:
            first_kind, first_where = kinds[column]
            raise InputError(
                f"`{column}` is {first_kind} in some rows and {kind} in others",
                where=f"{first_where} and {where}",
                fix="use one of them throughout",
            )


@contextlib.contextmanager
def _refused(what: str, where: str) -> Iterator[None]:
    """Make a ValueError of this context an InputError about a row."""
    with refused(ValueError, what, where=where, fix="correct it, or drop the row"):
        yield


_DATA_SUFFIXES = (".jsonl", ".json", ".gz", ".parquet", ".csv", ".arrow", ".tsv", ".txt")


def names_of(path: str | Path) -> list[str]:
    """Return the parts of a path that commas separate."""
    if Path(path).expanduser().exists():
        return [str(path)]
    return [part.strip() for part in str(path).split(",") if part.strip()] or [str(path)]


def _parts(path: str | Path) -> list[tuple[int, str]]:
    """Return (number, name) of the files, folders, patterns and names that a path consists of.

    The number is that of the part of the path. A gs:// address stands for local copies of its
    objects.
    """
    parts: list[tuple[int, str]] = []
    for number, part in enumerate(names_of(path)):
        files = local_copies.files(part) if gcs.is_address(part) else [Path(part).expanduser()]
        parts += [(number, str(file)) for file in files]
    return parts


def _sources(
    path: str | Path, split: str | None, config: str | None
) -> Iterator[tuple[int, Source]]:
    """Yield (number of the part of the path, source of rows) of all sources."""
    if python_rows.is_name(str(path)):
        _refuse_dataset_flags(str(path), split, config)
        yield 0, python_rows.source(str(path))
        return
    for number, part in _parts(path):
        for source in _sources_of(part, split, config):
            yield number, source


def _sources_of(part: str, split: str | None, config: str | None) -> Iterator[Source]:
    """Yield the sources of the rows of one part of a path."""
    place = Path(part)
    if place.is_dir() and formats.is_saved_dataset(place):
        yield formats.saved_rows(place, split)
    elif not (place.exists() or glob.has_magic(part)) and _is_hub_name(part, place):
        yield formats.hub_rows(part, config, split)
    else:
        _refuse_dataset_flags(part, split, config)
        is_pattern = not place.exists() and glob.has_magic(part)
        names = sorted(glob.glob(part, recursive=True)) if is_pattern else []
        for name in names or [part]:
            yield from _file_rows(_existing_file(Path(name)))


def _is_hub_name(part: str, place: Path) -> bool:
    """Return True if a path that does not exist can be the name of a dataset of the hub."""
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


def _file_rows(file: Path) -> Iterator[Source]:
    """Yield the rows of a file, whose format its name and content tell.

    Raises InputError if they were scanned and there are none.
    """
    with refused(
        OSError,
        "cannot read the data file",
        where=str(file),
        fix="correct --data.path, or let this user read the file",
    ):
        source = _source_of_any_format(file)
    yield source
    if not len(source):
        raise InputError(
            "the data file has 0 rows",
            where=str(file),
            fix="give a file with rows, or leave it out",
        )


def _source_of_any_format(file: Path) -> Source:
    name = file.name.lower()
    with file.open("rb") as opened:
        is_packed = name.endswith(".gz") or opened.read(2) == b"\x1f\x8b"
    name = name.removesuffix(".gz") if is_packed else name
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(formats.unpacked(file) if is_packed else file.open("rb"))
        head = opened.read(HEAD_BYTES)
        opened.seek(0)
        if head[:4] == b"PAR1":
            return formats.parquet_rows(file, opened.read() if is_packed else None)
        if name.endswith(".csv"):
            return formats.csv_rows(file, opened.read())
        if name.endswith(".json") and head.removeprefix(BOM).lstrip()[:1] == b"[":
            return array_rows(file, opened.read())
        _refuse_other_formats(file, head)
        stack.pop_all()
        return JsonLines(opened, file)


HEAD_BYTES = 2**16
"""Bytes at the beginning of a file that tell its format."""


def _existing_file(file: Path) -> Path:
    """Return the file. Raises InputError if it is missing or not a regular file."""
    if file.is_dir():
        # Published datasets have their files in data/, or a folder for each configuration.
        names = sorted(
            str(entry)
            for pattern in ("*", "*/*")
            for entry in file.glob(pattern)
            if entry.suffix in (".jsonl", ".parquet")
        )
        raise InputError(
            "the data path is a directory",
            where=str(file),
            fix=f"give one file: {', '.join(names[:5])}"
            if names
            else "give a JSONL or Parquet file",
        )
    if not file.exists() and glob.has_magic(str(file)):
        raise missing_file("no file matches the pattern", file, otherwise="correct it")
    if not file.exists():
        raise missing_file("no such data file", file)
    if not file.is_file():
        raise InputError(
            "the data path is not a regular file",
            where=str(file),
            why="reading a pipe or a device may never end",
            fix="write the rows to a file",
        )
    return file


TO_PARQUET = "write it as Parquet: {}(path).to_parquet(new)"
_OTHER_FORMATS = {
    b"PK\x03\x04": ("a zip archive", "unzip it"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd it"),
    b"\xfd7zXZ": ("xz", "unxz it"),
    b"BZh": ("bzip2", "bunzip2 it"),
    b"ARROW1": ("Feather", TO_PARQUET.format("pyarrow.feather.read_feather")),
    b"\xff\xff\xff\xff": ("a stream of Arrow", TO_PARQUET.format("datasets.Dataset.from_file")),
    b"\xff\xfe": ("UTF-16", "convert it to UTF-8 (iconv)"),
    b"\xfe\xff": ("UTF-16", "convert it to UTF-8 (iconv)"),
    b"version https://git-lfs": ("a Git LFS pointer, not the data", "git lfs pull"),
    b"[": ("one JSON array", "name it .json, or write one object per line: jq -c '.[]'"),
    b"<": ("HTML or XML, perhaps the error page of a download", "download it again"),
}
"""First bytes -> (name of the format, how to get the data)."""


def _refuse_other_formats(file: Path, content: bytes) -> None:
    """Raise InputError if the content is known to be something else than lines of JSON."""
    start = content.removeprefix(BOM)
    for magic, (name, fix) in _OTHER_FORMATS.items():
        if content.startswith(magic) or start.lstrip().startswith(magic):
            raise InputError(f"the data file is {name}", where=str(file), fix=fix)


OTHER_NAMES = {
    "prompt": (
        *("question", "problem", "query", "instruction", "input", "inputs", "context"),
        "trajectory",
    ),
    "completion": ("response", "answer", "output", "targets", "generated_solution", "solution"),
    "label": ("kto_tag",),
    "score": ("reward", "rating"),
    "scores": ("rewards", "ratings"),
    "chosen": ("response_j", "chosen_response", "preferred_output", "preferred", "response_w"),
    "rejected": (
        *("response_k", "rejected_response", "non_preferred_output", "dispreferred", "response_l"),
    ),
}
"""Names of our columns in published data, the likeliest first."""
VERDICTS = (
    *("better_response_id", "overall_preference", "preference_strength", "choice", "winner"),
    *("score_0", "labels", "answers", "completions"),
)
"""Columns that say which of several answers is better, where no other column does."""


def _check_columns(where: str, row: Row, columns: Sequence[str]) -> None:
    """Raise InputError if the row lacks columns. It names those that may be meant."""
    missing = [column for column in columns if column not in row]
    if not missing:
        return
    if "scores" in missing and "completion" in row:
        missing = ["score"]  # Of a completion by itself; see `shapes`.
    meant = {column: _other_name(column, row) for column in missing}
    flag = "--data.columns " + " ".join(f"{name}={meant[name]}" for name in missing if meant[name])
    suggestions = [name for name in meant.values() if name is not None]
    names = "`, `".join(name for name in missing if meant[name] is None)
    no_other = f"no column looks like `{names}`: write it into the rows"
    fix = f"{no_other}, name it by --data.columns, or choose the --data.format of the file"
    separator = next((mark for mark in ";\t|" if len(row) == 1 and mark in next(iter(row))), None)
    if separator is not None:
        fix = f"the cells of a .csv file are separated by commas, not by {separator!r}"
    elif suggestions:
        fix = f"did you mean `{'` and `'.join(suggestions)}`? {flag}"
        fix += f"; {no_other}" if names else ""
    verdict = next((name for name in VERDICTS if name in row), None)
    if "chosen" in missing and verdict is not None and meant["chosen"] in (None, verdict):
        fix = (
            f"write `chosen` and `rejected` for each row, by what `{verdict}` says: no column has "
            "the better answers of all rows"
        )
    raise InputError(
        f"a row lacks the column{'s' * (len(missing) > 1)} `{'` and `'.join(missing)}`",
        where=where,
        why=f"its columns are {', '.join(row) or 'none'}",
        fix=fix,
    )


def _other_name(column: str, row: Row) -> str | None:
    """Return the column of a row that may be the one that is missing, or None."""
    paths = {path.lower(): path for path in _fitting_paths(column, row)}
    names = OTHER_NAMES.get(column, ())
    usual = [paths[path] for name in names for path in paths if _is_in(name, path)]
    others = [path for path in paths.values() if "." not in path]
    nearest = difflib.get_close_matches(column, others, n=1)
    return next(iter([*usual, *nearest]), None)


def _fitting_paths(column: str, row: Row) -> Iterator[str]:
    """Yield columns, and what objects in columns hold, with values that the column may have."""
    for name, value in row.items():
        if name in shapes.SYSTEM_COLUMNS:
            continue
        inner = value if isinstance(value, dict) else {}
        paths = {name: value} | {f"{name}.{key}": inner.get(key) for key in ("messages", "content")}
        for path, item in paths.items():
            with contextlib.suppress(InputError, ValueError):
                _check_value("", column, message_forms.canonical(item, column))
                yield path


def _is_in(name: str, path: str) -> bool:
    return path == name or path.startswith(f"{name}.")


def _check_value(where: str, column: str, value: Any) -> str:
    """Return the kind of a value, one of `KINDS`. Raises InputError if the column has others."""
    kinds = KINDS.get(column, ("a value",))
    if "a text" in kinds and isinstance(value, str):
        if not value and column in ("prompt", "question", "chosen"):
            raise InputError(
                f"`{column}` is empty",
                where=where,
                fix="drop the row" if column == "chosen" else "write one, or drop the row",
            )
        return "a text"
    if "messages" in kinds and isinstance(value, list):
        _check_messages(where, column, value)
        return "messages"
    is_flag = "true or false" in kinds
    if "a value" in kinds or (is_flag and value in (True, False)):
        return "a value"
    raise InputError(
        f"`{column}` is {' or '.join(kinds)}, not {shown(value)}",
        where=where,
        fix="write true or false, without quotes" if is_flag else "correct it, or drop the row",
    )


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
                why=shown(message, 120),
                fix='as in {"role": "user", "content": "..."}',
            )
        if message["role"] not in ROLES:
            raise InputError(
                f"message {number} of `{column}` has the unknown role {message['role'][:40]!r}",
                where=where,
                why=f"roles are {', '.join(ROLES)}",
                fix=did_you_mean(message["role"], ROLES, "use one of these"),
            )
    if column == "prompt" and messages[-1]["role"] == "assistant":
        raise InputError(
            "the prompt's last message is the assistant's",
            where=where,
            why="the model is to write the assistant's next turn",
            fix="move that message to the column `completion`, or `chosen`",
        )


# --- warnings ---

MAX_DUPLICATE_SHARE = 0.1
"""Repeated prompts are reported above this share of the rows."""
MAX_REPEATING_SHARE = 0.5
"""The same for answers that begin with their prompt."""
BLANK = "prompts are nothing but white space"
REPEATING = "pairs repeat their prompt in both answers: remove it from the answers"
LABELED = "completions have the label {}, and none has the other: nothing tells good from bad ones"


def warnings(
    rows: Sequence[Row], held_out: Sequence[Row], compares_prompts: bool = True
) -> list[str]:
    """Return one line for each thing about valid rows that is rarely intended, with its count.

    Args:
        rows: the training rows, of which `stored_rows.sample` is read.
        held_out: the held-out rows, in the same way.
        compares_prompts: False if other columns say what a row asks, as with an environment. Equal
            and blank prompts are then not reported.
    """
    of_train, of_held_out = map(stored_rows.checksums, (rows, held_out))
    num_known = 0
    if of_train is not None and of_held_out is not None:
        num_known = int(np.isin(of_held_out, of_train).sum())
    rows, held_out = map(stored_rows.sample, (rows, held_out))
    counts: Counter[str] = Counter()
    is_compared = False
    # Hashes in place of texts, which may not fit in memory. Two texts hardly ever share one.
    prompts = array("q")
    inputs = array("q")
    for row in rows:
        counts.update(_doubts(row))
        inputs.append(_input_hash(row))
        if row.get("prompt"):
            prompts.append(inputs[-1])
        # Pairs and graded completions have several rows per prompt.
        is_compared = is_compared or not row.keys().isdisjoint(("chosen", "label", "score"))
    if counts[REPEATING] <= MAX_REPEATING_SHARE * len(rows):
        del counts[REPEATING]
    labels = [LABELED.format(label) for label in ("true", "false")]
    if all(counts[label] for label in labels) or sum(counts[label] for label in labels) == 1:
        counts.subtract({label: counts[label] for label in labels})
    if compares_prompts:
        num_duplicates = len(prompts) - len(np.unique(np.array(prompts)))
        if not is_compared and num_duplicates > MAX_DUPLICATE_SHARE * len(rows):
            counts["prompts repeat earlier ones"] = num_duplicates
        equal = np.isin([_input_hash(row) for row in held_out], np.array(inputs))
        counts[
            f"of the {len(held_out)} held-out rows are among the training rows: "
            "the evaluation flatters"
        ] = max(num_known, int(equal.sum()))
    else:
        del counts[BLANK]
    return [f"{count} {message}" for message, count in counts.items() if count]


def _doubts(row: Row) -> Iterator[str]:
    """Yield what is rarely intended about a row alone."""
    if "\x00" in _all_text(row):
        yield "rows hold the character NUL"
    if row.get("prompt") and not _text(row["prompt"]).strip():
        yield BLANK
    if _repeats_prompt(row):
        yield REPEATING
    if _has_empty_answer(row):
        yield "rows have an answer without a text: only its end is learned"
    if "completion" in row and row.get("label") in (True, False):
        yield LABELED.format(str(bool(row["label"])).lower())


def _has_empty_answer(row: Row) -> bool:
    """Return True if an answer to learn is empty, and has no calls of tools either."""
    answers: list[Row] = []
    for column in ("completion", "chosen", "rejected", "messages"):
        value = row.get(column)
        is_list = isinstance(value, list)
        answers += value if is_list else [{"content": value, "role": "assistant"}]
    return any(
        answer.get("content") == "" and answer["role"] == "assistant"
        for answer in answers
        if not answer.get("tool_calls") and answer.get("weight") != 0
    )


def _repeats_prompt(row: Row) -> bool:
    """Return True if both answers of a pair are texts that begin with the prompt."""
    texts = (row.get("prompt"), row.get("chosen"), row.get("rejected"))
    if not all(isinstance(text, str) and text for text in texts):
        return False
    prompt, *answers = (str(text).strip() for text in texts)
    return bool(prompt) and all(answer.startswith(prompt) for answer in answers)


def _input_hash(row: Row) -> int:
    """Return a hash of the prompt, or of a conversation without a prompt, with its images."""
    text = _text(row["prompt"]) if row.get("prompt") else _all_text(row)
    images = row.get("images")
    return hash((text, *map(_fingerprint, images))) if isinstance(images, list) else hash(text)


def _fingerprint(image: Any) -> Any:
    """Return a value that is the same for the same file."""
    if isinstance(image, dict):
        return tuple(map(_fingerprint, image.values()))
    return image if isinstance(image, str | bytes) else repr(image)


def _all_text(row: Row) -> str:
    """Return all that a model would read of a row."""
    return "".join([_text(row[column]) for column in _READ_COLUMNS if column in row])


_READ_COLUMNS = sorted(column for column, kinds in KINDS.items() if "messages" in kinds)


def _text(value: Any) -> str:
    """Return a text or the contents of messages; "" for other values."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(
            str(message.get("content") or message.get("tool_calls") or "") for message in value
        )
    return ""
