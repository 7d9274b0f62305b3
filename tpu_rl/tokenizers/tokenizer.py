"""A tokenizer, whatever library is behind it.

Control tokens. A tokenizer's special tokens (end of sequence, turn markers) steer a model, so text
that merely spells one must not become one: `encode` and the contents of chat messages yield
ordinary tokens for a literal "<eos>". Only a chat template, or `encode(text, special=True)`, writes
control tokens.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from tpu_rl.errors import InputError
from tpu_rl.tokenizers import (
    chat_templates,
    conversations,
    end_of_sequence,
    images,
    span_tokens,
    tool_calls,
)
from tpu_rl.tokenizers.conversations import Conversation, Message, Tools, Turn
from tpu_rl.tokenizers.images import MARK, ImageReader

AssistantTurns = Literal["all", "last"]


class Backend(Protocol):
    """The part of a tokenizer library that `Tokenizer` uses."""

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of ordinary text."""
        ...

    def encode_control(self, text: str) -> list[int] | None:
        """Return the ids of text in which control-token literals become control tokens.

        Returns None if the library cannot do this.
        """
        ...

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, control tokens included."""
        ...

    def parse_response(self, text: str, prefix: str, tools: list[Any]) -> dict[str, Any] | None:
        """Return the message that the model wrote after a prefix, as the tokenizer's own files
        describe it. Returns None if they do not, or if it cannot be read."""
        ...

    @property
    def special_texts(self) -> dict[str, Any]:
        """Texts of special tokens, by the names that chat templates use."""
        ...

    def save(self, directory: Path) -> None:
        """Write the library's own files."""
        ...

    def with_template(self, template: str) -> Backend:
        """Return the backend with another chat template, which `save` writes."""
        ...


@dataclass(frozen=True)
class ChatSettings:
    """How texts become conversations, and which parts of conversations are learned."""

    wraps_prompts: bool = False
    """Make a plain text prompt the user's message of a conversation."""
    system: str | None = None
    """A system message that begins every conversation that has none."""
    assistant_turns: AssistantTurns = "all"
    """The messages of the assistant to learn from in a demonstration."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Values that the chat template reads."""


class Demonstration(NamedTuple):
    """A conversation to imitate."""

    ids: list[int]
    weights: list[float]
    """The weight of each id; 0 if it is not learned. The ids of the assistant's messages are
    learned, the ends of its turns included."""

    @property
    def learned(self) -> list[bool]:
        """True for each id that is learned."""
        return [weight > 0 for weight in self.weights]


@dataclass(frozen=True)
class Tokenizer:
    """Text to ids and back, the same for every kind of tokenizer. See `load` and `characters`."""

    backend: Backend
    eos_ids: tuple[int, ...]
    """Ids that end a completion. Demonstrations end with the first one."""
    bos_id: int | None
    pad_id: int
    """The padding id. If the tokenizer has none, it is the first end-of-sequence id: padding is
    masked everywhere."""
    vocab_size: int
    """One more than the largest id. A model's vocabulary may be padded beyond it."""
    prefix_ids: tuple[int, ...]
    """Ids before a plain text: usually the beginning-of-sequence id, or none."""
    control: dict[str, int]
    """Literal -> id of every control token. The unknown token is not one of them, because ordinary
    text may contain unknown characters."""
    unknown_id: int | None = None
    """The id of text that has no token, unless it also ends a completion."""
    chat_template: str | None = None
    tool_template: str | None = None
    """The template of conversations with tools, if the tokenizer has another one for them."""
    chat: ChatSettings = ChatSettings()
    images: ImageReader | None = None
    """The images of a model that reads them. Prompts and demonstrations then have their ids."""

    @property
    def has_chat_template(self) -> bool:
        """True if the tokenizer can render conversations."""
        return self.chat_template is not None

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Return the ids of a text, with nothing added.

        Control-token literals become control tokens only if `special` is True. Raises InputError if
        the text cannot be written in UTF-8.
        """
        _require_encodable(text)
        if not special:
            return self._encode_text(text)
        ids = self.backend.encode_control(text)
        return self._encode_marked(text, mark=None) if ids is None else ids

    def encode_continuation(self, text: str) -> list[int]:
        """Return the ids of a text that continues another one, which has ids of its own.

        Sentencepiece writes a space before a text that stands alone. A continuation has none.
        Raises InputError if the text cannot be written in UTF-8.
        """
        alone = self.encode(text)
        if not text or not self._adds_space:
            return alone
        return self._encode_behind(("\n", "a", "."), text, alone)

    def _encode_behind(self, anchors: Sequence[str], text: str, alone: list[int]) -> list[int]:
        """Return the ids of a text behind one of some texts, or `alone` if none has ids apart."""
        for anchor in anchors:
            before = self._encode_text(anchor)
            whole = self._encode_text(anchor + text)
            if whole[: len(before)] == before:
                return whole[len(before) :]
        return alone

    @functools.cached_property
    def _adds_space(self) -> bool:
        """True if a text has other ids at the start than after another text."""
        before = self._encode_text("\n")
        return self._encode_text("\na") != [*before, *self._encode_text("a")]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Return the text of ids, without control tokens unless `skip_special` is False.

        Raises ValueError for an unknown id.
        """
        ids = [int(i) for i in ids]
        if self.images is not None:
            ids = self.images.collapse(ids)
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"token id {i} is not one of the tokenizer's {self.vocab_size}")
        if skip_special:
            control = frozenset(self.control.values())
            ids = [i for i in ids if i not in control]
        return self.backend.decode(ids)

    def decode_answer(self, prompt: str | list[Message], ids: Sequence[int]) -> str:
        """Return the text of a sampled answer to a prompt, as rewards judge it.

        It begins with the thought that the generation prompt opened, so that a reward of the format
        sees the whole of it.
        """
        is_chat = not isinstance(prompt, str) or self.wraps(prompt)
        return (self.thought_opening if is_chat else "") + self.decode(ids)

    def render(
        self,
        messages: list[Message],
        add_generation_prompt: bool = True,
        tools: Tools | None = None,
    ) -> list[int]:
        """Return the ids of a conversation, by the chat template.

        Raises InputError if there is no template, or it fails or does not end.
        """
        conversation = self._conversation(messages, tools)
        return self._encode_rendered(conversation.text(add_generation_prompt), conversation.mark)

    def render_text(self, messages: list[Message], prefill: str = "") -> str:
        """Return the text of a conversation up to the assistant's next turn, by the chat template.

        Control tokens are literals, as `encode(text, special=True)` reads them. Those that a
        message spells cannot be told apart.

        Args:
            prefill: what the assistant's next turn begins with.

        Raises:
            InputError: if there is no template, or it fails or does not end.
        """
        conversation = self._conversation(messages, None)
        return conversation.text(True).replace(conversation.mark or "\0", "") + prefill

    def encode_prompt(self, prompt: str | list[Message], tools: Tools | None = None) -> list[int]:
        """Return the ids that a completion continues.

        A conversation is rendered by the chat template. A text follows `prefix_ids`, or is the
        user's message of a conversation (`wraps`). An image is one token (see `with_images`).
        Raises InputError if a conversation cannot be rendered, or ends with the assistant's
        message.
        """
        if isinstance(prompt, str):
            if not self.wraps(prompt):
                self._refuse_system()
                return [*self.prefix_ids, *self._encode_with_images(prompt)]
            prompt = conversations.as_messages(prompt, "user")
        if prompt and prompt[-1].get("role") == "assistant":
            raise InputError(
                "the prompt's last message is the assistant's",
                where=f"message {len(prompt)} of the prompt",
                why="the model is to write the assistant's next turn",
                fix="move that message to the column `completion`",
            )
        return self.render(prompt, tools=tools)

    def encode_row(self, row: Mapping[str, Any]) -> images.TextWithImages:
        """Return the prompt of a data row with its images. Raises InputError as `encode_prompt` and
        `with_images`."""
        return self.with_images(row, self.encode_prompt(row["prompt"], row.get("tools")))

    def with_images(
        self, row: Mapping[str, Any], ids: Sequence[int], weights: Sequence[float] | None = None
    ) -> images.TextWithImages:
        """Return the ids of a data row's text with those of its images, and the images.

        Args:
            row: the row; its column `images` has the files.
            ids: the ids of its text, in which each image is one token.
            weights: what each of the ids counts in training.

        Raises:
            InputError: if the model reads no images, one cannot be read, or the text has another
                number of places for them.
        """
        ids = list(ids)
        known_weights = [0.0] * len(ids) if weights is None else list(weights)
        sources = self._placed_images(row, ids)
        if self.images is None or not sources:
            return images.TextWithImages(ids, known_weights, None)
        pieces, layouts = self.images.read(sources)
        expanded = self.images.expand(
            ids, known_weights, layouts, functools.partial(self.encode, special=True)
        )
        return images.TextWithImages(*expanded, pieces)

    def row_length(self, row: Mapping[str, Any]) -> int:
        """Return the number of tokens of a data row's prompt, those of its images by their sizes.

        Raises:
            InputError: as `encode_row`. Pixels are not read.
        """
        ids = self.encode_prompt(row["prompt"], row.get("tools"))
        sources = self._placed_images(row, ids)
        if self.images is None or not sources:
            return len(ids)
        layouts = self.images.layouts(sources)
        weights = [0.0] * len(ids)
        return len(
            self.images.expand(ids, weights, layouts, functools.partial(self.encode, special=True))[
                0
            ]
        )

    def _placed_images(self, row: Mapping[str, Any], ids: Sequence[int]) -> list[Any]:
        """Return the images of a row, for each of which its text has a place. Raises InputError."""
        sources = images.sources_of(row)
        places = 0 if self.images is None else list(ids).count(self.images.token_id)
        if not sources and not places:
            return []
        if self.images is None:
            raise InputError(
                f"the row has {len(sources)} images, and the model reads texts only",
                where="column `images`",
                why="a prompt means something else without its images",
                fix="use a model that reads images (Gemma 3 or 4 with --model.images, LLaVA), or "
                "drop the column",
            )
        if len(sources) != places:
            raise InputError(
                f"the row has {len(sources)} images, and its text {places} places for them",
                where=f"column `images`; {self.images.literal}",
                why="the chat template leaves images out, one stands inside of a plain answer, "
                "or the text has stray marks (U+FFFC)",
                fix="use the model's own chat template, and one place for each image",
            )
        return sources

    def _encode_with_images(self, text: str, follows_control: bool = False) -> list[int]:
        """Return the ids of a plain text in which `images.MARK` stands for images."""
        if self.images is None or MARK not in text:
            return self._encode_after(text, True) if follows_control else self.encode(text)
        ids: list[int] = []
        gap = self.images.tower.gap
        for number, piece in enumerate(text.replace(MARK, f"{gap}{MARK}{gap}").split(MARK)):
            if number:
                ids += self.encode(self.images.literal, special=True)
            ids += self._encode_after(piece, follows_control or number > 0)
        return ids

    def wraps(self, prompt: Any) -> bool:
        """Return True if a prompt is a text that becomes the user's message of a conversation.

        The prompt of a text that is learned as a whole does not: it is empty, or images.
        """
        return self.chat.wraps_prompts and isinstance(prompt, str) and bool(prompt.strip(MARK))

    def encode_demonstration(
        self, messages: list[Message], num_given: int = 0, tools: Tools | None = None
    ) -> Demonstration:
        """Return the ids of a conversation up to its last learned token, and which are learned.

        Learned are the messages of the assistant, or the last one (`ChatSettings.assistant_turns`),
        each with the control token that ends it. They are what the chat template marks with
        {% generation %}. Without such marks they are found by difference: a turn is what rendering
        adds to the prompt that ends where the turn begins. A message counts as its `weight` says,
        by default 1; one with weight 0 is not learned.

        Args:
            num_given: the number of messages that belong to the prompt, which is not learned.

        Raises:
            InputError: if there is nothing to learn, or the template rewrites earlier turns.
        """
        answers = [
            index
            for index, message in enumerate(messages)
            if index >= max(num_given, 1)
            and message.get("role") == "assistant"
            and message_weight(message) > 0
        ]
        if not answers:
            raise InputError(
                "a conversation has no answer by the assistant to learn from",
                where=conversations.shown(messages),
                why="only messages with the role `assistant`, after a prompt, are trained on",
                fix="drop the row",
            )
        if self.chat.assistant_turns == "last":
            answers = answers[-1:]
        last = answers[-1]
        learned = [messages[index] for index in answers]
        conversation = self._conversation(messages[: last + 1], tools)
        num_added = len(conversation.messages) - (last + 1)
        answers = [index + num_added for index in answers]
        ends = self._end_literals
        if chat_templates.marks_assistant(conversation.template):
            text, turns = conversations.turns_by_marks(conversation, answers, ends)
            # Marked templates may drop what earlier answers thought.
            *earlier, final = [conversation.messages[index] for index in answers]
            calls = [{"tool_calls": message.get("tool_calls")} for message in earlier]
            self._require_shown([*calls, final], [text] * len(answers))
            # The template also marks messages in between that are not learned.
            first = answers[0] - num_added
            learned = [m for m in messages[first : last + 1] if m["role"] == "assistant"]
            if len(turns) != len(learned):
                learned = self._same_weight(messages, learned) * len(turns)
            return self._encode_turns(text, turns, learned, conversation.mark)
        text, turns, reason = conversations.turns_by_difference(conversation, answers, ends)
        if len(answers) == 1 and conversation.messages[answers[0]].keys() <= {"role", "content"}:
            answer = text[turns[0].start : turns[0].stop] if not reason else ""
            if conversations.unshown(conversation.messages[answers[0]], answer) or reason:
                # Nothing before the answer is learned, so the prompt as it is sampled from serves.
                # Some templates rewrite the end of the conversation, drop what the answer thought,
                # or write no end.
                return self._encode_answer(conversation, answers[0], learned[0])
        if not reason:
            shown = [text[turn.start : turn.stop] for turn in turns]
            self._require_shown([conversation.messages[index] for index in answers], shown)
            return self._encode_turns(text, turns, learned, conversation.mark)
        raise InputError(
            "the assistant's messages cannot be found in the rendered conversation",
            where=f"chat template; {conversations.shown(messages)}",
            why=reason,
            fix=self._fix_turns([conversation.messages[index] for index in answers]),
        )

    def _fix_turns(self, answers: Sequence[Message]) -> str:
        """Return a remedy for answers that cannot be found in a rendered conversation."""
        template = "a template with {% generation %} blocks: --tokenizer.chat-template FILE"
        if len(answers) > 1:
            return f"--data.assistant-turns last, or {template}"
        others = sorted(answers[0].keys() - {"role", "content"})
        if not others:
            return template
        thoughts = (
            "thoughts as <think>...</think>" if set(others) & {*THOUGHT_KEYS} else "all of it"
        )
        return f"write `{'` and `'.join(others)}` into `content` ({thoughts}), or give {template}"

    def _encode_answer(
        self, conversation: Conversation, index: int, message: Message
    ) -> Demonstration:
        """Return the prompt of an answer, as it is sampled from, and the answer as it is.

        A thought that the prompt opens is not opened again. An answer without a thought closes it.
        """
        mark = conversation.mark
        prompt = conversation.render(index, True).text
        content = _as_text(conversation.messages[index].get("content"))
        opening = self.thought_opening
        if opening and mark is not None:
            content = content.replace(f"{mark}{THINK}{mark}", THINK)
            content = content.replace(f"{mark}{END_OF_THINK}{mark}", END_OF_THINK)
        if opening and content.lstrip().startswith(THINK):
            content = content.lstrip().removeprefix(THINK)
            content = content.removeprefix(opening.removeprefix(THINK))
        elif opening and END_OF_THINK not in content:
            content = f"\n{END_OF_THINK}\n\n{content}"
        prompt_ids = self._encode_rendered(prompt, mark)
        if opening:
            ids = self._encode_marked(content, mark, follows=True)
        else:
            ids = self._encode_with_images(content.replace(mark, "") if mark else content)
        weights = [0.0] * len(prompt_ids)
        weights += self._turn_weights(prompt_ids + ids, len(prompt_ids), content, mark, message)
        weights.append(message_weight(message))
        return Demonstration([*prompt_ids, *ids, self.turn_end], weights)

    def _require_shown(self, answers: Sequence[Message], renderings: Sequence[str]) -> None:
        """Raise InputError if a message to learn has a text that the template does not show."""
        for message, rendering in zip(answers, renderings, strict=True):
            keys = [
                key
                for key in conversations.unshown(message, rendering)
                if key in CONTENT_KEYS or not conversations.is_label(message[key])
            ]
            if keys:
                raise InputError(
                    f"the chat template does not show `{'` and `'.join(keys)}` of an answer to "
                    "learn",
                    where=conversations.shown([message]),
                    why="the model would learn a turn without it",
                    fix="give a template that shows it (--tokenizer.chat-template FILE), write it "
                    "into `content`, or remove it from the messages",
                )

    def unshown(self, messages: list[Message], tools: Tools | None = None) -> list[str]:
        """Name the parts of a conversation that the template does not show: `KEY` or `tools`.

        A key of a message is not shown if one of its texts does not occur in the rendering. A key
        with a number or a truth value is not shown if its name does not occur in the template.
        Raises InputError if the conversation cannot be rendered.
        """
        conversation = self._conversation(messages, tools)
        is_answered = conversation.messages[-1]["role"] == "assistant"
        text = conversation.text(not is_answered)
        identifiers = set(re.findall(r"[A-Za-z_]\w*", conversation.template))
        names: dict[str, None] = {}
        for message in conversation.messages:
            for key in conversations.unshown(message, text):
                answer = _as_text(message.get("content")).rpartition(END_OF_THINK)[2]
                is_thought = key == "content" and conversations.occurs(answer, text)
                if is_thought and message is conversation.messages[-1]:
                    # `_encode_answer` takes the last answer as it is.
                    continue
                names[f"thoughts in `{key}`" if is_thought else f"`{key}`"] = None
            names |= {
                f"`{key}`": None
                for key, value in message.items()
                if not isinstance(value, str | list | dict | None) and key not in identifiers
            }
        described = [tool.get("function", tool) for tool in conversation.tools or []]
        texts = [str(tool.get(key) or "") for tool in described for key in ("name", "description")]
        if not all(conversations.occurs(shown, text) for shown in texts):
            names["`tools`"] = None
        return [*names]

    @functools.cached_property
    def thought_opening(self) -> str:
        """The end of the generation prompt from `<think>` on; "" unless it opens a thought."""
        if THINK not in (self.chat_template or ""):
            return ""
        prompt = self._conversation(TURN[:1], None).text(True)
        _, opening, after = prompt.rpartition(THINK)
        return THINK + after if opening and not after.strip() else ""

    @functools.cached_property
    def markers(self) -> list[str]:
        """Literals of the control tokens that begin and end texts and turns.

        They are those that the template writes around contents, and all that are not written like
        tags: texts may have tags that are control tokens, such as <think>.
        """
        written = {*self.eos_ids, *self.prefix_ids}
        with contextlib.suppress(InputError):
            written |= {*self.render(TURN)} if self.chat_template is not None else set()
        return [
            text
            for text, token_id in self.control.items()
            if token_id in written or not re.fullmatch(r"</?\w+>", text)
        ]

    @functools.cached_property
    def turn_end(self) -> int:
        """The id that ends a turn: the control token that the template writes after an answer.

        It is the first end-of-sequence id if there is no template, or if it writes none.
        """
        text = self.text_after_turn
        match = self._pattern.match(text.lstrip())
        return self.control[match[0]] if match else self.eos_ids[0]

    @property
    def ends_turns(self) -> bool:
        """True if the template writes a control token after an answer."""
        return self._pattern.match(self.text_after_turn.lstrip()) is not None

    @functools.cached_property
    def text_after_turn(self) -> str:
        """The text that the template writes after the last answer of a conversation."""
        if self.chat_template is None:
            return ""
        try:
            text = self._conversation(TURN, None).text(False)
        except InputError:
            return ""
        return text.partition(TURN[-1]["content"])[2]

    def _same_weight(self, messages: list[Message], learned: list[Message]) -> list[Message]:
        """Return a message with the one weight of all turns, whose messages are not known."""
        weights = {message_weight(message) for message in learned}
        if len(weights) == 1 and not any(m.get(conversations.SPAN_WEIGHTS) for m in learned):
            return [{"weight": weight} for weight in weights]
        raise InputError(
            "the weights of messages do not fit what the chat template marks",
            where=conversations.shown(messages),
            why="its {% generation %} blocks are not one for each message of the assistant",
            fix="leave weights out, or correct the template (--tokenizer.chat-template)",
        )

    def _conversation(
        self, messages: list[Message], tools: Tools | None, rewrite: bool = True
    ) -> Conversation:
        """Return the conversation, with the system message of the settings if it has none.

        With `rewrite`, the arguments of calls are given as the template wants them.
        """
        if self.chat_template is None:
            raise InputError(
                "the tokenizer has no chat template, but the data hold messages",
                where="--model.path, --data.path",
                why="only a chat template turns messages into one text",
                fix="use an instruction-tuned checkpoint, give --tokenizer.chat-template FILE, "
                "or give `prompt` as plain text",
            )
        conversations.require_messages(messages)
        # The template does not see weights.
        messages = [
            {
                key: value
                for key, value in message.items()
                if key not in ("weight", conversations.SPAN_WEIGHTS)
            }
            for message in messages
        ]
        if self.images is not None and self._reads_parts:
            messages = [_in_parts(message) for message in messages]
        if rewrite and any(message.get("tool_calls") for message in messages):
            messages = self._with_arguments(messages)
        if self.chat.system is not None and messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": self.chat.system}, *messages]
        parsed_tools = conversations.parse_tools(tools)
        contents = [*conversations.strings(messages), *conversations.strings(parsed_tools, True)]
        _require_encodable("".join(contents))
        variables = {**self.backend.special_texts, **self.chat.template_kwargs}
        template = (self.tool_template if parsed_tools else None) or self.chat_template
        return conversations.hide(template, messages, parsed_tools, variables, self.control)

    @functools.cached_property
    def _reads_parts(self) -> bool:
        """True if the chat template wants contents as lists of parts, as LLaVA's does."""
        return (
            re.search(r"""\btype['"\]]*\s*(,\s*['"]equalto|==)""", self.chat_template or "")
            is not None
        )

    def _with_arguments(self, messages: list[Message]) -> list[Message]:
        """Return messages whose calls have arguments as JSON text, if the template wants that."""
        if not self._call_form.as_text:
            return messages
        changed = copy.deepcopy(messages)
        for message in changed:
            for call in message.get("tool_calls") or []:
                function = call.get("function", call) if isinstance(call, dict) else {}
                if isinstance(function.get("arguments"), dict):
                    function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        return changed

    def _refuse_system(self) -> None:
        """Raise InputError if a plain text should follow a system message."""
        if self.chat.system is not None:
            raise InputError(
                "a plain text has no system message",
                where="--data.system",
                why="the prompts are texts that no chat template turns into conversations",
                fix="leave it out, or use a model with a chat template and --data.chat auto",
            )

    def _encode_rendered(self, text: str, mark: str | None) -> list[int]:
        """Return the ids of a rendered conversation, or of its beginning."""
        text = self._with_image_literals(text)
        if mark is None or mark not in text:
            return self.encode(text, special=True)
        return self._encode_marked(text, mark)

    def _encode_turns(
        self, text: str, turns: Sequence[Turn], learned: Sequence[Message], mark: str | None
    ) -> Demonstration:
        """Return the ids of a rendered conversation, whose turns these messages are.

        A turn is encoded apart from the prompt before it, as the sampler writes it.
        """
        ids: list[int] = []
        weights: list[float] = []

        def add(piece: str, weight: float, end_weight: float = 0.0) -> None:
            is_control = self._pattern.match(piece) is not None
            if not ids or (is_control and (mark is None or mark not in piece)):
                piece_ids = self._encode_rendered(piece, mark)
            else:
                piece_ids = self._encode_marked(piece, mark, follows=True)
            ids.extend(piece_ids)
            weights.extend([weight] * len(piece_ids))
            if end_weight:
                weights[len(ids) - len(piece_ids)] = end_weight

        position = 0
        end_weight = 0.0
        for turn, message in zip(turns, learned, strict=True):
            weight = message_weight(message)
            add(text[position : turn.start], 0.0, end_weight)
            start = len(ids)
            answer = text[turn.start : turn.stop]
            add(answer, weight)
            weights[start:] = self._turn_weights(ids, start, answer, mark, message)
            # The end is encoded with what follows it: some tokenizers strip spaces after it.
            position = turn.stop
            end_weight = weight if turn.end > turn.stop else 0.0
        last_weight = message_weight(learned[-1])
        add(text[position:], last_weight)
        if not end_weight:
            ids.append(self.eos_ids[0])
            weights.append(last_weight)
        return Demonstration(ids, weights)

    def _turn_weights(
        self, ids: Sequence[int], start: int, turn: str, mark: str | None, message: Message
    ) -> list[float]:
        """Return the weights of ids[start:], a turn that renders a message."""
        turn = turn.replace(mark, "") if mark else turn
        spans = conversations.spans_in_turn(message, turn)
        weights = self.weights_of_spans(ids, start, turn, spans)
        return [message_weight(message) * weight for weight in weights]

    def weights_of_spans(
        self, ids: Sequence[int], start: int, text: str, spans: Sequence[Mapping[str, Any]]
    ) -> list[float]:
        """Return the weight of each of ids[start:], which is 1 outside of the spans.

        A token that writes characters of several spans has the smallest of their weights.

        Args:
            ids: ids that end with those of the text.
            start: where these begin.
            spans: `start` and `end`, characters of the text in order, and `weight`.

        Raises:
            InputError: if the ids write another text, so that nobody knows which writes what.
        """
        decode = functools.partial(self.decode, skip_special=False)
        return span_tokens.weights(decode, ids, start, text, spans)

    # --- conversations of several turns ---

    def tool_format(self, prompt_ids: Sequence[int]) -> str:
        """Return the format in which the model calls tools after a chat prompt.

        It is the format that reads back a call that the chat template writes. If the template
        writes none, the prompt must explain a format, as SmolLM3's and Phi-4-mini's templates do.
        Raises InputError if no format reads what the template writes, or nothing tells the format.
        """
        self.require_readable_calls()
        form = self._call_form
        if form.format_name is not None:
            return form.format_name
        explained = tool_calls.explained_in(self.decode(prompt_ids, skip_special=False))
        if explained is None:
            raise InputError(
                "nothing tells the model how to call the tools",
                where="chat template, --data.system",
                why="the template writes no calls, and the prompt shows no form of them",
                fix="describe the tools and the form of a call, such as "
                '<tool_call>{"name": ..., "arguments": {...}}</tool_call>, in --data.system; or '
                + FIX_TEMPLATE,
            )
        return explained

    def require_readable_calls(self) -> None:
        """Raise InputError if the chat template writes calls, but no format reads them back."""
        form = self._call_form
        if form.written and form.format_name is None:
            raise InputError(
                "calls of tools cannot be read in the form in which the chat template writes them",
                where=f"chat template: {form.written[:200]!r}",
                why="no known format reads the same call back, so that no tool would ever be called"
                " as the model means it",
                fix=FIX_TEMPLATE,
            )

    def parse_turn(
        self,
        token_ids: Sequence[int],
        tools: tool_calls.Tools,
        is_chat: bool,
        format_name: str | None = None,
    ) -> tool_calls.ParsedTurn:
        """Return a turn that the model wrote, and the calls of tools in it.

        Args:
            token_ids: the turn, with its end.
            is_chat: whether the turn follows a chat template. Otherwise the plain protocol of
                `tool_calls` is read.
            format_name: the format of calls (`tool_format`). By default that of the chat template;
                nothing is read if it has none.
        """
        ids = list(token_ids)
        while ids and ids[-1] in self.eos_ids:
            ids.pop()
        # Some marks of calls are control tokens.
        text = self.decode(ids, skip_special=False)
        if not is_chat:
            turn = tool_calls.parse(text, "plain", tools)
        else:
            turn = self._parse_chat(text, tools, format_name or self._call_form.format_name)
        return turn if turn.calls else turn._replace(content=self.decode(ids))

    def _parse_chat(
        self, text: str, tools: tool_calls.Tools, format_name: str | None
    ) -> tool_calls.ParsedTurn:
        """Return a turn after a chat template: as the tokenizer's own files say, or in a format."""
        message = self.backend.parse_response(text, self._turn_prompt, [*tools])
        if message is not None:
            return tool_calls.from_message(message)
        if format_name is None:
            return tool_calls.ParsedTurn(text.strip(), [])
        in_thought = tool_calls.begins_thought(self._turn_prompt)
        return tool_calls.parse(text, format_name, tools, in_thought)

    @functools.cached_property
    def _call_form(self) -> _CallForm:
        """The form of calls in the chat template, found with a call of many types of values.

        Templates expect arguments as an object, or (DeepSeek V3) as its JSON text.
        """
        unread = _CallForm(None, False, "")
        for as_text in (False, True):
            arguments: Any = json.dumps(TRIED_ARGUMENTS) if as_text else TRIED_ARGUMENTS
            text = self._written_call(arguments)
            if TRIED_TOOL not in text:
                continue
            wanted = [tool_calls.ToolCall(TRIED_TOOL, TRIED_ARGUMENTS)]
            marked = tool_calls.formats_of(self.chat_template or "")
            for name in dict.fromkeys([*marked, *tool_calls.FORMATS]):
                if self._parse_chat(text, [TRIED_SCHEMA], name).calls == wanted:
                    return _CallForm(name, as_text, text)
            # Python's form of an object is no template's intention.
            if not unread.written or str(TRIED_ARGUMENTS) in unread.written:
                unread = _CallForm(None, as_text, text)
        return unread

    def _written_call(self, arguments: Any) -> str:
        """Render a turn with a call; return "" if the template refuses it."""
        call = {"name": TRIED_TOOL, "arguments": arguments}
        # Mistral's templates want ids of nine characters.
        calls = [{"id": "call00001", "type": "function", "function": call}]
        answer = {"role": "assistant", "content": "", "tool_calls": calls}
        try:
            conversation = self._conversation([TURN[0], answer], [TRIED_SCHEMA], rewrite=False)
            count = len(conversation.messages)
            before = conversation.render(count - 1, False).text
            prompt = conversation.render(count - 1, True).text
            whole = conversation.text(False)
        except InputError:
            return ""
        start = prompt if whole.startswith(prompt) else before
        written = whole.removeprefix(start)
        places = [written.rfind(end) for end in self._end_literals]
        return written[: max(places)] if max(places, default=-1) > 0 else written

    def encode_observation(
        self, messages: Sequence[Message], ended: bool, is_chat: bool = True
    ) -> list[int]:
        """Return the ids that follow the model's turn: messages, and the prompt of the next turn.

        With a chat template, they are what it writes after a turn of the assistant with some fixed
        content. So the model's own text is not needed, and how a template renders earlier turns
        once others follow does not matter. A message of a tool becomes the user's if the template
        has no such role.

        Args:
            messages: the messages, of the role "tool" or "user".
            ended: whether the model has written the token that ends its turn. Otherwise, as after
                a stop string, the ids begin with it.
            is_chat: whether there is a chat template. Without it the ids are those of the contents.

        Raises:
            InputError: if the template refuses the messages, or rewrites the assistant's turn.
        """
        if not is_chat:
            text = _joined(messages)
            _require_encodable(text)
            return self._encode_with_images(text, follows_control=True)
        # Mistral's templates want ids of nine characters.
        with_ids = [
            {**message, "tool_call_id": f"call{number:05d}"}
            for number, message in enumerate(messages)
        ]
        if any(message["role"] != "user" for message in messages):
            for tried in (list(messages), with_ids):
                with contextlib.suppress(InputError):
                    return self._encode_next_turn(tried, ended)
            messages = _as_user(messages)
        return self._encode_next_turn(list(messages), ended)

    def _encode_next_turn(self, messages: list[Message], ended: bool) -> list[int]:
        conversation = self._conversation([*TURN, *messages], None)
        _, answer, after = conversation.text(True).partition(TURN[-1]["content"])
        matches = conversation.pattern.finditer(after)
        end = next((match for match in matches if match[0] in self._end_literals), None)
        if not answer or end is None:
            raise InputError(
                "the chat template rewrites the assistant's turns",
                where="--tokenizer.chat-template",
                why="it does not write a turn as it is, and after it an end-of-sequence token",
                fix="use a template that does, or episodes of one turn",
            )
        start = end.end() if ended else end.start()
        return self._encode_marked(after[start:], conversation.mark, follows=True)

    def encode_rewritten(
        self, earlier: Sequence[Message], messages: Sequence[Message], tools: Tools | None = None
    ) -> list[int] | None:
        """Return the ids of a whole conversation if its new messages change what came before.

        Some templates drop what the model thought in earlier turns once the user speaks again. A
        template that does so with any turn has no fixed text between two turns, so that all of its
        conversations are rewritten. The ids end with the prompt of the next turn.

        Args:
            earlier: the conversation up to the assistant's last turn.
            messages: the messages that follow it.

        Returns:
            The ids, or None if the template only appends to what it wrote before, or writes no
            such conversation, or no end of turns.
        """
        try:
            conversation = self._conversation([*earlier, *messages], tools or None)
            count = len(conversation.messages)
            before = conversation.render(count - len(messages), False).text
            after = conversation.text(True)
        except InputError:
            # Some (gpt-oss) want a call before each message of a tool, and a call that cannot be
            # read is none. Those that only append do not need the earlier messages.
            is_tools = any(message["role"] != "user" for message in messages)
            if not is_tools or self._appends:
                return None
            return self.encode_rewritten(earlier, _as_user(messages), tools)
        has_end = any(end in before for end in self._end_literals)
        if not has_end or (after.startswith(before) and self._appends):
            return None
        return self._encode_rendered(after, conversation.mark)

    @functools.cached_property
    def _appends(self) -> bool:
        """False if no text that follows a turn can be told, as `encode_observation` needs it."""
        try:
            self._encode_next_turn([{"role": "user", "content": "a"}], True)
        except InputError:
            return False
        return True

    @functools.cached_property
    def _turn_prompt(self) -> str:
        """What the template writes before a turn of the assistant."""
        conversation = self._conversation(TURN[:1], None)
        return conversation.text(True).removeprefix(conversation.text(False))

    def save_pretrained(self, directory: str | Path) -> None:
        """Write files that `load`, and transformers or sentencepiece, can read.

        generation_config.json is one of them, because a tokenizer's own files can name one end
        only.
        """
        Path(directory).mkdir(parents=True, exist_ok=True)
        self.backend.save(Path(directory))
        if self.images is not None:
            self.images.save(Path(directory))
        first, *others = self.eos_ids
        eos = [first, *others] if others else first
        ids = {"bos_token_id": self.bos_id, "eos_token_id": eos, "pad_token_id": self.pad_id}
        text = json.dumps({name: i for name, i in ids.items() if i is not None}, indent=2)
        (Path(directory) / end_of_sequence.FILE).write_text(text + "\n", encoding="utf-8")

    def _encode_text(self, text: str) -> list[int]:
        """Return the ids of ordinary text, which are never control tokens."""
        control = frozenset(self.control.values())
        ids = self.backend.encode_text(text)
        if control.isdisjoint(ids):
            return ids
        # Some vocabularies (Unigram) have a control token's text as an ordinary piece. Break the
        # text after its first letter.
        starts = [match.start() + 1 for match in self._pattern.finditer(text)]
        pieces = [text[a:b] for a, b in zip([0, *starts], [*starts, len(text)], strict=True)]
        ids = [i for piece in pieces if piece for i in self.backend.encode_text(piece)]
        if not control.isdisjoint(ids):
            raise InputError(
                "the tokenizer writes control tokens for ordinary text",
                where=repr(text[:80]),
                why="the text would steer the model",
                fix="drop the row, or use another tokenizer",
            )
        return ids

    @functools.cached_property
    def _end_literals(self) -> frozenset[str]:
        """Literals of the control tokens that end a turn."""
        return frozenset(text for text, known in self.control.items() if known in self.eos_ids)

    @functools.cached_property
    def _pattern(self) -> re.Pattern[str]:
        """Matches a control-token literal."""
        return conversations.alternatives(self.control)

    def _encode_marked(self, text: str, mark: str | None, follows: bool = False) -> list[int]:
        """Return the ids of a text with its control tokens, except those between two marks.

        `follows` says that the text continues another one.
        """
        text = self._with_image_literals(text)
        pattern = conversations.alternatives(self.control, mark)
        ids: list[int] = []
        ordinary = ""
        end = 0
        for match in pattern.finditer(text):
            ordinary += text[end : match.start()]
            end = match.end()
            if mark is not None and match[0].startswith(mark):
                ordinary += match[0].strip(mark)
            else:
                ids += [*self._encode_after(ordinary, follows or bool(ids)), self.control[match[0]]]
                ordinary = ""
        ordinary += text[end:]
        return ids + self._encode_after(ordinary, follows or bool(ids))

    def _with_image_literals(self, text: str) -> str:
        """Return a rendered text with the token of images in place of `images.MARK`."""
        return text if self.images is None else self.images.rendered(text)

    def _encode_after(self, text: str, follows_control: bool) -> list[int]:
        """Return the ids of a text, which may follow a control token.

        Most tokenizers add no space of their own after a control token.
        """
        if not text:
            return []
        alone = self._encode_text(text)
        if not follows_control or not self._drops_space:
            return alone
        return self._encode_behind(("\n",), text, alone)

    @functools.cached_property
    def _drops_space(self) -> bool:
        """True if a text has other ids at the very start than after a control token.

        The reason is sentencepiece's leading space.
        """
        literal = next(iter(self.control))
        ids = self.backend.encode_control(literal + "a")
        return ids is not None and ids[1:] != self._encode_text("a")


THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking", "thought")
CONTENT_KEYS = ("content", "tool_calls", *THOUGHT_KEYS)
"""Keys of messages with what an author wrote, however short. Other keys may hold labels."""

THINK = "<think>"
END_OF_THINK = "</think>"

TURN: list[Message] = [
    {"role": "user", "content": "question"},
    {"role": "assistant", "content": "answer-of-the-assistant"},
]
"""A conversation whose last turn stands for any turn of the model."""


class _CallForm(NamedTuple):
    """The form in which a chat template writes calls of tools."""

    format_name: str | None
    """The format that reads them back; None if none does, or the template writes none."""
    as_text: bool
    """True if the template wants arguments as JSON text."""
    written: str
    """Its text for a call; "" if it writes none."""


FIX_TEMPLATE = (
    "give a template whose calls have one of the formats of the how-to writing_an_environment: "
    "--tokenizer.chat-template FILE"
)
TRIED_TOOL = "look_up"
TRIED_ARGUMENTS = {
    "text": 'a "b" <c>\né',
    "digits": "12",
    "count": 5,
    "share": 2.5,
    "flag": True,
    "items": ["x", 1],
    "nested": {"key": [False]},
}
"""The arguments of a call that a template must write such that it can be read back."""
TRIED_SCHEMA = {
    "type": "function",
    "function": {
        "name": TRIED_TOOL,
        "description": "Look something up.",
        "parameters": {
            "type": "object",
            "properties": {
                name: {"type": tool_calls.kind_of(value), "description": f"The {name}."}
                for name, value in TRIED_ARGUMENTS.items()
            },
            "required": list(TRIED_ARGUMENTS),
        },
    },
}
"""The tool that it calls."""


def _in_parts(message: Message) -> Message:
    """Return a message whose content is a list of texts and images."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    parts: list[dict[str, str]] = []
    for number, text in enumerate(content.split(MARK)):
        if number:
            parts.append({"type": "image"})
        if text:
            parts.append({"type": "text", "text": text})
    return message | {"content": parts}


def _as_text(content: Any) -> str:
    """Return the text of a content, in which `MARK` stands for an image; undo `_in_parts`."""
    if isinstance(content, list):
        return "".join(part.get("text", MARK) for part in content)
    return str(content or "")


def _as_user(messages: Sequence[Message]) -> list[Message]:
    """Return messages as one of the user."""
    return [{"role": "user", "content": _joined(messages)}]


def _joined(messages: Sequence[Message]) -> str:
    return "\n".join(str(message["content"]) for message in messages)


def message_weight(message: Message) -> float:
    """Return the weight of a message of the assistant in training."""
    weight = message.get("weight")
    return 1.0 if weight is None else float(weight)


def _require_encodable(text: str) -> None:
    """Raise InputError if the text cannot be written in UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"the text holds half of a surrogate pair, {text[error.start]!r}",
            where=f"character {error.start} of {text[max(error.start - 20, 0) : error.start]!r}...",
            why="such a character cannot be written in UTF-8",
            fix="repair the text: it was cut inside a character",
        ) from error
