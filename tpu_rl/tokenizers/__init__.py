"""Text to token ids and back, for Hugging Face, sentencepiece and character-level tokenizers."""

from tpu_rl.tokenizers.hugging_face import characters as characters
from tpu_rl.tokenizers.loading import load as load
from tpu_rl.tokenizers.loading import require_same_tokens as require_same_tokens
from tpu_rl.tokenizers.tokenizer import Message as Message
from tpu_rl.tokenizers.tokenizer import Tokenizer as Tokenizer
