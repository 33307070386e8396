"""Text to token ids."""

from millstream.tokenizers._tokenizer import Tokenizer as Tokenizer
from millstream.tokenizers._tokenizer import byte_tokenizer as byte_tokenizer

__all__: list[str]
