"""Checks of the rows of a file against the text that the model reads.

Each of the first rows is encoded as a run encodes it. Whatever a row holds and the model does not
read is named: once for each kind, and not once for each row.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from tpu_rl import data
from tpu_rl.algorithm_spec import ExperienceSpec
from tpu_rl.commands.config import ExperimentConfig, FileData
from tpu_rl.data import Row
from tpu_rl.data.images import UNREAD_TAG, unnamed_pictures
from tpu_rl.data.shapes import SYSTEM_COLUMNS
from tpu_rl.data.stored_rows import StoredRows
from tpu_rl.errors import InputError
from tpu_rl.experience.rows import tasks
from tpu_rl.experience.transforms import read_texts, text_of_column
from tpu_rl.rewards import registry, scoring
from tpu_rl.rollout import prompts
from tpu_rl.tokenizers import Tokenizer, conversations
from tpu_rl.tokenizers.tokenizer import END_OF_THINK
from tpu_rl.wings import VERIFIERS

MAX_ENCODED_ROWS = 400
"""Rows of each stage that are encoded. The dry run encodes more."""
MAX_RENDERED_ROWS = 200
"""Rows whose texts are looked for in the rendering."""

OTHER_COLUMNS = {"tools", "functions", *SYSTEM_COLUMNS}
"""Columns that are read beside those of the algorithm, if a row has them."""
TEXTS = ("messages", "prompt", "completion", "chosen", "rejected", "tools", "functions")
"""Columns that the model reads."""
SHARE_OF_READ_WORDS = 0.8
"""Share of a value's words that the model reads elsewhere, from which on the value is read."""
COLUMNS_OF_SOURCE = {
    "demonstrations": {"weight", "span_weights", "ended"},
    "completions": {"weight", "span_weights", "ended"},
    "pairs": {"margin", "ended"},
    "step_labels": {"ended"},
    "scored_completions": {"completion", "score"},
}
"""The same, by the source of experience."""
CHOICE_COLUMNS = ("choices", "options")
"""Columns with the choices of a question. A prompt has to show them."""
WARNINGS = {
    "tools": "{count} of {rows} rows have their tools in the system message and in `tools`: a "
    "template that shows tools writes them twice; take one of the two out of the rows",
    "hidden": "the chat template does not show all that the rows hold: {names} of {rows} rows; "
    "give a template that shows it (--tokenizer.chat-template FILE), or drop it",
    "spelling": "{count} of {rows} rows spell control tokens, which the model reads as ordinary "
    "text: only the chat template writes control tokens",
    "choices": "{count} of {rows} rows have choices that their prompt does not show: write them "
    'into it, as in "Which? (A) red (B) blue", and `answer` as a letter',
    "tags": "the model reads tags of images as letters: {names} of {rows} rows; in a row with a "
    "column `images`, write <image> where each of them stands",
    "pictures": "columns look like pictures, and nothing shows them to the model: {names} of "
    "{rows} rows; name one, --data.columns images={first}, or write a list `images`",
}
"""Kind of what the model does not read as it is meant -> the warning, for the rows that have it."""
MEDIA_COLUMNS = {"images", "image", "videos", "video", "audios", "audio"}
"""Columns that nothing reads, and without which a prompt means something else."""


def check(config: ExperimentConfig, tokenizer: Tokenizer, vocab_size: int) -> list[str]:
    """Print notes about how the rows of a file are read, and return warnings about what is not.

    Raises InputError if one of the rows cannot be encoded, or has ids beyond the embedding; with
    the line of the row.
    """
    warnings: list[str] = []
    experiences = [stage.algorithm.experience for stage in config.stages]
    for path in dict.fromkeys(spec.texts for spec in experiences if spec.texts is not None):
        texts = ExperienceSpec("demonstrations", ("messages",), sampled_by=None)
        warnings += _check_rows(config, texts, read_texts(path), tokenizer, vocab_size)
    if not isinstance(config.data, FileData) or config.data.path is None:
        return warnings
    specs = {spec.columns: spec for spec in experiences}
    for spec in specs.values():
        rows, held_out = tasks.file_rows(config.data, spec, config.evaluation.rows)
        note_reading(config, config.data, spec, rows, tokenizer)
        warnings += _check_rows(config, spec, rows, tokenizer, vocab_size)
        if config.data.evaluation_path is not None:
            warnings += _check_rows(config, spec, held_out, tokenizer, vocab_size)
    return warnings


def note_reading(
    config: ExperimentConfig,
    files: FileData,
    spec: ExperienceSpec,
    rows: Sequence[Row],
    tokenizer: Tokenizer,
) -> None:
    """Print how the rows are read: their shape, unused columns, separators and ends of turns."""
    notes = []
    shape = None
    if files.format == "plain":
        shape = data.first_shape(str(files.path), files.split, files.config, files.columns)
    if shape is not None:
        notes.append(f"the rows are read as {shape.name}")
    others = sorted(set(rows.columns if isinstance(rows, StoredRows) else ()) & set(rows[0]))
    used = {*spec.columns, *OTHER_COLUMNS, *(shape.columns if shape else ())}
    used |= COLUMNS_OF_SOURCE.get(spec.source, set())
    used |= _sources(files.columns)
    if tokenizer.images is not None and isinstance(rows[0].get("images"), list):
        used.add("images")
    prompt = rows[0].get("prompt")
    if isinstance(prompt, list) and prompt == (rows[0].get("messages") or [])[: len(prompt)]:
        used.add("messages")  # They were split.
    if "messages" in spec.columns and "messages" not in rows[0]:
        used |= {"prompt", "completion", "text"}
    of_rewards = (
        None
        if config.converses
        else _columns_of_rewards((*config.reward_names, *config.evaluation_rewards))
    )
    if of_rewards is None or files.format != "plain":
        used |= set(others) - MEDIA_COLUMNS
    # Settings may name a column, as that of hints.
    used |= (of_rewards or set()) | set(re.findall(r"'(\w+)'", repr(config)))
    media = {column: rows[0].get(column) for column in MEDIA_COLUMNS}
    used |= {name for name, value in media.items() if isinstance(value, list | None) and not value}
    unused = [column for column in others if column not in used]
    # What a path enters, or has a name that is read, may hold more.
    sources = {name.partition("=")[2] for name in files.columns}
    words = {word for text in _texts([rows[0].get(name) for name in TEXTS]) for word in text}
    parts = {source.partition(".")[0] for source in sources if "." in source}
    for name in sorted({*parts, *(used & {*SYSTEM_COLUMNS, "conversation", "conversations"})}):
        only = None if of_rewards == set() else (*TEXTS, *SYSTEM_COLUMNS)
        unused += _unread(rows[0].get(name), name, sources, words, only)
    if unused:
        notes.append(f"columns that nothing reads: {', '.join(unused)}")
    if "labels" in spec.columns and rows[0]["completions"][0].endswith(files.step_separator):
        notes.append("steps are joined as they are, or by --data.step-separator, a line end")
    if _is_chat(rows[0], tokenizer) and tokenizer.turn_end != tokenizer.eos_ids[0]:
        end, eos = (
            tokenizer.decode([i], skip_special=False)
            for i in (tokenizer.turn_end, tokenizer.eos_ids[0])
        )
        notes.append(
            f"turns end with {end}, as the chat template writes, and not with the eos_token {eos}; "
            "both end a completion, also of the saved model (generation_config.json)"
        )
    after = tokenizer.text_after_turn.strip()
    if _is_chat(rows[0], tokenizer) and after and not tokenizer.ends_turns:
        eos = tokenizer.decode([tokenizer.eos_ids[0]], skip_special=False)
        notes.append(
            f"the chat template writes {after[:40]!r} after an answer, which is no control token: "
            f"answers end with the eos_token {eos}"
        )
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def _texts(value: Any) -> Iterator[list[str]]:
    """Yield the words of each text in a value, without keys, roles and types."""
    if isinstance(value, str):
        yield re.findall(r"\w+", value)
    items = value if isinstance(value, list) else []
    if isinstance(value, dict):
        items = [item for key, item in value.items() if key not in ("role", "from", "type", "id")]
    for item in items:
        yield from _texts(item)


def _is_path(name: str, source: str) -> bool:
    return source.startswith(f"{name}.")


def _unread(
    value: Any, path: str, sources: set[str], words: set[str], only: Sequence[str] | None
) -> list[str]:
    """Return the paths in an object whose values no source names and no text has.

    With `only`, those alone that end with such a key.
    """
    if path in sources or value in (None, "", [], {}):
        return []
    if isinstance(value, str) and any(_is_path(path, source) for source in sources):
        with suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, dict) and any(_is_path(path, source) for source in sources):
        inner = [_unread(v, f"{path}.{k}", sources, words, only) for k, v in value.items()]
        return [name for names in inner for name in names]
    texts = [word for text in _texts(value) for word in text]
    known = sum(word in words for word in texts)
    is_read = bool(texts) and known >= SHARE_OF_READ_WORDS * len(texts)
    return [] if is_read or (only and path.rpartition(".")[2] not in only) else [path]


def _columns_of_rewards(names: Sequence[str]) -> set[str] | None:
    """Return the columns that rewards read; None if one may read any."""
    columns: set[str] = set()
    for name in names:
        base, settings = registry.settings_of(name)
        if base not in VERIFIERS or VERIFIERS[base].reads_reward:
            return None
        parameters = scoring.parameters(VERIFIERS[base].score) or ()
        columns |= {"answer", *CHOICE_COLUMNS, *settings.values()}
        columns |= {parameter.name for parameter in parameters}
        if "tests" in columns:
            columns |= {"solution", "solutions", "canonical_solution", "reference_solution"}
    return columns


def _sources(names: Sequence[str]) -> set[str]:
    """Return the columns that names, NAME=COLUMN, NAME=COLUMN.KEY or NAME=SUM, are read from."""
    sources = {name.partition("=")[2] for name in names}
    words = {word for source in sources for word in re.findall(r"[^\W\d]\w*", source)}
    return sources | words | {source.partition(".")[0] for source in sources}


def _is_chat(row: Row, tokenizer: Tokenizer) -> bool:
    prompt = row.get("messages", row.get("prompt"))
    return isinstance(prompt, list) or tokenizer.wraps(prompt)


def _check_rows(
    config: ExperimentConfig,
    spec: ExperienceSpec,
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    vocab_size: int,
) -> list[str]:
    """Return warnings about what the model does not read of rows. Raises as `check`."""
    encode = _encoder(config, spec, tokenizer)
    curriculum = config.rollout.curriculum
    starts = curriculum.hints or any(curriculum.start)
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in WARNINGS}
    num_without_thought = 0
    num_tokens = 0
    num_unknown = 0
    named = _sources(config.data.columns if isinstance(config.data, FileData) else ())
    markers = conversations.alternatives(tokenizer.markers)
    num_rows = min(len(rows), MAX_ENCODED_ROWS)
    num_rendered = min(len(rows), MAX_RENDERED_ROWS)

    def findings(row: Row) -> dict[str, Iterable[str]]:
        """Return kind of warning -> names of what the row has of it; "" where it has no name."""
        pictures = set() if config.converses else {*unnamed_pictures(row)} - named
        return {
            "tools": [""] * _repeats_tools(row),
            "hidden": _unshown(row, tokenizer),
            "spelling": [""] * _spells(row, spec.columns, markers),
            "choices": [""] * _hides_choices(row),
            "tags": _unread_tags(row, spec.columns) if tokenizer.images else (),
            "pictures": pictures,
        }

    for index in range(num_rows):
        row = rows[index]
        with data.naming_row(rows, index):
            if spec.source == "q_examples":
                prompts.refuse_images(row, tokenizer)
            ids = np.asarray(encode(row))
            if starts:
                text_of_column(row, curriculum.solution_column)
            if tokenizer.images is not None:
                ids = np.asarray(tokenizer.images.collapse(ids.ravel().tolist()))
            if ids.size and ids.max() >= vocab_size:
                raise _beyond(tokenizer, int(ids.max()), vocab_size)
            num_tokens += ids.size
            num_unknown += int((ids == tokenizer.unknown_id).sum())
            for kind, names in findings(row).items() if index < num_rendered else ():
                counts[kind].update(names)
        if tokenizer.thought_opening:
            num_without_thought += _lacks_thought(row)
    warnings = []
    if num_unknown:
        assert tokenizer.unknown_id is not None
        token = tokenizer.decode([tokenizer.unknown_id], skip_special=False).strip()
        warnings.append(
            f"{num_unknown / num_tokens:.2%} of the tokens of the first {num_rows} rows are "
            f"unknown to the tokenizer ({token}): the model cannot read that text"
        )
    warnings += [
        WARNINGS[kind].format(
            count=names.total(), rows=num_rendered, names=_counts(names), first=min(names)
        )
        for kind, names in counts.items()
        if names
    ]
    if num_without_thought:
        warnings.append(
            f"the generation prompt opens <think>, and {num_without_thought} of {num_rows} answers "
            "have no thought: they are learned with an empty one, or as the template marks them; "
            "write thoughts into the answers, or choose a template without "
            "(--tokenizer.template-kwargs, --tokenizer.chat-template)"
        )
    return warnings


def _counts(names: Counter[str]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in sorted(names.items()))


def _unread_tags(row: Row, columns: Sequence[str]) -> set[str]:
    """Return the tags of images in a row's texts that are none for the model."""
    names = ("messages", "prompt", "completion") if "messages" in columns else columns
    texts = [text for name in names for text in conversations.strings(row.get(name))]
    return {tag[0][:40] for text in texts for tag in UNREAD_TAG.finditer(text)}


def _hides_choices(row: Row) -> bool:
    """Return True if the row has a list of choices, and its texts show none of them."""
    choices = next((row[name] for name in CHOICE_COLUMNS if isinstance(row.get(name), list)), [])
    texts = [choice for choice in choices if isinstance(choice, str)]
    shown = "".join(conversations.strings([row.get("prompt"), row.get("messages")]))
    return bool(texts) and not any(text in shown for text in texts)


def _encoder(
    config: ExperimentConfig, spec: ExperienceSpec, tokenizer: Tokenizer
) -> Callable[[Row], Any]:
    """Build the function that encodes a row as the algorithm does: row -> ids."""
    max_length = config.sampling.max_prompt_tokens + config.sampling.max_new_tokens
    given = spec.sampled_by is None
    if given and spec.source in ("demonstrations", "completions"):
        return lambda row: data.demonstrations([row], tokenizer, max_length).tokens
    if given and spec.source == "pairs":
        return lambda row: data.pairs([row], tokenizer, max_length).tokens
    if given and spec.source == "step_labels":
        return lambda row: data.steps([row], tokenizer, max_length).tokens
    if given and spec.source == "scored_completions":
        size = config.batch.group_size
        return lambda row: data.scored_completions([row], tokenizer, max_length, size).tokens

    return lambda row: tokenizer.encode_row(row).ids


def _conversations(row: Row) -> list[list[Any]]:
    """Return the conversations of a row, each with its prompt."""
    if isinstance(row.get("messages"), list) and "chosen" not in row and "prompt" not in row:
        return [row["messages"]]
    prompt = row.get("prompt")
    if not isinstance(prompt, list):
        return []
    answers = [row.get(name) for name in ("completion", "chosen", "rejected")]
    answers = [answer for answer in answers if isinstance(answer, list)]
    return [[*prompt, *answer] for answer in answers or [[]]]


def _unshown(row: Row, tokenizer: Tokenizer) -> set[str]:
    """Return the names of what the template does not show of a row."""
    names: set[str] = set()
    for messages in _conversations(row):
        # The whole conversation need not be one that the template renders: the encoding decides.
        with suppress(InputError):
            names.update(tokenizer.unshown(messages, row.get("tools")))
    return names


def _spells(row: Row, columns: Sequence[str], markers: re.Pattern[str]) -> bool:
    """Return True if a text in one of the columns spells a control token.

    Raises InputError if a prompt begins with one or an answer ends with one, as where a chat
    template was applied already.
    """
    is_spelled = False
    for name in ("messages", "prompt", "completion") if "messages" in columns else columns:
        value = row.get(name)
        text = value if isinstance(value, str) else "".join(conversations.strings(value))
        spellings = [*markers.finditer(text)]
        is_spelled = is_spelled or bool(spellings)
        if not spellings or not isinstance(value, str):
            continue
        shown = "text" if "text" in row and not row.get("prompt") else name
        begins = not text[: spellings[0].start()].strip() and (
            name == "prompt" or not row.get("prompt")
        )
        ends = not text[spellings[-1].end() :].strip() and name != "prompt"
        if begins or ends:
            raise InputError(
                f"`{shown}` looks as if a chat template had written it: it has "
                f"{spellings[0 if begins else -1][0]}",
                where=json.dumps(text, ensure_ascii=False)[:120],
                why="in data, this is ordinary text, so that no text can pass for a control token",
                fix="write the conversation as `messages`, or `prompt` and answers without such "
                "tokens: the chat template writes them",
            )
    return is_spelled


def _repeats_tools(row: Row) -> bool:
    """Return True if a system message of the row names each of its `tools` in JSON, as rows of
    Hermes do that were written for a template without tools."""
    tools = row.get("tools")
    if not isinstance(tools, list) or not tools:
        return False
    functions = [tool.get("function", tool) for tool in tools if isinstance(tool, dict)]
    names = [json.dumps(function.get("name")) for function in functions]
    systems = [
        str(message.get("content"))
        for messages in _conversations(row)
        for message in messages
        if isinstance(message, dict) and message.get("role") == "system"
    ]
    return any(all(name in text for name in names) for text in systems)


def _lacks_thought(row: Row) -> bool:
    """Return True if an answer of the row is a text without a thought."""
    answers = []
    for name in ("completion", "chosen", "rejected", "messages"):
        value = row.get(name)
        last = value[-1] if isinstance(value, list) and value else {"content": value}
        if isinstance(last, dict) and not any("reason" in key or "think" in key for key in last):
            answers.append(last.get("content"))
    return any(isinstance(answer, str) and END_OF_THINK not in answer for answer in answers)


def _beyond(tokenizer: Tokenizer, token_id: int, vocab_size: int) -> InputError:
    token = tokenizer.decode([token_id], skip_special=False)
    return embedding_error([token], vocab_size)


def embedding_error(tokens: Sequence[str], vocab_size: int) -> InputError:
    """Return the error of tokens without a row in the embedding."""
    return InputError(
        f"{', '.join(tokens[:5])} lie beyond the model's embedding",
        where="--model.path",
        why=f"the embedding has {vocab_size} rows, and the tokenizer has larger ids: the tokens "
        "were added, and the model was not resized",
        fix="save the model again after resize_token_embeddings(len(tokenizer)) of transformers, "
        "or use a tokenizer and a template of the model's own tokens",
    )
