"""What each library calls its tokenizer's parts, in one form. No library is imported: a model is known by its methods.

Some models lose settings when they are pickled. What is pickled here keeps them, so that worker processes give the same
tokens as threads.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from millstream.reading import is_worker
from millstream.text.errors import describe_value, function_name

Ids = Any  # one-dimensional whole numbers: a list, or an array


class Model(Protocol):
    """A tokenizer of some library.

    Attributes:
        kind: Whose it is.
        size: One more than its highest id; None if it does not say.
        eos: The id of the token that it ends texts with, if it says so.
    """

    @property
    def kind(self) -> str: ...

    @property
    def size(self) -> int | None: ...

    @property
    def eos(self) -> int | None: ...

    def encode(self, text: str) -> Ids:
        """The ids of a text."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> Iterable[Ids]:
        """The ids of several texts."""
        ...

    def decode(self, ids: list[int]) -> str:
        """The text of ids."""
        ...

    def id_of(self, token: str) -> int | None:
        """The id of a token by its name; None if there is no such token."""
        ...

    def special_tokens(self) -> list[str]:
        """The tokens that are not text, by name."""
        ...

    def contents(self) -> str | bytes | None:
        """All that decides its ids; None if that is the code of a function."""
        ...


def model_of(caller: str, model: Any, add_special_tokens: bool, decode: Callable[..., Any] | None) -> Model:
    """A tokenizer of any library, known by its methods; refuses anything else, and one that draws random ids."""
    if decode is not None and not _is_function(model):
        raise TypeError(f"{caller} takes decode= for a function. {describe_value(model)} has its own.")
    if _has(model, "encode_ordinary", "n_vocab"):
        return Tiktoken(model)
    if _has(model, "piece_to_id", "serialized_model_proto"):
        if vars(model).get("_enable_sampling"):
            raise _random(caller, "this SentencePieceProcessor", "Load it without enable_sampling")
        return SentencePiece(model, add_special_tokens)
    if _has(model, "encode", "get_vocab"):
        found = HuggingFace(model, add_special_tokens)
        if found.dropout:
            raise _random(caller, f"this {type(model).__name__}", "Set tokenizer.model.dropout = None")
        return found
    if _is_function(model):
        return Function(model, decode)
    fix = "Load one first."
    if isinstance(model, str):
        fix = f"Load it first: tokenizers.Tokenizer.from_pretrained({model!r})."
    elif _has(model, "encode"):
        fix = "Pass its function: tokenizer.encode."
    raise TypeError(
        f"{caller} needs model to be a tokenizer of Hugging Face, tiktoken or SentencePiece, or a function from text "
        f"to ids. Got {describe_value(model)}. {fix}"
    )


def _has(model: Any, *names: str) -> bool:
    return not isinstance(model, type) and all(hasattr(model, name) for name in names)


def _is_function(model: Any) -> bool:
    return callable(model) and not _has(model, "encode") and not isinstance(model, type)


def _random(caller: str, what: str, fix: str) -> ValueError:
    return ValueError(f"{caller} needs the same ids for the same text every time. {what} draws them at random. {fix}.")


@dataclasses.dataclass(frozen=True)
class HuggingFace:
    """`tokenizers.Tokenizer`, or one of transformers."""

    model: Any
    add_special_tokens: bool
    kind = "Hugging Face"

    def __getstate__(self) -> tuple[Any, ...]:
        # The library's own pickles forget `encode_special_tokens`.
        return self.model, self.add_special_tokens, self._encodes_special

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        model, add_special_tokens, encodes_special = state
        object.__setattr__(self, "model", model)
        object.__setattr__(self, "add_special_tokens", add_special_tokens)
        if encodes_special:
            self._inner.encode_special_tokens = True

    @property
    def _encodes_special(self) -> bool:
        return getattr(self._inner, "encode_special_tokens", None) is True

    @property
    def size(self) -> int:
        return max(self.model.get_vocab().values(), default=-1) + 1  # ids may have gaps, so that a count says less

    @property
    def eos(self) -> int | None:
        return getattr(self.model, "eos_token_id", None)  # transformers knows it

    @property
    def _inner(self) -> Any:
        return getattr(self.model, "backend_tokenizer", self.model)

    @property
    def dropout(self) -> float | None:
        """How often it leaves out a merge, at random."""
        return getattr(getattr(self._inner, "model", None), "dropout", None)

    def encode(self, text: str) -> Ids:
        if is_worker() and self._encodes_together:  # a quarter faster: it does not look for the place of each token
            return next(iter(self.encode_batch([text])))
        found = self.model.encode(text, add_special_tokens=self.add_special_tokens)
        return getattr(found, "ids", found)

    def encode_batch(self, texts: Sequence[str]) -> Iterable[Ids]:
        if not self._encodes_together:
            return map(self.encode, texts)
        if is_worker():
            # Threads beside those of other workers would only get in each other's way. It looks at this every time.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        return (
            one.ids for one in self.model.encode_batch_fast(list(texts), add_special_tokens=self.add_special_tokens)
        )

    @property
    def _encodes_together(self) -> bool:
        """Whether it takes texts at once, with the ids that each has alone: not if it pads to the longest of them."""
        if not hasattr(self.model, "encode_batch_fast"):
            return False
        return self.model.padding is None or self.model.padding["length"] is not None

    def decode(self, ids: list[int]) -> str:
        return self.model.decode(ids)

    def id_of(self, token: str) -> int | None:
        return self.model.get_vocab().get(token)

    def special_tokens(self) -> list[str]:
        if hasattr(self.model, "all_special_tokens"):
            return list(self.model.all_special_tokens)
        return [token.content for token in self.model.get_added_tokens_decoder().values() if token.special]

    def contents(self) -> str:
        has_all = hasattr(self._inner, "to_str")  # slow ones of transformers have not
        model = self._inner.to_str() if has_all else sorted(self.model.get_vocab().items())
        return json.dumps([type(self.model).__name__, model, self.add_special_tokens, self._encodes_special])


@dataclasses.dataclass(frozen=True)
class Tiktoken:
    """`tiktoken.Encoding`. Names of special tokens in a text are text."""

    model: Any
    kind = "tiktoken"

    def __getstate__(self) -> dict[str, Any]:
        # The parts, and not the name that the library pickles, which it would load from the network elsewhere.
        return {"name": self.model.name, **self._parts}

    def __setstate__(self, parts: dict[str, Any]) -> None:
        import tiktoken

        object.__setattr__(self, "model", tiktoken.Encoding(**parts))

    @property
    def _parts(self) -> dict[str, Any]:
        model = self.model  # the library's README builds encodings of these
        return {
            "pat_str": model._pat_str,
            "mergeable_ranks": model._mergeable_ranks,
            "special_tokens": model._special_tokens,
        }

    @property
    def size(self) -> int:
        return self.model.n_vocab

    @property
    def eos(self) -> int | None:
        return self._parts["special_tokens"].get("<|endoftext|>")

    def encode(self, text: str) -> Ids:
        return self.model.encode_ordinary(text)

    def encode_batch(self, texts: Sequence[str]) -> Iterable[Ids]:
        return map(self.encode, texts) if is_worker() else self.model.encode_ordinary_batch(list(texts))

    def decode(self, ids: list[int]) -> str:
        return self.model.decode(ids)

    def id_of(self, token: str) -> int | None:
        return self._parts["special_tokens"].get(token)

    def special_tokens(self) -> list[str]:
        return sorted(self._parts["special_tokens"])

    def contents(self) -> str:
        parts = self._parts
        ranks = sorted((rank, token.hex()) for token, rank in parts["mergeable_ranks"].items())
        return json.dumps([parts["pat_str"], ranks, sorted(parts["special_tokens"].items())])


@dataclasses.dataclass(frozen=True)
class SentencePiece:
    """`sentencepiece.SentencePieceProcessor`."""

    model: Any
    add_special_tokens: bool
    kind = "SentencePiece"

    def __getstate__(self) -> tuple[Any, ...]:
        # Pickles of the library before 0.2.3 have the model alone, without its settings.
        return self.model, self._settings, self.add_special_tokens

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        model, settings, add_special_tokens = state
        vars(model).update(settings)
        object.__setattr__(self, "model", model)
        object.__setattr__(self, "add_special_tokens", add_special_tokens)

    @property
    def _settings(self) -> dict[str, Any]:
        return {name: value for name, value in sorted(vars(self.model).items()) if isinstance(value, int | float)}

    @property
    def size(self) -> int:
        return self.model.vocab_size()

    @property
    def eos(self) -> int | None:
        return self.model.eos_id() if self.model.eos_id() >= 0 else None

    def encode(self, text: str) -> Ids:
        return self.model.encode(text, **self._options)

    def encode_batch(self, texts: Sequence[str]) -> Iterable[Ids]:
        return map(self.encode, texts) if is_worker() else self.model.encode(list(texts), **self._options)

    @property
    def _options(self) -> dict[str, Any]:
        added = {} if self.add_special_tokens else {"add_bos": False, "add_eos": False}
        return {"out_type": int, **added}

    def decode(self, ids: list[int]) -> str:
        return self.model.decode(ids, out_type=str)

    def id_of(self, token: str) -> int | None:
        found = self.model.piece_to_id(token)
        return found if self.model.id_to_piece(found) == token else None  # others are the unknown token

    def special_tokens(self) -> list[str]:
        return [self.model.id_to_piece(number) for number in range(self.size) if self.model.is_control(number)]

    def contents(self) -> bytes:
        settings = json.dumps([self._settings, self.add_special_tokens])
        return settings.encode() + self.model.serialized_model_proto()


@dataclasses.dataclass(frozen=True)
class Function:
    """A function from text to ids, and one back, if there is one."""

    model: Callable[[str], Ids]
    back: Callable[[list[int]], str] | None
    kind = "a function"
    size = None
    eos = None

    def encode(self, text: str) -> Ids:
        return self.model(text)

    def encode_batch(self, texts: Sequence[str]) -> Iterable[Ids]:
        return map(self.model, texts)

    def decode(self, ids: list[int]) -> str:
        if self.back is None:
            raise TypeError(
                f"Tokenizer.decode needs a function from ids to text beside {function_name(self.model)}. Pass decode=."
            )
        return self.back(ids)

    def id_of(self, token: str) -> int | None:
        return None

    def special_tokens(self) -> list[str]:
        return []

    def contents(self) -> None:
        return None


@dataclasses.dataclass(frozen=True)
class Bytes:
    """The bytes of a text, and one token for its end."""

    kind = "bytes"
    size = 257
    eos = 256

    def encode(self, text: str) -> Ids:
        return memoryview(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> Iterable[Ids]:
        return map(self.encode, texts)

    def decode(self, ids: list[int]) -> str:
        return bytes(number for number in ids if number != self.eos).decode(errors="replace")

    def id_of(self, token: str) -> int | None:
        return None

    def special_tokens(self) -> list[str]:
        return []

    def contents(self) -> str:
        return "bytes"
