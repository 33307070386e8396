"""What the figures of a run suggest to do."""

import numpy as np

from millstream.loops.curves import Curve, is_loss
from millstream.loops.log_entries import EVALUATIONS
from millstream.report._chart import value_text
from millstream.report._charts import odd_values
from millstream.report._run_data import RunData, Times

_MUCH_WAITING, _MUCH_TESTING, _MUCH_CALLING, _MUCH_COMPILING = 0.2, 0.4, 0.2, 0.4
_MUCH_AGAIN, _LEAST_AGAIN = 0.05, 3  # the share of time that compiling again takes, and how many windows have it
_USES = {
    "data": (_MUCH_WAITING, "{} of the time was spent waiting for data: loader.tune() suggests how to fix it."),
    "callbacks": (
        _MUCH_CALLING,
        "{} of the time was spent in callbacks, logging and saving: let them be due less often, every(100) say.",
    ),
    "evaluation": (
        _MUCH_TESTING,
        "{} of the time was spent in tests: test_duration= tests on fewer batches.",
    ),
    "compiling": (
        _MUCH_COMPILING,
        "{} of the time was spent compiling and starting, which a run does once: it is a smaller part of a longer one.",
    ),
}
# A test loss is overfitted if it is that much above its best, by that many times its noise, and keeps on rising.
_LEAST_TESTS, _WORSE, _CLEARLY, _RISING = 8, 1.15, 5.0, 0.5
# A training loss has diverged if that share of what it had fallen is lost again, by that many times its noise.
_LEAST_POINTS, _LOST, _STANDS_OUT, _RISEN = 40, 0.5, 3.0, 1.5
_BINS = 20


def findings(run: RunData) -> list[str]:
    """Sentences with what is to be done, in order of weight."""
    found = _odd(run)
    losses = {subject: curves for subject, curves in run.panels.items() if is_loss(subject)}
    for curves in losses.values():
        diverged = [text for curve in curves if not _is_test(curve) and (text := divergence(curve))]
        overfitted = [text for curve in curves if _is_test(curve) and (text := overfitting(curve))]
        found += diverged or overfitted
    if run.times is None:
        found.append(
            f"This is read from {run.kind}, which does not say what the time was used for, what the data went through "
            'and with which versions: ms.record("run") among the callbacks writes that down.'
        )
        return found
    found += _time_findings(run.times)
    if run.times.samples.any() and run.times.samples_per_second() is None:
        found.append("The run is too short to tell how fast its steps are.")
    return found


def _is_test(curve: Curve) -> bool:
    return curve.label.endswith(EVALUATIONS)


def _odd(run: RunData) -> list[str]:
    odd = odd_values(run)
    if not odd:
        return []
    name, count, step = odd[0]
    times = "once" if count == 1 else f"{count:,} times"
    found = f"{name} was not finite {times}, first at step {step:,}"
    return [f"{found}: ms.callbacks.terminate_on_nan() stops such a run there."]


def overfitting(curve: Curve) -> str:
    """What to say of a test loss that was clearly better before; nothing if it was not.

    Noise makes the lowest of many values low by chance. So smoothed values are compared, the difference must be large
    against the noise between neighbours, and the values after the best must go up, not just lie higher.
    """
    values, steps = curve.values[curve.finite], curve.steps[curve.finite]
    if len(values) < _LEAST_TESTS:
        return ""
    smooth = _running_median(values, 2 if len(values) >= 15 else 1)
    best = int(np.argmin(smooth))
    after = values[best + 1 :]
    if len(after) < max(4, len(values) // 10) or smooth[best] <= 0:
        return ""
    now, lowest = float(np.median(values[-3:])), float(smooth[best])
    noise = _noise(values)
    is_worse = now > _WORSE * lowest and now - lowest > _CLEARLY * noise and values[-3:].min() > lowest + 2 * noise
    if not is_worse or _trend(after) < _RISING:
        return ""
    return (
        f"{curve.label} was best at step {steps[best]:,.0f} ({value_text(lowest)}) and is {now / lowest:.2g} times "
        f"that now: ms.callbacks.early_stopping({curve.label!r}, patience=5) stops there, ms.checkpoint(..., best=1, "
        f"monitor={curve.label!r}) keeps the best."
    )


def divergence(curve: Curve) -> str:
    """What to say of a training loss that rose for good; nothing if it did not."""
    values, steps = curve.values[curve.finite], curve.steps[curve.finite]
    if len(values) < _LEAST_POINTS:
        return ""
    parts = np.array_split(values, _BINS)
    middles = np.array([np.median(part) for part in parts])
    spread = max(
        1.4826 * float(np.median([np.median(np.abs(part - np.median(part))) for part in parts])), _noise(values)
    )
    low, tail = int(np.argmin(middles)), middles[-_BINS // 5 :]
    rise, fall = float(tail.min() - middles[low]), float(middles[0] - middles[low])
    is_much = rise > _LOST * fall and (middles[low] <= 0 or tail.min() > _RISEN * middles[low])
    if low >= _BINS - len(tail) or rise <= _STANDS_OUT * spread or rise <= 0 or not is_much:
        return ""
    step = np.array_split(steps, _BINS)[low][-1]
    return (
        f"{curve.label} was lowest around step {step:,.0f} ({value_text(float(middles[low]))}) and has risen to "
        f"{value_text(float(tail[-1]))} for good: a lower learning rate or optax.clip_by_global_norm helps, and "
        "ms.checkpoint keeps a state to return to."
    )


def _running_median(values: np.ndarray, half: int) -> np.ndarray:
    """The median of each value and its neighbours; beyond the ends, the last value goes on."""
    padded = np.pad(values, half, mode="edge")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1), axis=1)


def _noise(values: np.ndarray) -> float:
    """How much neighbours differ beyond their trend, as a standard deviation that outliers do not change."""
    steps = np.diff(values)
    return float(1.4826 * np.median(np.abs(steps - np.median(steps))) / np.sqrt(2))


def _trend(values: np.ndarray) -> float:
    """How far values go up: of all pairs, the share that rises less the share that falls (Kendall's tau)."""
    values = values[np.linspace(0, len(values) - 1, min(len(values), 200)).astype(int)]
    signs = np.sign(values[None, :] - values[:, None])
    pairs = len(values) * (len(values) - 1) / 2
    return float(np.triu(signs, 1).sum() / pairs)


def _time_findings(times: Times) -> list[str]:
    shares = {use: times.share(use) or 0.0 for use in times.uses}
    again = _compiled_again(times)
    found = [(again[0], again[1])] if again is not None else []
    for use, (much, text) in _USES.items():
        if shares.get(use, 0.0) >= much and not (use == "compiling" and again is not None):
            found.append((shares[use], text.format(f"{100 * shares[use]:.0f} %")))
    if found:
        return [text for _, text in sorted(found, key=lambda pair: -pair[0])]
    return [f"{100 * shares['steps']:.0f} % of the time was spent in the steps themselves: the data keep up with them."]


def _compiled_again(times: Times) -> tuple[float, str] | None:
    """The share of time in which programs were compiled in mid-run, and what to say of it; None if that is little.

    A first test compiles in the middle, too, and a last batch of a different size; so there must be several.
    """
    spent, total = times.uses.get("compiling"), float(times.seconds.sum())
    if spent is None or not len(times.first) or total <= 0:
        return None
    late = ~times.first & (spent > 0.05 * times.seconds)
    share = float(spent[late].sum()) / total
    if late.sum() < _LEAST_AGAIN or share < _MUCH_AGAIN:
        return None
    steps = times.ends[late].tolist()
    more = f" and {len(steps) - 3:,} more" if len(steps) > 3 else ""
    named = ", ".join(f"{step:,}" for step in steps[:3])
    return share, (
        f"Programs were compiled again around steps {named}{more}, {100 * share:.0f} % of the time: what changes its "
        "shape or is a new Python value at a step compiles anew. ms.PadTransform gives samples one shape, and "
        "JAX_LOG_COMPILES=1 says what compiles."
    )
