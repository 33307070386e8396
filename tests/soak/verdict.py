"""Whether what came of a run is what the oracle says, and how many samples were lost or came twice."""

import collections
from typing import Any

from soak import oracle
from soak.cases import LEFT_OUT, Case
from soak.fault import Fault
from soak.faults import ALWAYS


class Verdict:
    """Compares the batches of a run, one by one, with those that must have come.

    Args:
        case: The run.
        stream: What must come.
        steps: How many batches.
        faults: Because of which batches may look otherwise, or be missing.

    Attributes:
        wrong: What was wrong, in words.
        lost: Samples that did not come.
        repeated: Samples that came too often.
    """

    def __init__(self, case: Case, stream: Any, steps: int, faults: list[Fault]) -> None:
        self._case, self._stream, self._steps = case, stream, steps
        self._always = {fault.target for fault in faults if fault.name in ALWAYS}
        self._once = {fault.target for fault in faults if fault.name == "sample that raises once"}
        self._step = 0
        self._expected: collections.Counter[int] = collections.Counter()
        self._found: collections.Counter[int] = collections.Counter()
        self.wrong: list[str] = []

    @property
    def lost(self) -> int:
        return (self._expected - self._found).total()

    @property
    def repeated(self) -> int:
        return (self._found - self._expected).total()

    def judge(self, entries: list[dict[str, Any]]) -> "Verdict":
        """Compare all that came."""
        came = [entry for entry in entries if "ends" not in entry]
        for entry in came if self._case.ordered else self._in_order(came):
            if "told" in entry:
                self._judge_error(entry["told"])
            else:
                self._judge_batch(entry)
        while self._step < self._steps and self._forms()[1]:
            self._step += 1
        if self._step < self._steps:
            self.wrong.append(f"the stream ended after batch {self._step} of {self._steps}")
        if self._step > self._steps and self._case.on_error != "skip batch":  # those that it leaves out are made up for
            self.wrong.append(f"{self._step} batches came, instead of {self._steps}")
            for extra in range(self._steps, self._step):
                self._found.update(self._stream.at(extra).samples)
        for missing in range(self._step, self._steps):
            self._expected.update(self._stream.at(missing).samples)
        return self

    def _judge_error(self, target: int) -> None:
        if target not in self._stream.at(self._step).samples:
            self.wrong.append(f"batch {self._step} raised what belongs to sample {target}")
        self._step += 1

    def _judge_batch(self, entry: dict[str, Any]) -> None:
        forms, left_out = self._forms()
        # The batch after one that was left out may be the same again, in a new epoch: the state tells them apart.
        while left_out and (entry["digest"] not in forms or entry.get("after", 0) > self._step + 1):
            self._step += 1
            forms, left_out = self._forms()
        form = forms.get(entry["digest"])
        if form is None:
            whole = self._stream.at(self._step)
            self.wrong.append(f"batch {self._step} differs: {entry} instead of {whole.samples}")
            self._expected.update(whole.samples)
            self._found.update(entry.get("samples", ()))  # a training run tells bits, and no samples
        self._step += 1
        if entry.get("after", self._step) != self._step:
            self.wrong.append(f"the state after batch {self._step - 1} says {entry['after']}")

    def _forms(self, step: int | None = None) -> tuple[dict[Any, oracle.Expected], bool]:
        """What the next batch may be, by its digest, and whether it may be left out."""
        case, whole = self._case, self._stream.at(self._step if step is None else step)
        always, once = self._always & {*whole.samples}, self._once & {*whole.samples}
        forms: list[oracle.Expected] = [] if always else [whole]
        left_out = False
        if case.on_error == "skip item":
            forms += [whole.without(always | some) for some in (set(), once)]
        elif case.on_error == "skip batch" and (always or once):
            left_out = case.way in LEFT_OUT
            blank = case.parts[0].device_map in ("before", "random")
            forms += [] if left_out else [whole.without(always | some).masked(blank) for some in (set(), once)]
        told = "word" if case.way in ("train", "fused") else "digest"
        return {getattr(form, told): form for form in forms}, left_out

    def _in_order(self, came: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Batches that came in any order, in the one that they have."""
        waiting, ordered = [*came], []
        for step in range(self._steps):
            forms, _ = self._forms(step)
            match = next((entry for entry in waiting if entry["digest"] in forms), None)
            if match is not None:
                waiting.remove(match)
                ordered.append({**match, "after": step + 1})
        return ordered + [{**entry, "after": 0} for entry in waiting]
