"""A tokenizer of any library as one kind of function: text to an array of ids."""

import contextlib
import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from millstream.text.errors import (
    describe_leaf,
    describe_value,
    did_you_mean,
    function_name,
    listed,
    require_bool,
    require_callable,
    whole_number,
)
from millstream.tokenizers._models import Bytes, Function, Model, model_of

_MOST = 1 << 32  # ids


@dataclasses.dataclass(frozen=True, init=False, eq=False, repr=False)
class Tokenizer:
    """A tokenizer of any library: `tokenizer(text)` is an array of ids, wherever it is called.

    It is a function for `source.map` and `HostMapTransform`, on every executor. Ids are uint16 if the vocabulary has at
    most 65,536 tokens, otherwise uint32, as files of tokens have them. Nothing is cut, padded or appended but what the
    model does by itself; `ms.views.pack(..., eos=tokenizer.eos)` ends documents.

    A plan file made with one tokenizer is not used with a different one. Do not change the model afterwards.

    Example:
        >>> def letters(text):
        ...     return [ord(letter) - ord("a") for letter in text]
        >>> tokenizer = ms.tokenizers.Tokenizer(letters, vocabulary_size=27, eos=26)
        >>> tokenizer("mill")
        array([12,  8, 11, 11], dtype=uint16)
        >>> source = ms.DatasetSource([{"text": "mill"}, {"text": "stream"}])
        >>> tokens = source.map(lambda sample: {"tokens": tokenizer(sample["text"])})
        >>> rows = ms.views.pack(tokens, 16, eos=tokenizer.eos)

    Args:
        model: A `tokenizers.Tokenizer`, a tokenizer of transformers, a `tiktoken.Encoding`, a
            `sentencepiece.SentencePieceProcessor`, or a function from text to ids. With tiktoken, names of special
            tokens in a text are text.
        eos: The token that ends a document: its name, or its id. By default the one that the model names: tiktoken's
            "<|endoftext|>", and that of SentencePiece and transformers. `tokenizers.Tokenizer` names none.
        vocabulary_size: Needed for a function: its ids are below it. Otherwise by default one more than the highest id
            of the model; a larger number makes room, such as for a multiple of 64.
        add_special_tokens: Whether to add the tokens that the model puts around a text by itself, such as "[CLS]" and
            "[SEP]", or `add_bos` of SentencePiece.
        decode: For a function: one from a list of ids to text.

    Attributes:
        eos: The id of the token that ends a document; None if there is none.
        vocabulary_size: All ids are below it.
        dtype: Of the ids.
    """

    _model: Model
    eos: int | None
    vocabulary_size: int

    def __init__(
        self,
        model: object,
        *,
        eos: str | int | np.integer | None = None,
        vocabulary_size: int | None = None,
        add_special_tokens: bool = True,
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        require_bool("Tokenizer", "add_special_tokens", add_special_tokens)
        if decode is not None:
            require_callable("Tokenizer", "decode", decode, "ids")
        is_ours = isinstance(model, Bytes)
        its_model: Model = model if is_ours else model_of("Tokenizer", model, add_special_tokens, decode)
        size = _size(its_model, vocabulary_size)
        object.__setattr__(self, "_model", its_model)
        object.__setattr__(self, "vocabulary_size", size)
        object.__setattr__(self, "eos", its_model.eos if eos is None else _eos(its_model, size, eos))

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.uint16 if self.vocabulary_size <= 1 << 16 else np.uint32)

    def __call__(self, text: str) -> np.ndarray:
        """The ids of a text, as an array."""
        _require_text(text)
        return self._array(self._model.encode(text))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of several texts, faster than one by one where the library has threads for it.

        In worker processes, which share the cores, it takes one text after the other.

        Example:
            >>> [ids.tolist() for ids in ms.tokenizers.byte_tokenizer().encode_batch(["oat", "rye"])]
            [[111, 97, 116], [114, 121, 101]]

        Args:
            texts: A list of str.
        """
        found = listed(texts)
        if found is None:
            raise TypeError(f"Tokenizer.encode_batch needs texts to be a list of str. Got {describe_value(texts)}.")
        for number, text in enumerate(found):
            _require_text(text, f"Tokenizer.encode_batch: texts[{number}]")
        return [self._array(ids) for ids in self._model.encode_batch(found)]

    def decode(self, ids: ArrayLike) -> str:
        """The text of ids, as the model gives it.

        Example:
            >>> ms.tokenizers.byte_tokenizer().decode([111, 97, 116, 256])
            'oat'

        Args:
            ids: One-dimensional: a list, or an array of NumPy or JAX.
        """
        try:
            found = np.asarray(ids)
        except Exception:
            raise TypeError(f"Tokenizer.decode needs ids to be an array of ids. Got {describe_value(ids)}.") from None
        if found.ndim != 1 or (found.dtype.kind not in "iu" and found.size):
            raise TypeError(
                f"Tokenizer.decode needs ids to be whole numbers along one axis. Got {describe_leaf(found)}. Decode "
                "the rows of a batch one by one."
            )
        if found.size and not (0 <= found.min() and found.max() < self.vocabulary_size):
            raise ValueError(
                f"Tokenizer.decode needs ids from 0 to {self.vocabulary_size - 1:,}. Got {found.min()} to "
                f"{found.max()}. Leave padding out first."
            )
        return self._model.decode(found.tolist())

    @functools.cached_property
    def fingerprint(self) -> str | None:
        """A hash of all that decides the ids: vocabulary, model and settings; the same in every process.

        None for a function: plan files look at its code.
        """
        contents = self._model.contents()
        if contents is None:
            return None
        settings = json.dumps([self._model.kind, self.eos, self.vocabulary_size])
        digest = hashlib.sha256(settings.encode())
        digest.update(contents.encode() if isinstance(contents, str) else contents)
        return digest.hexdigest()[:32]

    def _array(self, found: Any) -> np.ndarray:
        """Ids as an array of their dtype, none of which is outside the vocabulary."""
        ids = self._numbers(found)
        if ids.size and not (0 <= ids.min() and ids.max() < self.vocabulary_size):
            raise ValueError(
                f"Tokenizer needs ids from 0 to {self.vocabulary_size - 1:,}, below its vocabulary_size. "
                f"{self._name} gave {ids.min()} to {ids.max()}. Pass a larger vocabulary_size."
            )
        return ids.astype(self.dtype, copy=False)

    def _numbers(self, found: Any) -> np.ndarray:
        if not isinstance(self._model, Function):
            with contextlib.suppress(OverflowError):
                return np.asarray(found, self.dtype)  # 4 times as fast as through int64
        try:
            ids = np.asarray(found)
        except Exception:
            ids = np.zeros((), object)  # lists in a list
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise TypeError(
                f"Tokenizer needs ids as whole numbers along one axis. {self._name} gave {describe_value(found)}."
            )
        return ids

    @property
    def _name(self) -> str:
        return function_name(self._model.model) if isinstance(self._model, Function) else self._model.kind

    def __repr__(self) -> str:
        return f"Tokenizer({self._name}, {self.vocabulary_size:,} tokens, eos={self.eos})"


def byte_tokenizer() -> Tokenizer:
    """A tokenizer without a vocabulary: the ids of a text are its bytes in UTF-8, and 256 is the end of a document.

    Example:
        >>> tokenizer = ms.tokenizers.byte_tokenizer()
        >>> tokenizer("mill").tolist(), tokenizer.eos, tokenizer.vocabulary_size
        ([109, 105, 108, 108], 256, 257)
    """
    return Tokenizer(Bytes())


def _size(model: Model, given: Any) -> int:
    own = model.size
    if given is None:
        if own is None:
            raise ValueError(
                "Tokenizer needs vocabulary_size for a function, which does not say how many ids there are. Pass one "
                "more than the highest id."
            )
        return own
    return whole_number("Tokenizer", "vocabulary_size", given, least=max(own or 1, 1), most=_MOST)


def _eos(model: Model, size: int, given: Any) -> int:
    if not isinstance(given, str):
        return whole_number("Tokenizer", "eos", given, least=0, most=size - 1)
    found = model.id_of(given)
    if found is None:
        names = model.special_tokens()
        there = f"Its special tokens: {', '.join(map(repr, names[:8]))}" if names else "It names no special tokens"
        raise ValueError(
            f"Tokenizer has no token of the name eos={given!r}. {did_you_mean(given, names)}{there}; or pass an id."
        )
    return found


def _require_text(text: Any, what: str = "Tokenizer") -> None:
    """Refuse what is not text, and text that has no bytes: libraries would raise, or replace it without a word."""
    if not isinstance(text, str):
        fix = ""
        if isinstance(text, bytes | bytearray):
            fix = " Decode it first: text.decode()."
        elif text is None:
            fix = " Leave such samples out with ms.views.select, or fill in text."
        elif isinstance(text, dict):
            fix = " Pass the field that has the text: lambda sample: {'tokens': tokenizer(sample['text'])}."
        raise TypeError(f"{what} needs text to be a str. Got {describe_value(text)}.{fix}")
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} needs text that can be written in UTF-8. Character {error.start:,} is {text[error.start]!r}, half "
            "of a surrogate pair. Replace such characters: text.encode(errors='replace').decode()."
        ) from None
