"""Processes that work at one stream must agree on it."""

import collections
import hashlib
import json
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

Facts = Sequence[tuple[str, str]]


def require_agreement(caller: str, facts: Facts) -> None:
    """Refuse to continue if processes are about to do different things, naming who differs in what.

    All processes have to call this, in the same order.

    Args:
        caller: The caller's name, for errors.
        facts: What this process is about to do, in words.
    """
    if jax.process_count() == 1:
        return
    encoded = json.dumps(list(facts)).encode()
    text, digest = np.frombuffer(encoded, np.uint8), np.frombuffer(hashlib.sha256(encoded).digest(), np.uint32)
    lengths_and_digests = _gather(np.array([len(text), *digest], np.uint32))
    if (lengths_and_digests[:, 1:] == digest).all():
        return
    padded = np.zeros(int(lengths_and_digests[:, 0].max()), np.uint8)
    padded[: len(text)] = text
    texts = _gather(padded)
    told = [
        dict(json.loads(bytes(text[:length])))
        for text, length in zip(texts, lengths_and_digests[:, 0].tolist(), strict=True)
    ]
    raise ValueError(f"{caller} needs all processes to read the same. They differ:\n" + "\n".join(_differences(told)))


def _differences(told: list[dict[str, str]]) -> list[str]:
    """One line per fact and process that is not as most have it."""
    lines = []
    for name in dict.fromkeys(name for facts in told for name in facts):
        values = [facts.get(name, "nothing") for facts in told]
        usual, count = collections.Counter(values).most_common(1)[0]
        others = "1 other" if count == 1 else f"{count} others"
        lines += [
            f"  {name}: {value} in process {process}, {usual} in {others}"
            for process, value in enumerate(values)
            if value != usual
        ]
    return lines


def _gather(values: np.ndarray) -> np.ndarray:
    return np.asarray(multihost_utils.process_allgather(values))
