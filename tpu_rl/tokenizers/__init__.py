"""Text to token ids and back: Hugging Face tokenizer directories, sentencepiece models, character-level tokenizers."""

from tpu_rl.tokenizers.hugging_face import characters as characters
from tpu_rl.tokenizers.loading import load as load
from tpu_rl.tokenizers.tokenizer import Message as Message
from tpu_rl.tokenizers.tokenizer import Tokenizer as Tokenizer
