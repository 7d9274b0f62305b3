"""The host's side of conversations: environments that answer what the policy wrote.

A turn is the policy's tokens up to its stop. What follows it:

    environment with tools    a turn that calls tools is followed by their results; one without a
                              call ends the episode
    text game                 the turn is a step of the game, whose observation follows it
    the turn was cut off      the episode ends: nothing follows a turn without an end
    max_turns                 the last turn still acts, but nothing follows it

An observation longer than `max_observation_tokens` is cut, or is a fault (`refuses_long`), as is
everything that `environments.pool` calls one. Messages about calls that cannot be read count as
short. An episode with a fault is over; it has a reason and no reward.
"""

from __future__ import annotations

import bisect
import itertools
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from tpu_rl.data import Row
from tpu_rl.environments.contract import CUT
from tpu_rl.environments.pool import EnvironmentPool, Reply, ToolResult
from tpu_rl.errors import InputError
from tpu_rl.rollout import prompts
from tpu_rl.rollout.conversations.episode_log import EpisodeLog, LoggedAnswer
from tpu_rl.rollout.image_prompts import ImageTable
from tpu_rl.rollout.requests import Environment
from tpu_rl.runtime.typed_json import finished
from tpu_rl.tokenizers import Tokenizer, tool_calls
from tpu_rl.tokenizers.images import MARK, sources_of
from tpu_rl.tokenizers.tool_calls import BadCall, ToolCall

WAIT_SECONDS = 1.0
"""The longest that `Episodes.poll` waits, so that signals are looked at."""

_pool_ids = itertools.count()
"""Ids of episodes in pools: evaluations and trainings may share a pool."""

Message = dict[str, Any]
IMAGES = "images"
"""Key of messages with images: their files, for which marks stand in the content."""
MOST_CHARACTERS = 128
"""Characters for each token of the limit beyond which an answer is cut before it is encoded."""
QUESTION: list[Message] = [
    {"role": "user", "content": "a question"},
    {"role": "assistant", "content": "<think>a thought</think>an answer"},
]


class History(NamedTuple):
    """Token ids that stand in place of everything before, because the template rewrote it."""

    token_ids: list[int]


@dataclass(kw_only=True)
class Episode:
    """An episode: what became of it so far, and what it waits for."""

    prompt: str | list[Message]
    """The prompt that the policy read, with the first observation."""
    messages: list[Message] = field(default_factory=list)
    """The turns of the policy and the messages between them; at its end as reward functions see
    them."""
    turn_rewards: list[float | None] = field(default_factory=list)
    """The reward of each turn. None: the environment gave none. 0 for a turn of a game that was cut
    off, which earned nothing."""
    reward: float | None = None
    """What `get_reward` returned. None: not scored."""
    fault: str = ""
    """The reason why the episode could not go on; "" if it could."""
    tool_calls: int = 0
    errors: int = 0
    """Calls that could not be read, and tools that raised."""
    observation_tokens: int = 0
    state: Mapping[str, Any] = field(default_factory=dict)
    """The environment's public attributes at the end."""
    images: list[bytes] = field(default_factory=list)
    """The images that the environment showed, as files."""
    row: Row
    log: EpisodeLog
    pool_id: int
    is_game: bool
    is_chat: bool
    tools: list[dict[str, Any]]
    call_format: str | None = None
    """The format of its calls, after a chat template."""
    waits_for: str = "reset"
    """What `pending` is the answer to; "" while the policy writes, or after the end."""
    pending: Future[Reply] | None = None
    num_asked: int = 0
    """Number of requests to the environment, by the log or by itself."""
    lost: str = ""
    """The reason why the environment of an earlier process could not be restored."""
    calls: list[ToolCall | BadCall] = field(default_factory=list)
    """The calls of the last turn."""
    ended: bool = True
    """True if the last turn has its end-of-sequence token."""
    is_over: bool = False
    since: float = 0.0
    """When it began to wait for what it waits for."""

    def has_waited_for(self, what: str) -> None:
        """Note the time since the last call."""
        now = time.perf_counter()
        self.log.waits.append((what, now - self.since))
        self.since = now


@dataclass(kw_only=True)
class Episodes:
    """The conversations of N = len(rows) * group_size rows, of which this process runs the local.

    A context manager: environments are given back at its end. Raises InputError if a row belongs
    to no environment.
    """

    rows: Sequence[Row]
    group_size: int = 1
    environment: Environment
    tokenizer: Tokenizer
    max_prompt_tokens: int
    """Tokens of a prompt, with the first observation."""
    step: int
    """The step of the run. Seeds depend on it."""
    local: slice | None = None
    """The episodes, in whole groups, that this process runs; by default all."""
    first_row_id: int = 0
    """Id of the first episode; the others count up. Seeds depend on it."""
    seed: int = 0
    """The seed of the run."""
    stop_strings: Sequence[str] = ()
    """Texts that end a turn. They are no part of a game's step."""
    is_evaluation: bool = False
    """True if the episodes belong to an evaluation. Environments may ask."""
    image_table: ImageTable | None = None
    """Gives ids to images, for a model that reads them."""
    old_logs: Sequence[EpisodeLog | None] = ()
    """[N] of episodes that go on, and None for new ones. By default all are new."""
    saves: bool = False
    """True if episodes may go on in another process."""
    unfinished: set[int] = field(default_factory=set)
    """Local rows whose environments live on at the end, for a later step."""
    logs: dict[int, EpisodeLog] = field(default_factory=dict)
    """Local row -> what happened so far."""

    def __post_init__(self):
        self._pool = self.environment.pool
        group_size = self.group_size
        local = self.local or slice(0, len(self.rows) * group_size)
        for row in range(local.start, local.stop):
            log = self.old_logs[row] if self.old_logs else None
            group_id = self.first_row_id + row - row % group_size
            self.logs[row] = log or EpisodeLog(_seed(self.seed, self.step, group_id))
        self.by_row: dict[int, Episode] = {
            row: self._new_episode(self.rows[row // group_size], log)
            for row, log in self.logs.items()
        }

    def _new_episode(self, row: Row, log: EpisodeLog) -> Episode:
        description = self._pool.description(row)
        prompt = row.get("prompt")
        if prompt is None:
            has_template = self.tokenizer.has_chat_template
            prompt = [{"role": "user", "content": ""}] if has_template else ""
        is_chat = not isinstance(prompt, str) or self.tokenizer.wraps(prompt)
        if is_chat and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        return Episode(
            row=row,
            log=log,
            pool_id=next(_pool_ids) if log.pool_id is None else log.pool_id,
            is_game=description.form == "game",
            is_chat=is_chat,
            tools=description.tools,
            prompt=prompt,
        )

    def __enter__(self) -> Episodes:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        for row, episode in self.by_row.items():
            lives_on = error is None and row in self.unfinished
            if not episode.is_over and not lives_on:
                self._pool.release(episode.pool_id)

    def begin(self) -> dict[int, list[int]]:
        """Reset all environments at once, and return local row -> token ids of its prompt.

        An episode whose reset fails has the prompt of its data row, and ends with its first turn.
        Raises InputError if a prompt of the data is too long, with the tools that it shows.
        """
        restoring = []
        for episode in self.by_row.values():
            episode.since = time.perf_counter()
            state = episode.log.lost_state()
            if state is not None:
                restored = self._pool.restore(episode.pool_id, episode.row, state)
                restoring.append((episode, restored))
            episode.log.pool_id = episode.pool_id
            episode.log.end = partial(self._pool.release, episode.pool_id)
            reset = partial(
                self._pool.reset,
                episode.pool_id,
                episode.row,
                episode.log.seed,
                self.environment.max_turns,
                self.is_evaluation,
                self.saves,
            )
            episode.pending = self._answer_to(episode, "reset", reset)
        for episode, restored in restoring:
            episode.lost = restored.result().fault
        known: dict[Any, tuple[Any, list[int], str | None, str]] = {}
        prompt_ids = {}
        for row, episode in self.by_row.items():
            reply = _reply(episode)
            episode.images += reply.images
            key = (row // self.group_size, reply.text, reply.images)
            if key not in known:
                known[key] = self._first_prompt(episode, reply.text)
            episode.prompt, token_ids, episode.call_format, fault = known[key]
            episode.fault = reply.fault or fault
            prompt_ids[row] = list(token_ids)
        return prompt_ids

    def on_turn(self, row: int, token_ids: Sequence[int], stopped: bool) -> None:
        """Take a turn that the policy ended, and begin what follows it. This does not wait.

        Args:
            row: the local episode.
            token_ids: the turn, with its end.
            stopped: whether it ended by itself. Otherwise it was cut off at a limit.
        """
        episode = self.by_row[row]
        episode.has_waited_for("policy")
        if episode.fault:
            # Its reset failed, so nothing can be asked of it.
            text = self.tokenizer.decode(token_ids)
            episode.messages.append({"role": "assistant", "content": text})
            episode.turn_rewards.append(None)
            self._wait_for(episode, "reward", finished(Reply(fault=episode.fault)))
            return
        episode.ended = bool(token_ids) and token_ids[-1] in self.tokenizer.eos_ids
        episode.turn_rewards.append(None)
        if episode.is_game:
            self._begin_step(episode, token_ids, stopped)
        else:
            self._begin_calls(episode, token_ids, stopped)

    def end(self, row: int) -> None:
        """End an episode that has no room for another turn. `poll` reports when it is over."""
        self._begin_reward(self.by_row[row])

    def poll(self, wait: bool = False) -> dict[int, list[int] | History | None]:
        """Return local row -> token ids to append, a rewritten `History`, or None at the end.

        Only rows with news since the last call are in it. It is empty if there are none; with
        `wait` only after a while.
        """
        news = self._news()
        if not news and wait:
            pending = [episode.pending for episode in self.by_row.values() if episode.pending]
            futures.wait(pending, WAIT_SECONDS, futures.FIRST_COMPLETED)
            news = self._news()
        return news

    def has_ended(self, row: int) -> bool:
        """Return True if nothing but its reward may follow in a local episode."""
        episode = self.by_row[row]
        return episode.is_over or episode.waits_for == "reward"

    # --- what begins ---

    def _begin_calls(self, episode: Episode, token_ids: Sequence[int], stopped: bool) -> None:
        """Call the tools that a turn asks for, or end the episode."""
        turn = self.tokenizer.parse_turn(
            token_ids, episode.tools, episode.is_chat, episode.call_format
        )
        episode.messages.append(turn.message)
        if not stopped or not turn.calls:
            self._begin_reward(episode)
            return
        episode.calls = turn.calls
        good = [call for call in turn.calls if isinstance(call, ToolCall)]
        episode.tool_calls += len(good)
        if good:
            self._ask(episode, "call", partial(self._pool.call, episode.pool_id, good))
        else:
            self._wait_for(episode, "call", finished(Reply()))

    def _begin_step(self, episode: Episode, token_ids: Sequence[int], stopped: bool) -> None:
        """Give a game the text of a turn."""
        text = self.tokenizer.decode(token_ids)
        for stop_string in self.stop_strings:
            text = text.removesuffix(stop_string)
        episode.messages.append({"role": "assistant", "content": text})
        if stopped:
            step = partial(self._pool.step, episode.pool_id, text, episode.ended)
            self._ask(episode, "step", step)
        else:
            episode.turn_rewards[-1] = 0.0
            self._begin_reward(episode)

    def _begin_reward(self, episode: Episode) -> None:
        """Ask for the reward of an episode that has ended, and for its environment's state."""
        self._ask(episode, "reward", partial(self._pool.reward, episode.pool_id))

    def _answer_to(
        self, episode: Episode, ask: str, question: Callable[[], Future[Reply]]
    ) -> Future[Reply]:
        """Return the answer of the log; if it has none, that of the environment."""
        answers = episode.log.answers
        if episode.num_asked == len(answers):
            lost = episode.lost and finished(Reply(fault=f"it is not restored: {episode.lost}"))
            answers.append(LoggedAnswer(ask, lost or question()))
        answer = answers[episode.num_asked]
        episode.num_asked += 1
        if answer.to != ask:
            return finished(Reply(fault=f"its log has an answer to {answer.to}, and not to {ask}"))
        return answer.reply

    def _ask(self, episode: Episode, ask: str, question: Callable[[], Future[Reply]]) -> None:
        self._wait_for(episode, ask, self._answer_to(episode, ask, question))

    def _wait_for(self, episode: Episode, ask: str, future: Future[Reply]) -> None:
        episode.waits_for = ask
        episode.pending = future

    # --- what is answered ---

    def _news(self) -> dict[int, list[int] | History | None]:
        """Return row -> ids to append, None at its end, of episodes whose answers have arrived."""
        news = {}
        for row, episode in self.by_row.items():
            # One answer may lead to another question, which is answered at once.
            while episode.pending is not None and episode.pending.done():
                token_ids = self._follow(episode)
                if token_ids is not None or episode.is_over:
                    news[row] = token_ids
        return news

    def _follow(self, episode: Episode) -> list[int] | History | None:
        """Return the ids that an answer appends; None if it is none, or ends the episode."""
        asked = episode.waits_for
        reply = _reply(episode)
        if reply.fault or asked == "reward":
            episode.fault = episode.fault or reply.fault
            episode.reward = None if episode.fault else reply.reward
            episode.state = reply.state
            episode.messages = [without_images(message) for message in episode.messages]
            episode.is_over = True
            self._pool.release(episode.pool_id)
            return None
        if asked == "call":
            messages = self._tool_messages(episode, reply.results)
            episode.errors += sum(result.is_error for result in reply.results)
        else:
            episode.turn_rewards[-1] = reply.reward
            messages = [_message("user", reply.text or "", reply.images)]
        earlier = list(episode.messages)
        if not (reply.done and not reply.text):
            episode.messages += messages
        if reply.done or len(episode.turn_rewards) >= self.environment.max_turns:
            self._begin_reward(episode)
            return None
        token_ids, seen = self._encode_observation(episode, earlier, messages)
        episode.messages[len(earlier) :] = seen
        return token_ids

    def _tool_messages(
        self, episode: Episode, results: Sequence[ToolResult]
    ) -> list[dict[str, Any]]:
        """Return a message for each call of a turn, in order."""
        remaining = list(results)
        messages = []
        for call in episode.calls:
            if isinstance(call, BadCall):
                episode.errors += 1
                content = str({"error": f"The call cannot be read: {call.reason}"})
                messages.append({"role": "tool", "name": "", "content": content})
            else:
                result = remaining.pop(0)
                message = _message("tool", result.content, result.images)
                messages.append({**message, "name": result.name})
        return messages

    def _encode_observation(
        self, episode: Episode, earlier: list[Message], messages: list[Message]
    ) -> tuple[list[int] | History | None, list[Message]]:
        """Return the ids of an observation, and its messages, which may have been cut.

        The ids are None if the observation ends the episode by a fault.
        """
        limit = self.environment.max_observation_tokens
        # Nothing is cut beside images: half of an observation might stand for another one.
        refuses_long = self.environment.refuses_long or any(
            IMAGES in message for message in messages
        )
        if not refuses_long:
            messages = [_bounded(message, MOST_CHARACTERS * limit) for message in messages]
        seen = messages
        # Messages about bad calls are ours, and count as short.
        limit += sum(
            len(self.tokenizer.encode(message["content"]))
            for message in messages
            if _is_ours(message)
        )
        try:
            token_ids, history = self._written(episode, earlier, seen)
            # Texts have other ids together than apart, so that the second cut may be too long, too.
            excess = 0
            while len(token_ids) > limit and not refuses_long:
                excess += len(token_ids) - limit
                shortened = self._shortened(messages, excess)
                if shortened == seen:
                    break
                seen = shortened
                token_ids, history = self._written(episode, earlier, seen)
        except InputError as error:
            episode.fault = f"an observation cannot be written: {error.what}"
            self._begin_reward(episode)
            return None, messages
        if len(token_ids) > limit:
            episode.fault = f"an observation has {len(token_ids)} tokens, and {limit} are allowed"
            self._begin_reward(episode)
            return None, messages
        episode.observation_tokens += len(token_ids)
        episode.images += [image for message in seen for image in message.get(IMAGES, ())]
        return token_ids if history is None else History(history), seen

    def _written(
        self, episode: Episode, earlier: list[Message], messages: list[Message]
    ) -> tuple[list[int], list[int] | None]:
        """Return the ids of an observation, and those of the whole text if it is rewritten."""
        shown = [*sources_of(episode.row), *episode.images]
        added = [image for message in messages for image in message.get(IMAGES, ())]
        messages = [_without(message, IMAGES) for message in messages]
        history = None
        if not isinstance(episode.prompt, str):
            conversation = [*episode.prompt, *(_without(message, IMAGES) for message in earlier)]
            history = self.tokenizer.encode_rewritten(conversation, messages, episode.tools)
        if not episode.is_chat and not episode.is_game:
            messages = [
                {**message, "content": tool_calls.RESULT.format(message["content"])}
                for message in messages
            ]
        encode = self.tokenizer.encode_observation
        if history is None:
            token_ids = encode(messages, episode.ended, episode.is_chat)
            return self._placed(token_ids, added), None
        history = self._placed(history, [*shown, *added])
        # Only its length is asked for, and an image may be its end.
        return self._placed([*encode(messages, True, is_chat=False), 0], added)[:-1], history

    def _placed(self, token_ids: list[int], images: Sequence[Any]) -> list[int]:
        """Return ids with those of images. Raises InputError if the images cannot be read."""
        if self.image_table is not None:
            return self.image_table.place(token_ids, images)
        return self.tokenizer.with_images({"images": list(images)}, token_ids).ids

    def _shortened(self, messages: list[Message], excess: int) -> list[Message]:
        """Return the messages with about `excess` tokens less: the longest ones lose most."""
        ids = [
            [] if _is_ours(message) else self.tokenizer.encode(message["content"])
            for message in messages
        ]
        excess += len(self.tokenizer.encode(CUT)) * len(messages)
        longest = max(map(len, ids), default=0)

        def left_out(most: int) -> int:
            return sum(max(len(part) - most, 0) for part in ids)

        # The largest length of a content such that enough is left out.
        cut = bisect.bisect_left(
            range(longest), excess, key=lambda fewer: left_out(longest - fewer)
        )
        most = longest - cut
        return [
            {**message, "content": self._cut(part, most)} if len(part) > most else message
            for message, part in zip(messages, ids, strict=True)
        ]

    def _cut(self, token_ids: list[int], length: int) -> str:
        """Return the text of the first tokens, and the mark."""
        # The last token may be a part of a character.
        return self.tokenizer.decode(token_ids[:length]).rstrip("\ufffd") + CUT

    def _first_prompt(
        self, episode: Episode, text: str | None
    ) -> tuple[str | list[Message], list[int], str | None, str]:
        """Return an episode's prompt with the text that `reset` returned, its ids, the format of
        its calls, and a fault."""
        fault = ""
        prompt = episode.prompt
        token_ids = None
        if text is not None:
            prompt = _with_text(prompt, text)
            try:
                token_ids = self._encode_prompt(episode, prompt)
            except InputError as error:
                fault = f"the text that `reset` returned: {error.what}"
                prompt = episode.prompt
        if token_ids is None:
            token_ids = self._encode_prompt(episode, prompt)
        call_format = None
        if episode.is_chat and episode.tools:
            try:
                call_format = self.tokenizer.tool_format(token_ids)
            except InputError as error:
                fault = fault or f"{error.what}: {error.why}"
        return prompt, token_ids, call_format, fault

    def _encode_prompt(self, episode: Episode, prompt: str | list[Message]) -> list[int]:
        """Return the ids of a prompt, with the tools that it shows."""
        if not prompt:
            # Only where `reset` should have given the prompt, and gave none.
            return [*self.tokenizer.prefix_ids] or [self.tokenizer.eos_ids[0]]
        row = {**episode.row, "prompt": prompt}
        if episode.tools:
            row["tools"] = episode.tools
        token_ids = self.tokenizer.encode_prompt(prompt, row.get("tools"))
        token_ids = self._placed(token_ids, [*sources_of(row), *episode.images])
        prompts.require_length(row, token_ids, self.max_prompt_tokens)
        return token_ids


def _message(role: str, content: str, images: Sequence[bytes]) -> Message:
    """Return a message, with images if there are any."""
    if not images:
        return {"role": role, "content": content.replace(MARK, "\ufffd")}
    return {"role": role, "content": content, IMAGES: list(images)}


def _without(message: Message, key: str) -> Message:
    return {name: value for name, value in message.items() if name != key}


def without_images(message: Message) -> Message:
    """Return a message as people and rewards read it."""
    if IMAGES not in message:
        return message
    return {**_without(message, IMAGES), "content": message["content"].replace(MARK, "<image>")}


def _bounded(message: Message, characters: int) -> Message:
    """Return a message with at most so many characters, so that encoding it takes little time."""
    content = message["content"]
    if len(content) <= characters:
        return message
    return {**message, "content": content[:characters] + CUT}


def _is_ours(message: Message) -> bool:
    """Return True for the message about a call that cannot be read: it names no tool."""
    return message.get("name") == ""


def _reply(episode: Episode) -> Reply:
    """Return the answer that an episode waits for."""
    assert episode.pending is not None
    reply = episode.pending.result()
    episode.has_waited_for(episode.waits_for)
    episode.pending = None
    episode.waits_for = ""
    return reply


def _with_text(prompt: str | list[Message], text: str) -> str | list[Message]:
    """Return a prompt with a text after it, or after its last message."""
    if isinstance(prompt, str):
        return prompt + text
    *earlier, last = prompt
    content = last.get("content") or ""
    if isinstance(content, list):
        return [*earlier, {**last, "content": [*content, {"type": "text", "text": text}]}]
    return [*earlier, {**last, "content": content + text}]


def _seed(seed: int, step: int, group_id: int) -> int:
    """Return the seed of a group's episodes, below 2**31."""
    return zlib.crc32(f"{seed} {step} {group_id}".encode()) & 0x7FFFFFFF


def require_fit(
    tokenizer: Tokenizer, pool: EnvironmentPool, is_chat: bool, prompt: Any = None
) -> None:
    """Raise InputError if the tokenizer cannot write what environments answer, or read its calls.

    Call this before a device is claimed. `is_chat` says whether prompts are conversations, and
    `prompt` is the first of them, which may explain how tools are called. Without it, what `reset`
    returns may do so.
    """
    if not is_chat:
        return
    for description in pool.descriptions.values():
        role = "user" if description.form == "game" else "tool"
        messages = [{"role": role, "name": "tool", "content": "answer"}]
        if tokenizer.encode_rewritten(QUESTION, messages, description.tools) is None:
            tokenizer.encode_observation(messages, True)
        if not description.tools:
            continue
        tokenizer.require_readable_calls()
        if prompt:
            messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
            tokenizer.tool_format(tokenizer.encode_prompt(messages, description.tools))


def require_values(pool: EnvironmentPool, rows: Sequence[Row]) -> None:
    """Raise InputError if rows have values with which their environment takes no episode."""
    refused = [
        (number, column, row[column], why)
        for number, row in enumerate(rows)
        for column, known in pool.description(row).row_values.items()
        if column in row and (why := known.get(str(row[column]), "it knows no such value"))
    ]
    if refused:
        number, column, value, why = refused[0]
        raise InputError(
            f"an environment takes no episode of {len(refused)} rows, the first being row "
            f"{number}, whose `{column}` is {value!r}",
            where="--environment, --data.path",
            why=why,
            fix="leave these rows out",
        )
