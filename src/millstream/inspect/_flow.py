"""A pipeline as a drawing: the plan, then the stages as boxes in the order of the flow, with bytes on the arrows.

Boxes of one place (threads, worker processes, remote readers, the device) have a frame around them; what runs on the
host has one color, what runs on the device another.
"""

import itertools
import textwrap
from typing import TYPE_CHECKING

from millstream.text.svg import COLORS, Svg, text_width, wrapped_text
from millstream.text.tables import size_text

if TYPE_CHECKING:
    from millstream.inspect._explain import ExplainedStage, Explanation

DEVICE, HOST = COLORS[0], COLORS[1]
_LEAVES = 8  # that a box lists
_WIDTH, _MARGIN, _PAD = 760, 12, 10
_ARROW = 30  # from one box to the next
_LINE = 16  # from one line of text to the next
_NAME, _LEAF, _NOTE = 13, 12, 11  # sizes of texts
_NARROW = 480  # a box with less room has everything below its name
_COLUMN = 330  # the least room that a part of several has
_SOURCES = 8  # boxes of a mixture's sources
_MOST_NOTES = 6  # lines
LETTERS = "┌─┐│└┘┬▼╔═╗║╚╝╤├◄"
_IN_ASCII = str.maketrans(LETTERS, "+-+|+++v+=+|++++<")
_STEM = 3  # the column of arrows in text


def is_on_device(where: str) -> bool:
    """Whether a stage at this place runs on the device, or on the way to it."""
    return where.startswith("device") or where == "on the way out"


def leaf_lines(row: "ExplainedStage") -> list[str]:
    """The arrays that leave a stage, a line for each."""
    leaves = [f"{path} {shape} {row.dtypes[path]}".lstrip() for path, shape in row.shapes.items()]
    if len(leaves) > _LEAVES:
        leaves = [*leaves[: _LEAVES - 1], f"and {len(leaves) - _LEAVES + 1:,} more"]
    return leaves


def _flow_words(row: "ExplainedStage") -> str:
    return "Python objects" if row.bytes_per_batch is None else f"{size_text(row.bytes_per_batch)} per batch"


def _notes(row: "ExplainedStage") -> list[str]:
    held = [] if not row.memory_bytes else [f"holds {size_text(row.memory_bytes)}"]
    return held + [note for note in row.note.split("; ") if note]


def _place_words(where: str) -> str:
    return where if is_on_device(where) or where.startswith("host") else f"host: {where}"


def _plan_lines(explanation: "Explanation") -> list[tuple[str, str]]:
    """What the box of the plan has: all but what other boxes say."""
    own = explanation.whole
    left_out = {"handed out"} | ({"sources"} if explanation.sources else set())
    return [(name, text) for name, text in own.items() if name not in left_out]


def flow_svg(explanation: "Explanation") -> Svg:
    """The drawing."""
    stages = ", then ".join(f"{row.stage} ({_place_words(row.where)})" for row in explanation.rows)
    svg = Svg(_WIDTH, 0, "A pipeline", f"The plan, then {stages}.")
    _legend(svg)
    svg.height = _flow(svg, explanation, _MARGIN, 34, _WIDTH - 2 * _MARGIN) + _MARGIN
    return svg


def _legend(svg: Svg) -> None:
    x = _MARGIN
    for color, words in (("currentColor", "plan"), (HOST, "host"), (DEVICE, "device")):
        svg.box(x, 12, 12, 12, color, fill=0.3, radius=3)
        svg.text(x + 18, 22, words, size=_NOTE)
        x += 34 + text_width(words, _NOTE)


def _flow(svg: Svg, explanation: "Explanation", x: float, y: float, width: float) -> float:
    """Draw an explanation into a column; where it ends."""
    y = _plan_box(svg, _plan_lines(explanation), x, y, width)
    stem = x + 34
    if explanation.parts:
        return _parts(svg, explanation.parts, x, y, width)
    words = "which samples come when"
    for where, group in itertools.groupby(explanation.rows, key=lambda row: row.where):
        y = _labelled_arrow(svg, stem, y, words, x + width)
        rows = list(group)
        sources = explanation.sources if rows[0] is explanation.rows[0] else {}
        y, words = _frame(svg, where, rows, sources, x, y, width), _flow_words(rows[-1])
    if handed := explanation.whole.get("handed out"):
        y = _labelled_arrow(svg, stem, y, words, x + width)
        y = _plan_box(svg, [("handed out", handed)], x, y, width)
    return y


def _labelled_arrow(svg: Svg, x: float, y: float, words: str, right: float) -> float:
    svg.arrow(x, y, y + _ARROW)
    svg.text(x + 12, y + _ARROW / 2 + 4, words, size=_NOTE, width=right - x - 12)
    return y + _ARROW


def _plan_box(svg: Svg, lines: list[tuple[str, str]], x: float, y: float, width: float) -> float:
    """A box of names and texts."""
    room = width - 2 * _PAD
    first = min(max((text_width(name, _NOTE, bold=True) for name, _ in lines), default=0) + 14, room / 2)
    below, texts = y + 7, []
    for name, text in lines:
        texts.append((x + _PAD, below + 11, name, True, first - 6))
        for line in wrapped_text(text, room - first, _NOTE, most=_MOST_NOTES):
            texts.append((x + _PAD + first, below + 11, line, False, room - first))
            below += _LINE
    svg.box(x, y, width, below - y + 8, fill=0.05, stroke=0.45, name="plan")
    for left, top, text, bold, most in texts:
        svg.text(left, top, text, size=_NOTE, bold=bold, width=most)
    return below + 8


def _frame(
    svg: Svg, where: str, rows: "list[ExplainedStage]", sources: dict[str, str], x: float, y: float, width: float
) -> float:
    """The stages of one place, in a frame."""
    color = DEVICE if is_on_device(where) else HOST
    height = _inside_frame(None, rows, sources, color, x, y + 26, width) - y
    svg.box(x, y, width, height, color, fill=0.05, stroke=0.7, dashed=True, radius=8, name="frame")
    svg.box(x + _PAD, y + 9, 9, 9, color, fill=0.9, stroke=0, radius=2)
    svg.text(x + _PAD + 15, y + 18, _place_words(where), size=12, bold=True, width=width - 2 * _PAD - 15)
    return _inside_frame(svg, rows, sources, color, x, y + 26, width)


def _inside_frame(
    svg: Svg | None,
    rows: "list[ExplainedStage]",
    sources: dict[str, str],
    color: str,
    x: float,
    y: float,
    width: float,
) -> float:
    """Draw the boxes of a frame, or only measure them; where the frame ends."""
    left, room = x + _PAD, width - 2 * _PAD
    if sources:
        y = _source_boxes(svg, sources, color, left, y, room)
    for number, row in enumerate(rows):
        if number:
            if svg is not None:
                _labelled_arrow(svg, x + 34, y, _flow_words(rows[number - 1]), left + room)
            y += _ARROW
        y = _stage_box(svg, row, color, left, y, room)
    return y + _PAD


def _stage_box(svg: Svg | None, row: "ExplainedStage", color: str, x: float, y: float, width: float) -> float:
    """A stage: its name and notes on the left, and what leaves it on the right, or below if there is little room."""
    room = width - 2 * _PAD
    beside = width >= _NARROW
    first = room * 0.48 if beside else room
    second = room - first - 10 if beside else room
    left = [(_NAME, line) for line in wrapped_text(row.stage, first, _NAME, mono=True, most=2)]
    for note in _notes(row):
        left += [(_NOTE, line) for line in wrapped_text(note, first, _NOTE, most=_MOST_NOTES)]
    leaves = [line for leaf in leaf_lines(row) for line in wrapped_text(leaf, second, _LEAF, mono=True, most=2)]
    names = sum(size == _NAME for size, _ in left)
    if not beside:
        left = [*left[:names], *((_LEAF, leaf) for leaf in leaves), *left[names:]]
    height = _LINE * max(len(left), len(leaves) if beside else 0, 1) + 12
    if svg is not None:
        svg.box(x, y, width, height, color, fill=0.13, name="stage")
        for number, (size, line) in enumerate(left):
            is_code = size != _NOTE
            at = y + 18 + _LINE * number
            svg.text(x + _PAD, at, line, size=size, bold=size == _NAME, mono=is_code, faint=not is_code)
        for number, leaf in enumerate(leaves if beside else []):
            svg.text(x + _PAD + first + 10, y + 18 + _LINE * number, leaf, size=_LEAF, mono=True)
    return y + height


def _source_boxes(svg: Svg | None, sources: dict[str, str], color: str, x: float, y: float, width: float) -> float:
    """The sources of a mixture side by side, with arrows to where they come together."""
    shown = dict(itertools.islice(sources.items(), _SOURCES if len(sources) <= _SOURCES else _SOURCES - 1))
    if len(shown) < len(sources):
        shown["\u2026"] = f"and {len(sources) - len(shown)} more"
    columns = min(len(shown), 4 if width >= _NARROW else 2)
    each = (width - 10 * (columns - 1)) / columns
    names = list(shown)

    def left_of(column: int) -> float:
        return x + column * (each + 10)

    for start in range(0, len(names), columns):
        row = names[start : start + columns]
        lines = {name: wrapped_text(shown[name], each - 2 * _PAD, _NOTE, most=4) for name in row}
        height = 12 + _LINE * (1 + max(map(len, lines.values())))
        for number, name in enumerate(row):
            left = left_of(number)
            if svg is not None:
                svg.box(left, y, each, height, color, fill=0.13, name="source")
                svg.text(left + _PAD, y + 18, name, size=_NAME, bold=True, mono=True, width=each - 2 * _PAD)
                for line, text in enumerate(lines[name]):
                    svg.text(left + _PAD, y + 18 + _LINE * (line + 1), text, size=_NOTE, faint=True)
        if svg is not None:
            _join(svg, [left_of(n) + each / 2 for n in range(len(row))], y + height, y + height + 12, x + 24)
        y += height + 12
    if svg is not None:
        svg.arrow(x + 24, y, y + 26)
        svg.text(x + 36, y + 17, "mixed", size=_NOTE)
    return y + 26


def _join(svg: Svg, xs: list[float], top: float | list[float], bottom: float, to: float) -> None:
    """Lines down from some places, and then across to where they come together."""
    tops = top if isinstance(top, list) else [top] * len(xs)
    path = "".join(f"M{x:.1f},{start:.1f}V{bottom:.1f}" for x, start in zip(xs, tops, strict=True))
    svg.line(f"{path}M{max(xs):.1f},{bottom:.1f}H{to:.1f}", width=1.4, opacity=0.7)


def _parts(svg: Svg, parts: "dict[str, Explanation]", x: float, y: float, width: float) -> float:
    """Several explanations side by side, as far as there is room, whose batches come together below."""
    columns = max(1, min(len(parts), int(width // _COLUMN)))
    inner = width - 20  # a line on the left goes down to where all come together
    each = (inner - 12 * (columns - 1)) / columns
    names, tops = list(parts), []
    for start in range(0, len(names), columns):
        y += 14
        ends = []
        for number, name in enumerate(names[start : start + columns]):
            left = x + 20 + number * (each + 12)
            svg.text(left + 2, y + 12, name, size=_NAME, bold=True, width=each - 4)
            ends.append((left + 34, _flow(svg, parts[name], left, y + 20, each)))
        y = max(end for _, end in ends) + 12
        tops.append(y)
        _join(svg, [stem for stem, _ in ends], [end for _, end in ends], y, x + 6)
    svg.line(f"M{x + 6:.1f},{tops[0]:.1f}V{y:.1f}", width=1.4, opacity=0.7)
    svg.arrow(x + 6, y, y + 20)
    return _plan_box(svg, [("batches", "of all of them, when the plan says")], x, y + 20, width)


def flow_text(explanation: "Explanation", width: int, *, ascii_only: bool = False) -> str:
    """The drawing as text.

    Args:
        explanation: What to draw.
        width: The most characters of a line.
        ascii_only: Whether boxes are drawn with the letters of every terminal.
    """
    lines = _text_lines(explanation, width)
    text = "\n".join("".join(char if char.isprintable() else "?" for char in line) for line in lines)
    return text.translate(_IN_ASCII) if ascii_only else text


def _text_lines(explanation: "Explanation", width: int) -> list[str]:
    named = _named_lines(_plan_lines(explanation), width - 4)
    lines = _text_box("plan", "", named, width, enters=False, leaves=not explanation.parts)
    if explanation.parts:
        for name, part in explanation.parts.items():
            title = _cut(f"── {name} ", width)
            lines += ["", title + "─" * (width - len(title)), *_text_lines(part, width)]
        return lines
    words = "which samples come when"
    for number, row in enumerate(explanation.rows):
        lines += _text_arrow(words, width)
        if number == 0:
            lines += [_cut(f"{' ' * _STEM}├◄─ {name}: {text}", width) for name, text in explanation.sources.items()]
        inside = [line for leaf in leaf_lines(row) for line in _wrapped(leaf, width - 4)]
        inside += _wrapped("; ".join(_notes(row)), width - 4)
        lines += _text_box(row.stage, row.where, inside, width, double=is_on_device(row.where))
        words = _flow_words(row)
    if handed := explanation.whole.get("handed out"):
        lines += [*_text_arrow(words, width), f"{' ' * _STEM}▼", *_wrapped(f"handed out {handed}", width)]
    return lines


def _text_arrow(words: str, width: int) -> list[str]:
    return [_cut(f"{' ' * _STEM}│ {words}", width)]


def _text_box(
    title: str,
    place: str,
    inside: list[str],
    width: int,
    *,
    double: bool = False,
    enters: bool = True,
    leaves: bool = True,
) -> list[str]:
    """A box with a title and, at its right, a place; an arrow enters it and another one leaves it."""
    left, line, right, side, low_left, low_right, out = "╔═╗║╚╝╤" if double else "┌─┐│└┘┬"
    first = f"{left}{line * (_STEM - 1)}{'▼' if enters else line}{line} "
    last = f" {_cut(place, width // 3)} {line}{right}" if place else f"{line}{right}"
    title = _cut(" ".join(title.split()), width - len(first) - len(last) - 1)
    top = f"{first}{title} ".ljust(width - len(last), line) + last
    body = [f"{side} {text.ljust(width - 4)} {side}" for text in inside]
    bottom = f"{low_left}{line * (_STEM - 1)}{out if leaves else line}".ljust(width - 1, line) + low_right
    return [top, *body, bottom]


def _named_lines(lines: list[tuple[str, str]], width: int) -> list[str]:
    """Names, and texts beside them."""
    first = min(max((len(name) for name, _ in lines), default=0), width // 3)
    found = []
    for name, text in lines:
        parts = _wrapped(text, width - first - 2) or [""]
        found.append(f"{_cut(name, first).ljust(first)}  {parts[0]}")
        found += [f"{' ' * first}  {part}" for part in parts[1:]]
    return found


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."
