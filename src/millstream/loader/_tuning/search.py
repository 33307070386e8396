"""The search for the best way to read: ladders are climbed, the best are compared again, then prefetch."""

import contextlib
import time
from typing import TYPE_CHECKING

import numpy as np

from millstream.loader._tuning import ladder
from millstream.loader._tuning.result import executor_code
from millstream.loader._tuning.stages import TimedReading, read_batch
from millstream.loader._tuning.trials import Cursor, Executor, Step, Trial, TriedOptions
from millstream.reading.processes import Processes
from millstream.text.progress_line import ProgressLine
from millstream.text.tables import time_text

if TYPE_CHECKING:
    from millstream.loader.loader import DataLoader

# Shares of the time.
_CLIMB, _COMPARE, _TURN, _LONGEST_ROUND = 0.55, 0.8, 0.03, 0.1
_WORTHWHILE = 1.1  # another rung of a ladder is tried if the last one gave this much
_SURE_RUNGS = 2  # of a ladder, which are tried even if time is short
_CONTENDER = 0.5  # of the best: who is below it in its first turn gets no other
_MOST_CONTENDERS = 4
_ROUNDS = 2  # of turns in a comparison, at least
_PREFETCH = (1, 2, 4)  # times as many as all workers need


class Search:
    """One search.

    Args:
        loader: Whose pipeline it is.
        words: The run's key.
        seconds: How long it may take, about.
        step: What is done with each batch, if that is known.
        reading: What reading costs in one thread, if samples are read on the host.
        line: Where progress is shown.
        opened: Where trials are entered, to be closed in the end.
    """

    def __init__(
        self,
        loader: "DataLoader",
        words: np.ndarray,
        seconds: float,
        step: Step | None,
        reading: TimedReading | None,
        line: ProgressLine,
        opened: contextlib.ExitStack,
    ) -> None:
        self._loader = loader
        self._cursor = Cursor(words, loader._source.plan.step_limit)
        self._seconds = seconds
        self._step = step
        self._reading = reading
        self._line = line
        self._opened = opened
        self._begun = time.perf_counter()
        self._trials: list[Trial] = []
        self._left_out: list[TriedOptions] = []

    def run(self) -> TriedOptions:
        """Try, and say which options are to be preferred."""
        for rungs in ladder.ladders(self._loader):
            self._climb(rungs)
        if not self._trials:
            why = self._left_out[0].note.removeprefix("not tried: ")
            raise ValueError(f"tune has too little time to try anything: {why}. Give it more: tune(seconds=...).")
        self._compare(self._contenders(), _COMPARE)
        best = self._simplest(self._trials)
        return self._with_prefetch(best).result()

    def results(self) -> list[TriedOptions]:
        """All that were tried, and those that were not, with the reason."""
        return [*(trial.result(self._note(trial)) for trial in self._trials), *self._left_out]

    def _note(self, trial: Trial) -> str:
        is_present = (trial.executor, trial.prefetch) == (self._present, self._loader._prefetch)
        return "as it is" if is_present else ""

    def _climb(self, rungs: list[Executor]) -> None:
        """Try one after the other, as long as it helps."""
        best = 0.0
        for number, executor in enumerate(rungs):
            known = [trial for trial in self._trials if trial.executor == executor]
            trial = known[0] if known else self._tried(executor, hurried=number >= _SURE_RUNGS)
            if trial is None:
                continue
            if trial.rate < _WORTHWHILE * best:
                self._turn(trial)  # it may have been disturbed
            if trial.rate < _WORTHWHILE * best:
                return
            best = max(best, trial.rate)

    def _tried(self, executor: Executor, hurried: bool) -> Trial | None:
        """A trial after its first turn; None if it cannot be made, or is left out because time is short."""
        prefetch = self._loader._prefetch
        if executor != self._present:
            prefetch = ladder.prefetch_for(self._loader, executor, prefetch)
        if (why := self._why_not(executor, hurried)) is not None:
            self._left_out.append(TriedOptions(executor, prefetch, note=why))
            return None
        trial, step = self._entered(executor, prefetch), self._cursor.step
        try:
            self._turn(trial)
        except Exception as error:
            trial.__exit__()
            if trial.begun or not isinstance(executor, Processes) or isinstance(self._present, Processes):
                raise
            read_batch(self._loader, self._cursor.words, step)  # raises if it is a sample that is at fault
            first_line = str(error).partition("\n")[0]
            note = f"not tried: {type(error).__name__}: {first_line}"
            self._left_out.append(TriedOptions(executor, prefetch, note=note))
            return None
        self._trials.append(trial)
        return trial

    def _why_not(self, executor: Executor, hurried: bool) -> str | None:
        if hurried and self._elapsed() > _CLIMB:
            return "not tried: the time was over"
        rates = {trial.executor: trial.rate for trial in self._trials}
        if isinstance(executor, Processes) and ladder.exceed_processes(rates):
            return "not tried: threads read more than so many processes can"
        if self._reading is None:
            return None
        seconds = ladder.seconds_of_a_round(self._loader, executor, self._reading.per_sample)
        if seconds > _LONGEST_ROUND * self._seconds:
            return f"not tried: a batch would take about {time_text(seconds)}"
        return None

    def _entered(self, executor: Executor, prefetch: int) -> Trial:
        return self._opened.enter_context(Trial(self._loader, executor, prefetch, self._cursor, self._step))

    def _turn(self, trial: Trial) -> None:
        name = f"{executor_code(trial.executor)}, prefetch={trial.prefetch}"
        self._line.say(f"{name} ({self._elapsed():.0%} of {self._seconds:.3g} s)")
        try:
            trial.turn(_TURN * self._seconds)
        except Exception as error:
            error.add_note(f"tune was trying {name}.")
            raise

    def _contenders(self) -> list[Trial]:
        """The best so far, and those that may turn out to be as good. The others are closed."""
        by_rate = sorted(self._trials, key=lambda trial: -trial.rate)[:_MOST_CONTENDERS]
        kept = [trial for trial in by_rate if trial.rate >= _CONTENDER * by_rate[0].rate]
        for trial in self._trials:
            if trial not in kept:
                trial.__exit__()
        return kept

    def _compare(self, trials: list[Trial], until: float) -> None:
        """Give them turns, one after the other, so that whatever else the machine does hits all alike."""
        rounds = 0
        while len(trials) > 1 and self._elapsed() < (1.0 if rounds < _ROUNDS else until):
            for trial in trials:
                self._turn(trial)
            rounds += 1

    def _simplest(self, trials: list[Trial]) -> Trial:
        """The simplest of those that are as good as the best."""
        by_options = {(trial.executor, trial.prefetch): trial for trial in trials}
        rates = {options: trial.rate for options, trial in by_options.items()}
        return by_options[ladder.preferred(self._loader, rates)]

    def _with_prefetch(self, best: Trial) -> Trial:
        """The trial with the prefetch that is enough for this executor."""
        if best.executor is None:  # its source says how many samples are read ahead
            return best
        least = ladder.prefetch_for(self._loader, best.executor, 1)
        trials = [best]
        for prefetch in (times * least for times in _PREFETCH):
            if prefetch != best.prefetch and self._elapsed() < 1.0:
                trials.append(self._entered(best.executor, prefetch))
                self._turn(trials[-1])
        self._trials += trials[1:]
        self._compare(trials, 1.0)
        fastest = max(trial.rate for trial in trials)
        if self._step is None and ladder.is_good(best.executor, best.rate, fastest):
            return best  # how unevenly steps take their batches is not known, so that less may be too little
        return self._simplest(trials)

    @property
    def _present(self) -> Executor:
        return ladder.present_executor(self._loader)

    def _elapsed(self) -> float:
        """The share of the time that is over."""
        return (time.perf_counter() - self._begun) / self._seconds
