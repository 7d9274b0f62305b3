"""Settings of a run's tokenizer: its chat template, and how texts become conversations."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tpu_rl.errors import InputError, did_you_mean, missing_file, refused
from tpu_rl.tokenizers.images import ImageReader, Pixels
from tpu_rl.tokenizers.tokenizer import AssistantTurns, ChatSettings, Tokenizer

if TYPE_CHECKING:
    from tpu_rl.models.vision.config import AnyVisionConfig

MAX_TEMPLATE_BYTES = 1_000_000
"""The largest chat template. Published ones have some kilobytes."""

_RESERVED = frozenset(
    {
        "messages",
        "conversations",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "return_assistant_tokens_mask",
        "tools",
        "documents",
    }
)
"""Names that the renderer sets itself."""


@dataclass(frozen=True)
class TokenizerConfig:
    """Settings of the chat template."""

    chat_template: str | None = None
    """A Jinja file that replaces the model's chat template. The trained model is saved with it."""
    template_kwargs: tuple[str, ...] = ()
    """Values that the chat template reads, as name=value: enable_thinking=false. Values are JSON;
    anything else is text."""


def configure(
    tokenizer: Tokenizer,
    config: TokenizerConfig,
    chat: Literal["auto", "always", "never"] = "never",
    system: str | None = None,
    assistant_turns: AssistantTurns = "all",
) -> Tokenizer:
    """Return the tokenizer with the settings of a run: the last three are those of its data.

    Raises InputError if the template's file is missing or broken, or a setting does not fit it.
    """
    if config.chat_template is not None:
        tokenizer = with_template(tokenizer, Path(config.chat_template).expanduser())
    template_kwargs = parse_template_kwargs(config.template_kwargs)
    _require_read(template_kwargs, tokenizer.chat_template)
    if chat == "always" and not tokenizer.has_chat_template:
        raise InputError(
            "the tokenizer has no chat template",
            where="--data.chat always",
            why="only a chat template turns a prompt into a conversation",
            fix="use an instruction-tuned checkpoint, or give --tokenizer.chat-template FILE",
        )
    settings = ChatSettings(
        wraps_prompts=chat != "never" and tokenizer.has_chat_template,
        system=system,
        assistant_turns=assistant_turns,
        template_kwargs=template_kwargs,
    )
    return with_turn_end(replace(tokenizer, chat=settings))


def with_images(
    tokenizer: Tokenizer,
    directory: Path,
    token_id: int,
    *,
    tower: AnyVisionConfig,
    first_id: int,
    folder: Path,
    around: tuple[int, int] | None = None,
    unsampled: tuple[int, ...] = (),
) -> Tokenizer:
    """Return the tokenizer of a model that reads images; see `ImageReader` for the arguments.

    `around` are the ids of tokens that stand before and behind an image in a text. Raises
    InputError if the tokenizer has no token that stands for images.
    """
    texts = {known: text for text, known in tokenizer.control.items()}
    missing = [known for known in (token_id, *(around or ())) if known not in texts]
    if missing:
        raise InputError(
            f"the tokenizer has no control token with the id {missing[0]}",
            where=f"image_token_index in config.json, tokenizer.json, {directory}",
            why="it stands for images in texts",
            fix="use the tokenizer that was published with the model",
        )
    before, after = (texts[known] for known in around) if around else ("", "")
    literal = f"{before}{texts[token_id]}{after}"
    written = {"all": literal, "before": before, "token": texts[token_id]}
    reader = ImageReader(
        str(directory),
        token_id,
        literal,
        first_id,
        tower,
        written=written[tower.written],
        folder=str(folder),
        unsampled=unsampled,
    )
    return replace(tokenizer, images=reader)


def with_pixels(tokenizer: Tokenizer, pixels: Pixels) -> Tokenizer:
    """Return the tokenizer of a model that reads images, with other sizes of images.

    Raises InputError if its image processor has no such setting, or it reads no images.
    """
    if pixels == (None, None):
        return tokenizer
    if tokenizer.images is None:
        raise InputError(
            "the model reads texts only",
            where="--data.min-pixels, --data.max-pixels",
            why="there are no images to scale",
            fix="leave them out, or use a model that reads images",
        )
    reader = replace(tokenizer.images, pixels=pixels)
    reader.processor()
    return replace(tokenizer, images=reader)


def with_turn_end(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer with the end of the template's turns among its ends.

    Base models often have a chat template whose turns end with another token than their eos_token:
    Qwen's <|im_end|> and <|endoftext|>.
    """
    if tokenizer.turn_end in tokenizer.eos_ids:
        return tokenizer
    return replace(tokenizer, eos_ids=(*tokenizer.eos_ids, tokenizer.turn_end))


def of_plain_text(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer with a template that writes the last message alone, with no mark."""
    return _with_text(tokenizer, "{{ messages[-1]['content'] }}")


def _with_text(tokenizer: Tokenizer, template: str) -> Tokenizer:
    backend = tokenizer.backend.with_template(template)
    return replace(tokenizer, backend=backend, chat_template=template, tool_template=None)


def with_template(tokenizer: Tokenizer, file: Path) -> Tokenizer:
    """Return the tokenizer with the chat template of a file, which is saved with it.

    Raises InputError if the file cannot be read, or is not a template.
    """
    flag = "--tokenizer.chat-template"
    if not file.is_file():
        where = f"{file}, {flag}"
        raise missing_file("no such template file", file, where, "give a Jinja file")
    with refused(
        (OSError, ValueError),
        "the file is not a chat template",
        where=f"{file}, {flag}",
        fix="give a text file with a Jinja template",
    ):
        if file.stat().st_size > MAX_TEMPLATE_BYTES:
            raise ValueError(f"it has more than {MAX_TEMPLATE_BYTES:,} bytes")
        template = file.read_text(encoding="utf-8")
        if not template.strip():
            raise ValueError("it is empty")
    tokenizer = _with_text(tokenizer, template)
    try:
        tokenizer.render([{"role": "user", "content": "a"}])
    except InputError as error:
        # A template may refuse a conversation, but it must be a template.
        if error.why.startswith("TemplateSyntaxError"):
            raise error.within(f"{file}, {flag}") from error
    return tokenizer


def parse_template_kwargs(texts: Sequence[str]) -> dict[str, Any]:
    """Return {name: value} of texts name=value.

    Values are JSON, or True, False and None as in Python. Anything else is text. Raises InputError
    if a text has another form, or a name cannot be set or comes twice.
    """
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        reason = ""
        if not equals or not name.isidentifier():
            reason = "it is not of the form name=value"
        elif name in _RESERVED:
            reason = f"{name!r} is set by the renderer"
        elif name in values:
            reason = f"{name!r} comes twice"
        if reason:
            raise InputError(
                f"cannot pass {text[:60]!r} to the chat template",
                where="--tokenizer.template-kwargs",
                why=reason,
                fix="as in enable_thinking=false",
            )
        values[name] = _value(value)
    return values


def _value(text: str) -> Any:
    """Return the value of a text. "False" as text would be true for a template."""
    python = {"True": True, "False": False, "None": None}
    if text in python:
        return python[text]
    try:
        return json.loads(text)
    except ValueError:
        return text


def _require_read(template_kwargs: Mapping[str, Any], template: str | None) -> None:
    """Raise InputError if the template does not read one of the values."""
    names = set(re.findall(r"[A-Za-z_]\w*", template or ""))
    for name in template_kwargs:
        if name not in names:
            raise InputError(
                f"the chat template does not read {name!r}",
                where="--tokenizer.template-kwargs",
                why="it would change nothing" if template else "the tokenizer has no chat template",
                fix=did_you_mean(name, sorted(names), "leave it out"),
            )
