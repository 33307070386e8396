"""Draw the pictures of a run: the program of the README is run in a terminal, and its bar and its report are kept.

`python docs/pictures/draw.py` writes bar.svg, report-light.png and report-dark.png beside it, and of three runs in
comparison runs-light.png and runs-dark.png. It needs pyte, chromium and chromedriver.
"""

import fcntl
import html
import os
import pathlib
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
import time

import pyte

FOLDER = pathlib.Path(__file__).parent
ROOT = FOLDER.parents[1]
COLUMNS, ROWS, LINE = 110, 10, 22
FRAMES, SECONDS, HOLD = 60, 6.0, 3.0
BEGIN = re.compile(r"```python\n(.*?)```", re.DOTALL)

COMPARED = """
import sys
import jax, jax.numpy as jnp, millstream as ms

def loader(split):
    data = ms.datasets.DigitsDataset(split).as_array_dict()
    return ms.DataLoader([ms.ArraySampleSource(data), ms.BatchTransform(64)])

def measured(weights, batch):
    rows, mask = batch
    scores = jax.nn.log_softmax(rows["image"].reshape(64, 64) / 16 @ weights)
    count = jnp.maximum(jnp.sum(mask), 1)
    losses = -jnp.take_along_axis(scores, rows["label"][:, None], axis=1)[:, 0]
    right = jnp.argmax(scores, axis=1) == rows["label"]
    return jnp.sum(losses * mask) / count, jnp.sum(right * mask) / count

def logged(loss, accuracy):
    return ms.logs().add_metric("loss", loss).add_metric("accuracy", accuracy)

@jax.jit
def train_step(weights, batch):
    (loss, accuracy), gradient = jax.value_and_grad(measured, has_aux=True)(weights, batch)
    return logged(loss, accuracy), weights - float(sys.argv[1]) * gradient

@jax.jit
def test_step(weights, batch):
    return logged(*measured(weights, batch))

ms.train_loop(
    jnp.zeros((64, 10)),
    loader("train"),
    {ms.on_train_step: train_step, ms.on_test_step: test_step},
    test_dataset=loader("test"),
    callbacks=[ms.record(f"rate-{sys.argv[1]}")],
    stop=ms.at(epochs=20),
    key=jax.random.key(0),
)
"""

sys.path.insert(0, str(ROOT / "tests"))


def program() -> str:
    """All blocks of the README, as one program."""
    return "\n".join(BEGIN.findall((ROOT / "README.md").read_text()))


def record(folder: pathlib.Path) -> list[tuple[float, str]]:
    """Run the program in a terminal: what it showed, and when."""
    (folder / "train.py").write_text(program())
    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "train.py"], cwd=folder, stdout=terminal, stderr=terminal
    )
    os.close(terminal)
    shown: list[tuple[float, str]] = []
    try:
        while data := os.read(main, 1 << 16):
            shown.append((time.monotonic(), data.decode()))
    except OSError:  # how Linux says that a terminal has been closed
        pass
    if process.wait():
        raise RuntimeError("".join(text for _, text in shown))
    return shown


def frames(shown: list[tuple[float, str]]) -> list[tuple[float, list[str]]]:
    """What the terminal shows of the training, and when; of many moments in between, some."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream, found = pyte.Stream(screen), []
    for moment, text in shown:
        stream.feed(text)
        lines = [line.rstrip() for line in screen.display]
        begin = next((row for row, line in enumerate(lines) if "epoch" in line), None)
        if begin is not None and (not found or found[-1][1] != lines[begin:]):
            found.append((moment, lines[begin:]))
    gap = (found[-1][0] - found[0][0]) / FRAMES
    kept = found[:1]
    for moment, lines in found[1:]:
        if moment - kept[-1][0] >= gap:
            kept.append((moment, lines))
    return [*kept, found[-1]]


def bar(shown: list[tuple[float, str]]) -> str:
    """The recording as an SVG that plays by itself; without animation it shows the end."""
    states = frames(shown)
    begin, end = states[0][0], states[-1][0]
    total = SECONDS + HOLD
    starts = [
        100 * SECONDS / total * (moment - begin) / max(end - begin, 1e-9)
        for moment, _ in states
    ]
    styles, texts = [], []
    for number, (start, (_, lines)) in enumerate(zip(starts, states, strict=True)):
        final = number == len(states) - 1
        until = 100.0 if final else starts[number + 1]
        show = f"{start:.2f}%{{visibility:visible}}"
        styles.append(
            f"@keyframes f{number}{{0%{{visibility:hidden}}{show}{until:.2f}%{{visibility:hidden}}}}"
        )
        state = "" if final else ";visibility:hidden"
        style = f"animation:f{number} {total:g}s step-end infinite{state}"
        rows = [
            f'<text x="20" y="{72 + LINE * row}">{html.escape(line)}</text>'
            for row, line in enumerate(lines)
            if line
        ]
        texts.append(f'<g style="{style}">{"".join(rows)}</g>')
    width, height = 20 * 2 + int(COLUMNS * 8.45), 72 + LINE * ROWS
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"
  aria-label="A progress bar: a line of every epoch stays, and below them is the current one">
<style>text{{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:#e6edf3;
white-space:pre}}
{"".join(styles)}</style>
<rect width="{width}" height="{height}" rx="8" fill="#161b22"/>
<circle cx="22" cy="18" r="5" fill="#f47067"/><circle cx="40" cy="18" r="5" fill="#dfb061"/>
<circle cx="58" cy="18" r="5" fill="#57ab5a"/>
<text x="20" y="48"><tspan fill="#57ab5a">$</tspan> python train.py</text>
{"".join(texts)}
</svg>
"""


def report(folder: pathlib.Path) -> None:
    """Pictures of the top of the page about the run, for light and for dark themes."""
    from browser import browser

    subprocess.run(
        [sys.executable, "-m", "millstream", "report", str(folder / "run")], check=True
    )
    with browser() as window:
        for scheme in ("light", "dark"):
            window.size(1180, 776)
            window.scheme(scheme)
            window.open(folder / "run" / "report.html")
            (FOLDER / f"report-{scheme}.png").write_bytes(window.screenshot())


def comparison(folder: pathlib.Path) -> None:
    """Pictures of the charts of three runs, with values under the pointer."""
    from browser import browser

    rates = ("0.0003", "0.001", "0.003")
    for rate in rates:
        subprocess.run([sys.executable, "-c", COMPARED, rate], cwd=folder, check=True)
    page = folder / "runs.html"
    names = [f"rate-{rate}" for rate in rates]
    subprocess.run(
        [sys.executable, "-m", "millstream", "report", *names, "-o", page],
        cwd=folder,
        check=True,
    )
    with browser() as window:
        for scheme in ("light", "dark"):
            window.size(1180, 420)
            window.scheme(scheme)
            window.open(page)
            left, top, width = window.run(
                "document.querySelector('.graphs').scrollIntoView();"
                "const box = document.querySelector('.area').getBoundingClientRect();"
                "return [box.left, box.top, box.width]"
            )
            window.move(left + 0.25 * width, top + 60)
            (FOLDER / f"runs-{scheme}.png").write_bytes(window.screenshot())


def main() -> None:
    """Draw them all."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (FOLDER / "bar.svg").write_text(bar(record(folder)))
        report(folder)
        comparison(folder)


if __name__ == "__main__":
    main()
