"""Text to token ids and back, for Hugging Face, sentencepiece and character-level tokenizers."""

from typing import TYPE_CHECKING

from tpu_rl import lazy

if TYPE_CHECKING:
    from tpu_rl.tokenizers.conversations import Message, Tools
    from tpu_rl.tokenizers.hugging_face import characters
    from tpu_rl.tokenizers.loading import has_same_tokens, load, require_same_tokens
    from tpu_rl.tokenizers.settings import (
        TokenizerConfig,
        configure,
        of_plain_text,
        with_images,
        with_pixels,
    )
    from tpu_rl.tokenizers.tokenizer import AssistantTurns, ChatSettings, Demonstration, Tokenizer

lazy.exports(__name__, __file__)
