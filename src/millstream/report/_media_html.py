"""Images, histograms and first samples on the page."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, TypeVar

import numpy as np

from millstream.report._chart import Axis, linear_axis, steps_axis, value_text
from millstream.report._html_table import html_table
from millstream.report._media import Media, StepHistogram, checked_png

_MOST_ENTRIES = 24  # of a section
_MOST_IMAGES, _MOST_BANDS = 24, 240  # of an entry
_BANDS = ((0.0, 1.0), (0.1, 0.9), (0.25, 0.75))  # shares of the values between which each band lies
T = TypeVar("T")


def media_sections(media: Media, room: int) -> list[tuple[str, str]]:
    """The title and content of each section.

    Args:
        media: What there is.
        room: How many characters all images may have.
    """
    sections = []
    if media.samples is not None:
        sections.append(("First samples", _samples(media.samples)))
    if media.images:
        sections.append(("Images", "".join(_strips(media.images, room)) + _left_out(media.images)))
    if media.histograms:
        shown = sorted(media.histograms)[:_MOST_ENTRIES]
        figures = "".join(_bands(name, media.histograms[name]) for name in shown)
        rest = _left_out(media.histograms)
        sections.append(("Histograms", f'<div class="charts inside">{figures}</div>{rest}'))
    if media.full_at is not None and sections:
        size = f"{media.room / 1e6:.0f} MB"
        note = f"A record keeps {size} of images and histograms. From step {media.full_at:,} on there are no more."
        sections[-1] = (sections[-1][0], sections[-1][1] + f'<p class="note inside">{escape(note)}</p>')
    return sections


def some_of(items: Sequence[T], most: int) -> list[T]:
    """Some items, the first and the last among them, evenly."""
    if len(items) <= most:
        return list(items)
    return [items[number] for number in np.linspace(0, len(items) - 1, most).round().astype(int)]


def _samples(samples: dict[str, Any]) -> str:
    words: list[dict[str, str]] = samples["words"]
    if samples.get("missing"):
        return f'<p class="note inside">They could not be read: {escape(str(samples["missing"]))}</p>'
    images = {str(name): pngs for name, pngs in samples["images"].items()}
    if not images:
        names = list(dict.fromkeys(name for cells in words for name in cells))
        return html_table(names, [[cells.get(name, "") for name in names] for cells in words])
    pictures = []
    for number in range(max(map(len, images.values()))):
        cells = words[number] if number < len(words) else {}
        label = ", ".join(f"{name} {text}" for name, text in cells.items())
        shown = "".join(
            _image(pngs[number], f"{name} of sample {number}") for name, pngs in images.items() if number < len(pngs)
        )
        pictures.append(f"<figure>{shown}<figcaption>{escape(label)}</figcaption></figure>")
    return f'<div class="strip grid">{"".join(pictures)}</div>'


def _image(png: Any, words: str) -> str:
    return f'<img alt="{escape(words)}" src="data:image/png;base64,{checked_png(png)}">'


def _left_out(entries: Mapping[str, object]) -> str:
    rest = len(entries) - _MOST_ENTRIES
    return f'<p class="note inside">{rest:,} more are in the record.</p>' if rest > 0 else ""


def _strips(images: Mapping[str, list[tuple[int, str]]], room: int) -> Iterator[str]:
    """A row of images for each name, as far as there is room."""
    for name, found in sorted(images.items())[:_MOST_ENTRIES]:
        chosen = some_of(found, _MOST_IMAGES)
        while chosen and sum(len(png) for _, png in chosen) > room:
            chosen = some_of(chosen, len(chosen) // 2)
        room -= sum(len(png) for _, png in chosen)
        count = f"{len(found):,}" if len(chosen) == len(found) else f"{len(chosen):,} of {len(found):,}"
        figures = "".join(
            f"<figure>{_image(png, f'{name} at step {step:,}')}<figcaption>step {step:,}</figcaption></figure>"
            for step, png in chosen
        )
        yield (
            f'<h4>{escape(name)} <span class="caption">{count}</span></h4><div class="strip scroll" tabindex="0" '
            f'role="region" aria-label="{escape(name)}">{figures}</div>'
        )


def _bands(name: str, found: list[StepHistogram]) -> str:
    """How the values of an entry are spread, from step to step."""
    chosen = some_of(found, _MOST_BANDS)
    shares = np.array([share for band in _BANDS for share in band] + [0.5])
    values = np.stack([each.quantiles(shares) for each in chosen])
    steps = np.array([each.step for each in chosen], np.float64)
    x, y = steps_axis(float(steps[0]), float(steps[-1])), linear_axis(values)
    across, down = x.place(steps), 1 - y.place(values)
    known = np.isfinite(down).all(axis=1)
    if len(steps) == 1:  # a band needs two ends
        across, down, known = np.array([0.4, 0.6]), np.repeat(down, 2, axis=0), np.repeat(known, 2)
    drawn = "".join(
        f'<path class="band c0" d="{_area(across[known], down[known, 2 * number], down[known, 2 * number + 1])}"/>'
        for number in range(len(_BANDS))
    )
    odd = sum(each.odd for each in found)
    note = f'<p class="alarm">{odd:,} values were not finite.</p>' if odd else ""
    newest = chosen[-1]
    low, middle, high = (value_text(value) for value in newest.quantiles(np.array([0.0, 0.5, 1.0])))
    words = f"{name} at step {newest.step:,}: from {low} to {high}, the median is {middle}."
    return (
        f'<figure class="chart"><figcaption><h4>{escape(name)}</h4><span class="caption">all, 80 % and half of the '
        f'values, and their median</span></figcaption><div class="plot"><svg class="y-axis" aria-hidden="true">'
        f'{"".join(_y_texts(y))}</svg><div class="area still"><svg class="curves" viewBox="0 0 1000 1000" '
        f'preserveAspectRatio="none" role="img" aria-label="{escape(words)}">{drawn}'
        f'<path class="raw wide c0" d="{_line(across[known], down[known, -1])}"/></svg></div>'
        f'<svg class="x-axis" aria-hidden="true">{"".join(_x_texts(x))}</svg></div>{note}</figure>'
    )


def _line(across: np.ndarray, down: np.ndarray) -> str:
    points = "L".join(f"{1000 * x:.1f},{1000 * y:.1f}" for x, y in zip(across, down, strict=True))
    return f"M{points}" if points else ""


def _area(across: np.ndarray, low: np.ndarray, high: np.ndarray) -> str:
    edge = _line(np.concatenate([across, across[::-1]]), np.concatenate([low, high[::-1]]))
    return f"{edge}Z" if edge else ""


def _y_texts(axis: Axis) -> Iterator[str]:
    for value, text in axis.ticks:
        place = 1 - float(axis.place(np.array(value)))
        yield f'<text x="100%" dx="-6" y="{100 * place:.2f}%" dy=".32em">{escape(text)}</text>'


def _x_texts(axis: Axis) -> Iterator[str]:
    for value, text in axis.ticks:
        place = float(axis.place(np.array(value)))
        anchor = "start" if place < 0.04 else "end" if place > 0.96 else "middle"
        yield f'<text x="{100 * place:.2f}%" y="14" text-anchor="{anchor}">{escape(text)}</text>'
