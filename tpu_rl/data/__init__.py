"""Data rows, in an order that resumes exactly, and rows as arrays of tokens.

Rows are dicts in TRL's shapes: `prompt` (a text or messages) with any other columns; `prompt,
completion`; `messages`; `prompt, chosen, rejected`. `tpu_rl.data.files` reads and checks files;
`tpu_rl.data.formats` has their formats and shapes.
`stream` shuffles rows and repeats them. `demonstrations`, `pairs` and `steps` encode rows.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from tpu_rl import types
from tpu_rl.data.files import Row
from tpu_rl.data.files import first_row as first_row
from tpu_rl.data.files import read as read
from tpu_rl.data.stored_rows import StoredRows as StoredRows
from tpu_rl.data.stored_rows import join as join
from tpu_rl.data.stored_rows import take as take
from tpu_rl.data.stored_rows import with_number as with_number
from tpu_rl.errors import DamagedDataError, InputError


class Rows(Protocol):
    """Rows by number: a list, or a formula such as `environments.ArithmeticSource`.

    A formula is a frozen dataclass whose row i is a function of i and its fields. Its `repr`
    identifies it in checkpoints.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Row: ...


# --- published formats ---


def gsm8k(row: Mapping[str, Any]) -> Row:
    """Return GSM8K's columns `question` and `answer` as `prompt`, `answer` and `solution`.

    The new `answer` is the number after "####".

    Raises:
        InputError: if the row has no such number.
    """
    solution, marker, number = str(row["answer"]).rpartition("####")
    if not marker or not number.strip():
        raise InputError(
            'a GSM8K answer ends with "#### number"',
            where=f"question {str(row['question'])[:80]!r}",
            why="the column `answer` of this row does not",
            fix="drop the row, or choose another --data.format",
        )
    return {"prompt": row["question"], "answer": number.strip(), "solution": solution.strip()}


def gsm8k_demonstration(row: Mapping[str, Any]) -> Row:
    """Return a row of `gsm8k` with its column `completion`: the solution as it is published."""
    return {**row, "completion": f"{row['solution']}\n#### {row['answer']}"}


def gsm8k_solutions(row: Mapping[str, Any], problem: int) -> list[Row]:
    """Return the solutions of a GSM8K problem that models wrote, one row each.

    The rows have the columns `prompt`, `completion`, `label` and `problem`. Solutions are graded by
    the data. Calculator marks such as <<16-3=13>> are removed: they repeat what is next to them,
    and no user's model writes them. Solutions that are then equal count once.

    Args:
        row: columns as in example_model_solutions.jsonl: `question`, `ground_truth`, and for each
            model an object with `solution` and `is_correct`.
        problem: number of the problem.

    Raises:
        InputError: if the row has no solutions.
    """
    graded = {
        re.sub(r"<<[^<>]*>>", "", value["solution"]).strip(): bool(value["is_correct"])
        for value in row.values()
        if isinstance(value, dict)
        and isinstance(value.get("solution"), str)
        and "is_correct" in value
    }
    if not graded:
        raise InputError(
            "a problem has no solutions",
            where=f"question {str(row['question'])[:80]!r}",
            why="no column of the row is an object with `solution` and `is_correct`",
            fix='solutions are columns such as {"solution": "...", "is_correct": true}',
        )
    return [
        {"prompt": row["question"], "completion": text, "label": right, "problem": problem}
        for text, right in graded.items()
    ]


def pair_graded(graded: Sequence[Row]) -> list[Row]:
    """Return pairs of graded completions of one prompt, every good one with every bad one.

    The columns `completion` and `label` become `chosen` and `rejected`. Other columns are those of
    the good completion.
    """
    pairs = []
    for good in graded:
        columns = {
            name: value for name, value in good.items() if name not in ("completion", "label")
        }
        for bad in graded:
            if good["label"] and not bad["label"]:
                pair = {"chosen": good["completion"], "rejected": bad["completion"]}
                pairs.append(columns | pair)
    return pairs


# --- order ---


def fingerprint(source: Rows) -> str:
    """Return the SHA-256 of all rows in their order, in hex. The order of columns does not matter.

    A dataclass is a formula with too many rows to read. Its `repr` and its first rows stand for it.
    """
    if not dataclasses.is_dataclass(source):
        rows: Any = source
        return digests(rows)[0]
    digest = hashlib.sha256(f"{source!r}\n".encode())
    for i in range(min(len(source), 16)):
        digest.update(_as_json(source[i]) + b"\n")
    return digest.hexdigest()


def digests(rows: Sequence[Row]) -> tuple[str, np.ndarray]:
    """Return (`fingerprint`, [rows] uint64, a hash of each row), of rows that are no formula.

    The order of columns does not matter.
    """
    whole = hashlib.sha256()
    of_rows = bytearray()
    for row in rows:
        text = _as_json(row)
        whole.update(text + b"\n")
        of_rows += hashlib.blake2b(text, digest_size=8).digest()
    return whole.hexdigest(), np.frombuffer(bytes(of_rows), "<u8")


_encoder = json.JSONEncoder(sort_keys=True, default=repr)


def _as_json(row: Row) -> bytes:
    return _encoder.encode(row).encode()


class RowStream:
    """Batches (row_ids, rows), in an order that is a function of the seed. `stream` makes it.

    `row_ids` [B] int64 are positions in the endless stream and never repeat: row 3 of the second
    epoch has another id than row 3 of the first. The state is the position.
    """

    def __init__(
        self,
        batches: Any,
        batch_size: int,
        identity: dict[str, Any],
        accepted: Collection[str] = (),
    ):
        self._batches = batches
        self._batch_size = batch_size
        self._identity = identity
        self._accepted = accepted

    def __iter__(self) -> RowStream:
        return self

    def __next__(self) -> tuple[np.ndarray, list[Row]]:
        first = self._batches.get_state()["next_index"] * self._batch_size
        rows = next(self._batches)
        return np.arange(first, first + len(rows), dtype=np.int64), rows

    def get_state(self) -> dict[str, Any]:
        """Return the position after the last batch, and the stream's identity, as JSON values."""
        return {**self._identity, "next_batch": self._batches.get_state()["next_index"]}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go to a saved position.

        Raises:
            InputError: if it is a position in another stream, unless its rows are accepted.
            DamagedDataError: if it is not a position.
        """
        if not isinstance(state, dict) or state.keys() != self.get_state().keys():
            raise DamagedDataError(
                "this is no position in a data stream",
                where=repr(state)[:120],
                why=f"it must have the keys {', '.join(self.get_state())}",
                fix="resume from another checkpoint",
            )
        if state["fingerprint"] in self._accepted:
            state = state | {name: self._identity[name] for name in ("fingerprint", "rows")}
        for name, current in self._identity.items():
            if state[name] != current:
                raise InputError(
                    f"the data position was saved with another {name.replace('_', ' ')}",
                    why=f"it was {state[name]} and is now {current}, so other rows would follow",
                    fix="restore the data and settings of the run, or start a new run",
                )
        self._batches.set_state({"next_index": state["next_batch"]})


def stream(
    source: Rows,
    seed: int,
    batch_size: int,
    shuffle: bool = True,
    repeat: bool = True,
    accepted: Collection[str] = (),
    source_fingerprint: str | None = None,
) -> RowStream:
    """Return the rows of `source` in batches.

    Batches continue from one epoch into the next.

    Args:
        source: the rows.
        seed: decides the order.
        batch_size: rows per batch.
        shuffle: whether each epoch has a new order.
        repeat: whether to begin again at the end. If not, the last batch may be short.
        accepted: fingerprints of other rows. Positions saved with those are positions in these.
        source_fingerprint: `fingerprint` of the source, if it is known.

    Raises:
        InputError: if the batch size is below 1, or there are no rows.
    """
    import grain

    if batch_size < 1:
        raise InputError(
            f"the batch size is {batch_size}",
            where="--batch.prompts",
            why="a batch has 1 row or more",
            fix="use at least 1",
        )
    if len(source) == 0:
        raise InputError(
            "the data have 0 rows",
            where="--data.path",
            why="there is nothing to train on",
            fix="give a file with rows",
        )
    random_access: Any = source
    dataset = grain.MapDataset.source(random_access).seed(seed)
    if shuffle:
        dataset = dataset.shuffle()
    if repeat:
        dataset = dataset.repeat()
    # Without threads and prefetching, the state is exactly that after the last batch.
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    batches = iter(dataset.batch(batch_size, batch_fn=list).to_iter_dataset(options))
    identity = {
        "fingerprint": source_fingerprint or fingerprint(source),
        "rows": len(source),
        "seed": seed,
        "batch_size": batch_size,
        "shuffle": shuffle,
    }
    return RowStream(batches, batch_size, identity, accepted)


# --- rows as arrays ---


class Tokenizer(Protocol):
    """The part of `tokenizers.Tokenizer` that this module uses."""

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    @property
    def pad_id(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def encode_prompt(self, prompt: str | list[dict[str, Any]], tools: Any = None) -> list[int]: ...

    def wraps(self, prompt: Any) -> bool: ...

    def encode_demonstration(
        self, messages: list[dict[str, Any]], num_given: int = 0, tools: Any = None
    ) -> tuple[list[int], list[float]]: ...


def demonstrations(
    rows: Sequence[Row], tokenizer: Tokenizer, max_length: int
) -> types.Demonstrations:
    """Return rows `prompt, completion` or `messages` as arrays [N, max_length].

    Only completions, and of conversations the assistant's messages, are trained on, each with its
    end-of-sequence token (`Tokenizer.encode_demonstration`). A message of the assistant may have a
    `weight`, and so may the row: what its tokens count, relative to others. A column `tools` goes
    to the chat template. Longer texts are cut at their end. A row whose prompt fills all columns
    has nothing to train on.

    Args:
        rows: the rows.
        tokenizer: encodes texts and conversations.
        max_length: columns of the arrays.

    Raises:
        InputError: if a conversation has no answer of the assistant, or they cannot be found.
    """
    tokens = np.full((len(rows), max_length), tokenizer.pad_id, np.int32)
    weights = np.zeros((len(rows), max_length), np.float32)
    for i, row in enumerate(rows):
        ids, of_tokens = _tokenize(row, tokenizer)
        length = min(len(ids), max_length)
        row_weight = row.get("weight")
        tokens[i, :length] = ids[:length]
        weights[i, :length] = of_tokens[:length]
        weights[i] *= 1.0 if row_weight is None else row_weight
    # Nothing predicts the first token of a row that has no prompt and no beginning token.
    weights[:, :1] = 0.0
    arrays: dict[str, Any] = {
        "tokens": tokens,
        "action_mask": weights > 0,
        "group_id": np.arange(len(rows), dtype=np.int32),
        "weights": weights,
    }
    return types.Demonstrations(**arrays)


def pairs(rows: Sequence[Row], tokenizer: Tokenizer, max_length: int) -> types.Pairs:
    """Return rows `prompt, chosen, rejected`, or `prompt, completion, label`, as arrays.

    Each row is a group: of two completions, the chosen one first, or of one graded completion. The
    column `margin`, if a row has it, says how much better the chosen completion is. Longer texts
    are cut at their end.

    Args:
        rows: the rows.
        tokenizer: encodes texts and conversations.
        max_length: columns of the arrays [N, max_length].

    Returns:
        Pairs whose reference log-probs are zero. Whoever has a reference fills them in.
    """
    texts: list[Row] = []
    group_id: list[int] = []
    preferred: list[bool] = []
    margin: list[float] = []
    for i, row in enumerate(rows):
        if "chosen" in row:
            sides = [("chosen", True), ("rejected", False)]
        else:
            sides = [("completion", bool(row["label"]))]
        for side, is_good in sides:
            text = {"prompt": row["prompt"], "completion": row[side]}
            texts.append(text | {"tools": row.get("tools")})
            group_id.append(i)
            preferred.append(is_good)
            margin.append(float(row.get("margin") or 0.0))
    encoded = demonstrations(texts, tokenizer, max_length)
    arrays: dict[str, Any] = {
        "tokens": encoded.tokens,
        "action_mask": encoded.action_mask,
        "group_id": np.array(group_id, np.int32),
        "preferred": np.array(preferred),
        "margin": np.array(margin, np.float32),
        "reference_log_probs": np.zeros((len(texts), max_length), np.float32),
    }
    return types.Pairs(**arrays)


def steps(rows: Sequence[Row], tokenizer: Tokenizer, max_length: int) -> types.QExamples:
    """Return rows `prompt, completions, labels` as arrays, labeled at the last token of each step.

    These are TRL's stepwise rows: the steps of a completion in order, which joined are its text,
    and True for each right one. The last step ends with the end-of-sequence token unless the row
    says `"ended": False`. Steps that do not fit are left out.

    Args:
        rows: the rows.
        tokenizer: encodes texts and conversations.
        max_length: columns of the arrays [N, max_length].
    """
    tokens = np.full((len(rows), max_length), tokenizer.pad_id, np.int32)
    is_labeled = np.zeros((len(rows), max_length), bool)
    labels = np.zeros((len(rows), max_length), np.float32)
    for i, row in enumerate(rows):
        ids = tokenizer.encode_prompt(row["prompt"], row.get("tools"))
        steps_and_labels = zip(row["completions"], row["labels"], strict=True)
        for number, (step, label) in enumerate(steps_and_labels, start=1):
            ids = ids + tokenizer.encode(step)
            if number == len(row["labels"]) and row.get("ended", True):
                ids.append(tokenizer.eos_ids[0])
            if len(ids) > max_length:
                break
            last = len(ids) - 1
            tokens[i, : len(ids)] = ids
            is_labeled[i, last] = True
            labels[i, last] = float(label)
    arrays: dict[str, Any] = {
        "tokens": tokens,
        "action_mask": is_labeled,
        "group_id": np.arange(len(rows), dtype=np.int32),
        "returns": labels,
    }
    return types.QExamples(**arrays)


def _tokenize(row: Row, tokenizer: Tokenizer) -> tuple[list[int], list[float]]:
    """Return the token ids of a row, and what each of them counts: 0 if it is not learned."""
    tools = row.get("tools")
    if "messages" in row:
        return tokenizer.encode_demonstration(row["messages"], tools=tools)
    prompt = row["prompt"]
    completion = row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str) and not tokenizer.wraps(prompt):
        prompt_ids = tokenizer.encode_prompt(prompt)
        completion_ids = [*tokenizer.encode(completion), tokenizer.eos_ids[0]]
        return prompt_ids + completion_ids, [0.0] * len(prompt_ids) + [1.0] * len(completion_ids)
    given = _as_messages(prompt, "user")
    messages = given + _as_messages(completion, "assistant")
    return tokenizer.encode_demonstration(messages, len(given), tools)


def _as_messages(value: str | list[Any], role: str) -> list[Any]:
    """Return messages as they are, and a text as one message of the role."""
    return [{"role": role, "content": value}] if isinstance(value, str) else value
