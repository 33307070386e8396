"""Write the report of what is stored in results.json: RESULTS.md, the charts, and the table in the README.

Nothing is measured here: `python benchmarks/report.py` gives the same from the same results. With `--check` nothing is
written, either: it says what is not as the results give it.
"""

import argparse
import pathlib
import sys

import _case
import _charts
import _headline
import _result
import _tables
from _result import Result, Results

FOLDER = pathlib.Path(__file__).parent
RESULTS, REPORT, CHARTS = FOLDER / "results.json", FOLDER / "RESULTS.md", FOLDER / "charts"
README = FOLDER.parent / "README.md"
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
INTRODUCTION = """# What was measured

Written by `make bench` from `results.json`; nothing here is typed by hand. Contenders of a table were measured in turn,
after a round that does not count. A figure is the median of the rounds, beside the least and the most. CPU is that of
all processes of a contender, unless the text says otherwise. "Of ours" is the time as a multiple of the contender in
bold: above 1 ours is faster, below 1 it is slower. Where a step has a bare one beside it, what counts is what the loop
adds to it, in the best rounds of both."""


def markdown(results: Results) -> str:
    """All of RESULTS.md."""
    parts = [INTRODUCTION, _machines(results.cases)]
    parts += _doubts(results)
    parts += ["## At a glance", _headline.headline(results.cases)]
    if _charts.charted(results.cases):
        parts.append(_chart(_charts.OVERVIEW, "Time of other libraries as a multiple of ours"))
    parts += ["## Targets that were missed", _missed(results.cases), "## Cases"]
    parts += [_section(name, results) for name in sorted(results.cases)]
    return "\n\n".join(parts) + "\n"


def readme_block(results: Results) -> str:
    """What stands between the two marks of the README: nothing that was only tried."""
    measured = {name: result for name, result in results.cases.items() if not result.quick}
    if not measured:
        return "\n\n".join([BEGIN, "Not measured yet: `make bench` does it and writes its table here.", END])
    few = {name: result for name, result in measured.items() if name in _headline.FEW}
    parts = [BEGIN, _headline.headline(few, _headline.FEW)]
    if few:
        parts.append(f"![Time of other libraries as a multiple of Millstream's](benchmarks/charts/{_charts.FEW}.png)")
    more = (
        "Above 1 Millstream is faster, below 1 it is slower. Each library runs with its fastest settings. Times are\n"
        "medians; for loops, what they add in their best rounds. All cases, spread, CPU time and the targets that\n"
        "were missed: [benchmarks/RESULTS.md](benchmarks/RESULTS.md). To measure again: `make bench`."
    )
    told = "\n".join([_machines(few), *_doubts(results), more])
    return "\n\n".join([*parts, told, END])


def _doubts(results: Results) -> list[str]:
    """Why these figures are not what a whole run would give."""
    quick = [name for name, result in results.cases.items() if result.quick]
    told = [f"**{len(quick)} cases were only tried with --quick: their figures mean nothing.**"] if quick else []
    if results.pending:
        told.append(f"**Not measured anew yet: {', '.join(results.pending)}.**")
    return told


def with_block(readme: str, block: str) -> str:
    """A README with this block in the place of its own."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"The README needs the lines {BEGIN} and {END}, between which its table is written.")
    return before + block + after


def texts(results: Results) -> dict[pathlib.Path, str]:
    """The files that hold nothing but what the results give."""
    return {REPORT: markdown(results), README: with_block(README.read_text(), readme_block(results))}


def write(results: Results) -> None:
    for path, text in texts(results).items():
        path.write_text(text)
    _charts.draw(results.cases, CHARTS)


def differing(results: Results) -> list[str]:
    """The files that are not as the results give them, and the charts that are missing or too many."""
    wrong = [path.name for path, text in texts(results).items() if not path.exists() or path.read_text() != text]
    drawn = {path.stem for path in CHARTS.glob("*.png")}
    return wrong + sorted(f"charts/{name}.png" for name in drawn ^ set(_charts.charted(results.cases)))


def _machines(cases: dict[str, Result]) -> str:
    """What was measured on; case by case where that is not the same for all."""
    names: dict[str, list[str]] = {}
    for name, result in cases.items():
        if result.machine:
            versions = (f"{package} {version}" for package, version in result.machine.items())
            names.setdefault(", ".join(versions), []).append(name)
    if len(names) == 1:
        return f"Machine: {next(iter(names))}."
    return "\n".join(f"- {told}: {', '.join(sorted(found))}." for told, found in names.items())


def _missed(cases: dict[str, Result]) -> str:
    rows = [
        (f"[{name}](#{name})", table.title, bar.text, *_tables.found_and_asked(bar))
        for name, result in sorted(cases.items())
        for table in result.tables
        for bar in table.bars
        if not bar.met
    ]
    count = sum(len(table.bars) for result in cases.values() for table in result.tables)
    told = f"{len(rows)} of {count}." if rows else f"None of {count}."
    return f"{told}\n\n{_tables.grid(('case', '', 'target', 'found', 'asked'), rows, 'lllrr')}" if rows else told


def _section(name: str, results: Results) -> str:
    result = results.cases[name]
    parts = [f"### {name}", result.title if not result.about else f"{result.title} {result.about}"]
    if result.failed:
        return "\n\n".join([*parts, f"Not measured: {result.failed}."])
    if name in _charts.charted(results.cases):
        parts.append(_chart(name, result.title))
    parts += map(_tables.markdown, result.tables)
    return "\n\n".join([*parts, f"{result.seconds:.0f} s; load average {result.load:g} before it."])


def _chart(name: str, text: str) -> str:
    return f"![{text.rstrip('.')}](charts/{name}.png)"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the report of the stored results.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing, and say what is not as the results give it"
    )
    results = _result.load(RESULTS)
    if parser.parse_args().check:
        wrong = differing(results)
        print(
            f"Not what results.json gives: {', '.join(wrong)}. Run report.py." if wrong else "As results.json gives it."
        )
        return min(len(wrong), 1)
    write(results)
    print(f"Wrote RESULTS.md, {len(_charts.charted(results.cases))} charts and the README's table.")
    missing = sorted(set(_case.names()) - set(results.cases))
    if missing:
        print(f"Without results: {', '.join(missing)}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
