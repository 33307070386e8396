"""Leaving passwords and tokens out of what is written down."""

import re
from collections.abc import Sequence

MASK = "***"
_SECRET_NAMES = re.compile(
    r"(^|_)(password|passwd|passphrase|pwd|secret|secrets|credential|credentials|bearer|authorization|apikey"
    r"|(api|access|secret|private|account|encryption|signing|auth|ssh|license)_?key)($|_)"
    r"|(^|_)(token|pat)$"
)
# What tokenizers have.
_NO_SECRETS = re.compile(
    r"(^|_)(pad|eos|bos|unk|sep|cls|mask|start|end|stop|special|image|text|per|each|first|last)_token$"
)
# What tokens of well-known services look like, and a password in an address.
_SECRET_VALUES = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|sk-[\w-]{16,}|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{12,}|AIza[\w-]{30,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)"
)
_IN_ADDRESS = re.compile(r"(?P<before>[A-Za-z][\w+.-]*://[^\s/:@]*:)[^\s/@]+(?=@)")
_FLAG = re.compile(r"(--?)?(?P<name>[A-Za-z][\w.\-/]*?)(?P<equals>[=:])(?P<value>.+)", re.DOTALL)


def is_secret(name: str) -> bool:
    """Whether what is called so should be left out."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.replace("-", "_").replace("/", "_"))
    last = words.rsplit(".", 1)[-1].lower()
    return _SECRET_NAMES.search(last) is not None and _NO_SECRETS.search(last) is None


def masked_text(text: str) -> str:
    """A text without what looks like a token, or like a password in an address."""
    return _IN_ADDRESS.sub(rf"\g<before>{MASK}", _SECRET_VALUES.sub(MASK, text))


def masked_command(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command without what looks like a password or token.

    Example:
        >>> masked_command(["train.py", "--lr=0.1", "--token=abc", "--password", "xyz", "--verbose"])
        ['train.py', '--lr=0.1', '--token=***', '--password', '***', '--verbose']
    """
    made, hides_next = [], False
    for argument in arguments:
        flag = _FLAG.fullmatch(argument)
        if flag is not None and is_secret(flag["name"]):
            made.append(argument[: flag.start("value")] + MASK)
        elif hides_next and not argument.startswith("--"):
            made.append(MASK)
        else:
            made.append(masked_text(argument))
        hides_next = argument.startswith("-") and flag is None and is_secret(argument.lstrip("-"))
    return made
