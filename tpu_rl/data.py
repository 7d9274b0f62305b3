"""Rows from files, in an order that resumes exactly, and demonstrations as arrays.

Rows are dicts in TRL's shapes: `prompt` (a text or messages) with any columns beside it; `prompt, completion`;
`messages`. `row_files` reads and checks them.
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
from tpu_rl.errors import DamagedDataError, InputError
from tpu_rl.row_files import Row
from tpu_rl.row_files import read as read


class Source(Protocol):
    """Rows by number: a list, or a formula such as `environments.ArithmeticSource`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Row: ...


# --- published formats -------------------------------------------------------------------------------------------


def gsm8k(row: Mapping[str, Any]) -> Row:
    """GSM8K's own columns as a prompt with its ground truth: {"question", "answer"} -> {"prompt", "answer"}.

    `answer` becomes the number after "####". Raises InputError for a row without one.
    """
    solution, marker, number = str(row["answer"]).rpartition("####")
    if not marker or not number.strip():
        where, fix = f"question {str(row['question'])[:80]!r}", "drop the row, or say another --data.format"
        raise InputError('a GSM8K answer ends with "#### number"', where=where, fix=fix)
    return {"prompt": row["question"], "answer": number.strip(), "solution": solution.strip()}


def gsm8k_solutions(row: Mapping[str, Any], problem: int) -> list[Row]:
    """A problem of GSM8K with solutions that models wrote -> {"prompt", "completion", "label", "problem"} for each.

    Columns as published in example_model_solutions.jsonl: `question`, `ground_truth`, and for each model an object with
    `solution` and `is_correct`. Calculator marks, <<16-3=13>>, are taken out: they repeat what stands beside them, and
    no user's model writes them. Solutions that then read the same count once. Raises InputError for a row without any.
    """
    judged = {
        re.sub(r"<<[^<>]*>>", "", value["solution"]).strip(): bool(value["is_correct"])
        for value in row.values()
        if isinstance(value, dict) and isinstance(value.get("solution"), str) and "is_correct" in value
    }
    if not judged:
        raise InputError(
            "a problem has no solutions",
            where=f"question {str(row['question'])[:80]!r}",
            fix='solutions are columns such as {"solution": "...", "is_correct": true}',
        )
    return [
        {"prompt": row["question"], "completion": text, "label": right, "problem": problem}
        for text, right in judged.items()
    ]


def right_against_wrong(judged: Sequence[Row]) -> list[Row]:
    """Judged completions of one prompt -> {"prompt", "chosen", "rejected", ...}, every good one with every bad one."""
    shared = [{k: v for k, v in row.items() if k not in ("completion", "label")} for row in judged]
    return [
        columns | {"chosen": good["completion"], "rejected": bad["completion"]}
        for columns, good in zip(shared, judged, strict=True)
        for bad in judged
        if good["label"] and not bad["label"]
    ]


# --- order -------------------------------------------------------------------------------------------------------


def fingerprint(source: Source) -> str:
    """SHA-256, in hex, that tells sources apart: of all rows in their order, whatever the order of their columns.

    A dataclass is a formula with too many rows to read: its value and its first rows stand for it.
    """
    is_formula = dataclasses.is_dataclass(source)
    digest = hashlib.sha256(f"{source!r}\n".encode() if is_formula else b"")
    for i in range(min(len(source), 16) if is_formula else len(source)):
        digest.update(json.dumps(source[i], sort_keys=True, default=repr).encode() + b"\n")
    return digest.hexdigest()


def row_digests(rows: Sequence[Row]) -> np.ndarray:
    """[rows] uint64: 64 bits of a hash of each row, whatever the order of its columns."""
    texts = (json.dumps(row, sort_keys=True, default=repr).encode() for row in rows)
    return np.frombuffer(b"".join(hashlib.blake2b(text, digest_size=8).digest() for text in texts), "<u8")


class RowStream:
    """Batches of rows, (row_ids, rows), in an order that is a function of the seed; its state is its position.

    `row_ids` [B] int64 are places in the endless stream, never reused: row 3 of the second epoch has another id than
    row 3 of the first. Build with `stream`.
    """

    def __init__(self, batches: Any, batch_size: int, identity: dict[str, Any], accepted: Collection[str] = ()):
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
        """The position after the last batch delivered, as JSON values, and what it is a position in."""
        return {**self._identity, "next_batch": self._batches.get_state()["next_index"]}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a saved position. Raises InputError where that is one in another stream, but for accepted rows."""
        if not isinstance(state, dict) or state.keys() != self.get_state().keys():
            raise DamagedDataError("this is no position in a data stream", where=repr(state)[:120])
        if state["fingerprint"] in self._accepted:
            state = state | {name: self._identity[name] for name in ("fingerprint", "rows")}
        for name, ours in self._identity.items():
            if state[name] != ours:
                raise InputError(
                    f"the data position was saved with another {name.replace('_', ' ')}",
                    why=f"{state[name]} then, {ours} now: the rows that follow would not be the same",
                    fix="restore the data and settings of the run, or start a new run",
                )
        self._batches.set_state({"next_index": state["next_batch"]})


def stream(
    source: Source,
    seed: int,
    batch_size: int,
    shuffle: bool = True,
    repeat: bool = True,
    accepted: Collection[str] = (),
) -> RowStream:
    """The rows of `source` in batches: shuffled anew each epoch, for ever, unless told otherwise.

    Batches run across the border of epochs; without `repeat` the last one may be short. A position that was saved with
    rows of an `accepted` fingerprint is taken as one in these rows.
    """
    import grain

    if batch_size < 1:
        raise InputError(f"the batch size is {batch_size} and must be 1 or more")
    if len(source) == 0:
        raise InputError("the data have 0 rows")
    random_access: Any = source
    dataset = grain.MapDataset.source(random_access).seed(seed)
    if shuffle:
        dataset = dataset.shuffle()
    if repeat:
        dataset = dataset.repeat()
    # No threads and no prefetching: the state is exactly that after the last delivered batch.
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    batches = iter(dataset.batch(batch_size, batch_fn=list).to_iter_dataset(options))
    identity = {
        "fingerprint": fingerprint(source),
        "rows": len(source),
        "seed": seed,
        "batch_size": batch_size,
        "shuffle": shuffle,
    }
    return RowStream(batches, batch_size, identity, accepted)


# --- demonstrations ----------------------------------------------------------------------------------------------


class Tokenizer(Protocol):
    """What demonstrations need of `tokenizers.Tokenizer`."""

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    @property
    def pad_id(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def encode_prompt(self, prompt: str | list[dict[str, Any]]) -> list[int]: ...

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> list[int]: ...


def demonstrations(rows: Sequence[Row], tokenizer: Tokenizer, max_length: int) -> types.Demonstrations:
    """Rows `prompt, completion` or `messages` as arrays [N, max_length] (numpy); only completions are to be learned.

    A completion's end-of-sequence token is learned with it. What is longer than `max_length` loses its end; a row
    whose prompt fills it has nothing to learn.
    """
    tokens = np.full((len(rows), max_length), tokenizer.pad_id, np.int32)
    action_mask = np.zeros((len(rows), max_length), bool)
    for i, row in enumerate(rows):
        prompt, completion = _tokenize(row, tokenizer)
        ids = (prompt + completion)[:max_length]
        tokens[i, : len(ids)] = ids
        action_mask[i, len(prompt) : len(ids)] = True
    arrays: dict[str, Any] = {
        "tokens": tokens,
        "action_mask": action_mask,
        "group_id": np.arange(len(rows), dtype=np.int32),
    }
    return types.Demonstrations(**arrays)


def pairs(rows: Sequence[Row], tokenizer: Tokenizer, max_length: int) -> types.Pairs:
    """Rows `prompt, chosen, rejected`, or `prompt, completion, label`, as arrays [N, max_length] (numpy).

    A row is a group, of two completions, the chosen one first, or of one that was judged. `margin`, where a row has
    it, says how much better the chosen one is. Log-probs of the reference are zero: who has a reference fills them in.
    What is longer than `max_length` loses its end.
    """
    texts, group_id, preferred, margin = [], [], [], []
    for i, row in enumerate(rows):
        sides = [("chosen", True), ("rejected", False)] if "chosen" in row else [("completion", bool(row["label"]))]
        texts += [{"prompt": row["prompt"], "completion": row[side]} for side, _ in sides]
        group_id += [i] * len(sides)
        preferred += [good for _, good in sides]
        margin += [float(row.get("margin") or 0.0)] * len(sides)
    learned = demonstrations(texts, tokenizer, max_length)
    arrays: dict[str, Any] = {
        "tokens": learned.tokens,
        "action_mask": learned.action_mask,
        "group_id": np.array(group_id, np.int32),
        "preferred": np.array(preferred),
        "margin": np.array(margin, np.float32),
        "reference_log_probs": np.zeros((len(texts), max_length), np.float32),
    }
    return types.Pairs(**arrays)


def steps(rows: Sequence[Row], tokenizer: Tokenizer, max_length: int) -> types.QExamples:
    """Rows `prompt, completions, labels` as arrays [N, max_length] (numpy), labelled at the last token of each step.

    TRL's stepwise shape: a completion's steps in order, which put together are its text, and whether each is right.

    The last step ends with the end-of-sequence token unless the row says `"ended": False`. Steps that do not fit are
    left out.
    """
    tokens = np.full((len(rows), max_length), tokenizer.pad_id, np.int32)
    labelled, labels = np.zeros((len(rows), max_length), bool), np.zeros((len(rows), max_length), np.float32)
    for i, row in enumerate(rows):
        ids = tokenizer.encode_prompt(row["prompt"])
        for number, (step, label) in enumerate(zip(row["completions"], row["labels"], strict=True), start=1):
            ids = ids + tokenizer.encode(step)
            if number == len(row["labels"]) and row.get("ended", True):
                ids.append(tokenizer.eos_ids[0])
            if len(ids) > max_length:
                break
            tokens[i, : len(ids)] = ids
            labelled[i, len(ids) - 1], labels[i, len(ids) - 1] = True, float(label)
    arrays: dict[str, Any] = {
        "tokens": tokens,
        "action_mask": labelled,
        "group_id": np.arange(len(rows), dtype=np.int32),
        "returns": labels,
    }
    return types.QExamples(**arrays)


def _tokenize(row: Row, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids of the prompt and of the completion with its end."""
    if "messages" not in row and isinstance(row["completion"], str) and isinstance(row["prompt"], str):
        return tokenizer.encode_prompt(row["prompt"]), [*tokenizer.encode(row["completion"]), tokenizer.eos_ids[0]]
    messages = row["messages"] if "messages" in row else _joined(row["prompt"], row["completion"])
    last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=0)
    if last == 0:
        raise InputError(
            "a conversation has no answer by the assistant to learn from",
            where=json.dumps(messages, ensure_ascii=False)[:200],
            fix="drop the row",
        )
    prompt = tokenizer.encode_prompt(messages[:last])
    whole = tokenizer.render(messages[: last + 1], add_generation_prompt=False)
    if whole[: len(prompt)] == prompt:
        completion = whole[len(prompt) :]
        ends = [i for i, token in enumerate(completion) if token in tokenizer.eos_ids]
        if ends:
            # The template's line break after the end is no action: the sampler stops at the end.
            return prompt, completion[: ends[-1] + 1]
    # A template that rewrites the conversation's end (Qwen3's empty thinking block), or writes none.
    return prompt, [*tokenizer.encode(messages[last]["content"]), tokenizer.eos_ids[0]]


def _joined(prompt: str | list[Any], completion: str | list[Any]) -> list[Any]:
    head = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return head + ([{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion)
