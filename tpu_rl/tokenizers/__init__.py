"""Text to token ids and back, for Hugging Face, sentencepiece and character-level tokenizers."""

from typing import TYPE_CHECKING

from tpu_rl import lazy

if TYPE_CHECKING:
    from tpu_rl.tokenizers.conversations import Message as Message
    from tpu_rl.tokenizers.conversations import Tools as Tools
    from tpu_rl.tokenizers.hugging_face import characters as characters
    from tpu_rl.tokenizers.loading import has_same_tokens as has_same_tokens
    from tpu_rl.tokenizers.loading import load as load
    from tpu_rl.tokenizers.loading import require_same_tokens as require_same_tokens
    from tpu_rl.tokenizers.settings import ChatConfig as ChatConfig
    from tpu_rl.tokenizers.settings import TokenizerConfig as TokenizerConfig
    from tpu_rl.tokenizers.settings import configure as configure
    from tpu_rl.tokenizers.settings import of_plain_text as of_plain_text
    from tpu_rl.tokenizers.settings import with_images as with_images
    from tpu_rl.tokenizers.settings import with_pixels as with_pixels
    from tpu_rl.tokenizers.tokenizer import AssistantTurns as AssistantTurns
    from tpu_rl.tokenizers.tokenizer import ChatSettings as ChatSettings
    from tpu_rl.tokenizers.tokenizer import Demonstration as Demonstration
    from tpu_rl.tokenizers.tokenizer import Tokenizer as Tokenizer

lazy.exports(__name__, __file__)
