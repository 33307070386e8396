"""A run that is watched: what is read while it grows, who may ask for its page, and the page that follows it."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from urllib.parse import urlsplit

import numpy as np
import pytest
from browser import CHROMIUM, DRIVER, MISSING, browser
from hypothesis import given
from hypothesis import strategies as st

import millstream as ms
from millstream.report import live
from millstream.report._reading import RecordReader, read_run
from millstream.report.live import serve

DESCRIPTION = {
    "loop": "train",
    "date": 1.7e9,
    "from_step": 0,
    "versions": {},
    "state": {"rows": [], "arrays": 0, "count": 0, "nbytes": 0},
    "loaders": {},
    "tasks": [],
    "stop": None,
    "mixture": None,
    "skip": [],
}


def begin(step=0):
    return {"steps": step, "run": DESCRIPTION | {"from_step": step}}


def rows(first, last, offset=0.0):
    """Lines of a record, with a window at each tenth step and a test at each fifth."""
    for step in range(first, last + 1):
        units = {"steps": step, "samples": 4 * step, "epochs": step // 10, "time": step / 10 + offset}
        values = {"loss": 1 / step + offset} | ({"loss_test": 2 / step} if step % 5 == 0 else {})
        yield units | {"logged": values}
        if step % 10 == 0:
            spent = {"seconds": 1.0, "steps": 10, "samples": 40, "compiling": 0.0, "data": 0.1}
            yield units | {"spent": spent | {"evaluation": 0.0, "callbacks": 0.0}}


def encoded(lines):
    return b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)


def append(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(encoded(lines))


def assert_same(found, expected):
    assert found.history.names() == expected.history.names()
    for name in ("steps", "samples", "epochs", "time", *expected.history.names()):
        assert found.history.collect(name) == expected.history.collect(name), name
    assert (found.beginnings, found.ended) == (expected.beginnings, expected.ended)
    assert (found.times is None) == (expected.times is None)
    if found.times is not None and expected.times is not None:
        np.testing.assert_array_equal(found.times.seconds, expected.times.seconds)
        np.testing.assert_array_equal(found.times.steady, expected.times.steady)


# Reading


@given(st.lists(st.integers(0, 8000), max_size=8))
def test_a_record_that_is_read_in_pieces_is_the_record(tmp_path_factory, cuts):
    path = tmp_path_factory.mktemp("run") / "record.jsonl"
    data = encoded([begin(), *rows(1, 40), begin(40), *rows(41, 80), {"steps": 80, "ended": "stop"}])
    reader, sizes = RecordReader(path, "run"), [*sorted(cuts), len(data)]
    path.write_bytes(b"")
    for size in sizes:
        with path.open("r+b") as file:
            file.write(data[:size])
        reader.read()
        reader.run()
    assert not reader.read()
    assert_same(reader.run(), read_run(path))


def test_only_the_new_bytes_are_read(folder, monkeypatch):
    path, seen = folder / "record.jsonl", []
    append(path, [begin(), *rows(1, 1000)])
    reader = RecordReader(path, "run")
    assert reader.read()
    take = reader._take
    monkeypatch.setattr(reader, "_take", lambda data: (seen.extend(data.splitlines()), take(data)))
    assert not reader.read() and seen == []
    append(path, rows(1001, 1003))
    assert reader.read() and len(seen) == 3
    assert reader.run().history.elapsed().steps == 1003


def test_a_record_that_was_cut_and_written_again_is_read_again(folder):
    path = folder / "record.jsonl"
    append(path, [begin(), *rows(1, 100)])
    reader = RecordReader(path, "run")
    reader.read()
    path.write_bytes(encoded([begin(), *rows(1, 50), begin(50), *rows(51, 200, offset=0.5)]))  # longer than before
    assert reader.read()
    assert_same(reader.run(), read_run(path))
    os.truncate(path, len(encoded([begin(), *rows(1, 20)])))
    assert reader.read() and reader.run().history.elapsed().steps == 20


def test_a_record_that_was_set_apart_gives_way_to_the_new_one(folder):
    path = folder / "record.jsonl"
    append(path, [begin(), *rows(1, 30)])
    reader = RecordReader(path, "run")
    reader.read()
    os.rename(path, folder / "record-1.jsonl")
    append(path, [begin(), *rows(1, 30, offset=0.25)])
    assert reader.read()
    assert_same(reader.run(), read_run(path))


def test_a_line_that_is_no_line_of_a_record_is_named_by_its_number(folder):
    path = folder / "record.jsonl"
    append(path, [begin(), *rows(1, 9)])
    reader = RecordReader(path, "run")
    reader.read()
    for line in (b"no line\n", b"[1]\n", b'{"loss":1}\n'):
        path.write_bytes(encoded([begin(), *rows(1, 9)]) + line)
        with pytest.raises(ValueError, match=r"Line 11 of .*record\.jsonl is b'"):
            reader.read()
        assert reader.run().history.elapsed().steps == 9  # what was read before is there


# Serving


@contextlib.contextmanager
def served(*runs):
    with serve(runs) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server, path=None, host=None, method="GET", **headers):
    place = urlsplit(server.url)
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    with contextlib.closing(connection):
        headers = {"Host": host or place.netloc, **headers}
        connection.request(method, place.path if path is None else path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(live, "_OFTEN", 0.0)
    monkeypatch.setattr(live, "_SHARE", 1e9)


def test_only_its_address_on_this_machine_is_answered(folder):
    append(folder / "run" / "record.jsonl", [begin(), *rows(1, 10)])
    with served(folder / "run") as server:
        assert server.server_address[0] == "127.0.0.1"
        status, page, headers = ask(server)
        assert status == 200 and "<h1>run</h1>" in page
        assert "connect-src 'self'" in page and headers["Content-Security-Policy"] == "frame-ancestors 'none'"
        assert ask(server, host=f"localhost:{server.server_port}")[0] == 200
        for host in ("evil.example", f"evil.example:{server.server_port}", "127.0.0.1", "127.0.0.1:1"):
            assert ask(server, host=host)[:2] == (403, "Forbidden")
        secret = urlsplit(server.url).path
        for path in ("/", "//", secret[:-1], secret + "x", secret + "../", "/%C3%A9/", "/record.jsonl"):
            assert ask(server, path=path)[:2] == (404, "Not Found")
        assert ask(server, method="POST")[0] == 501
        with serve([folder / "run"]) as other:
            assert urlsplit(other.url).path != secret


def test_a_page_is_made_again_only_if_something_is_new(folder, at_once):
    path = folder / "run" / "record.jsonl"
    append(path, [begin(), *rows(1, 10)])
    with served(folder / "run") as server:
        tag = ask(server)[2]["ETag"]
        assert ask(server, **{"If-None-Match": tag})[:2] == (304, "")
        append(path, rows(11, 20))
        status, page, headers = ask(server, **{"If-None-Match": tag})
        assert status == 200 and headers["ETag"] != tag and "<strong>20</strong>" in page


def test_looking_takes_one_part_in_a_hundred_of_a_processor(folder, monkeypatch):
    append(folder / "run" / "record.jsonl", [begin(), *rows(1, 10)])
    page, clock = live.LivePage([folder / "run"]), [100.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: clock[0])
    times = iter([0.0, 0.5, 0.5, 0.6])
    monkeypatch.setattr(live.time, "thread_time", lambda: next(times))
    first = page.newest()
    append(folder / "run" / "record.jsonl", rows(11, 20))
    clock[0] += 49.0  # it took half a second
    assert page.newest() == first
    clock[0] += 2.0
    assert page.newest() != first


def test_a_run_may_begin_later_and_again(folder, at_once):
    path = folder / "run" / "record.jsonl"
    with served(folder / "run", folder / "other.csv") as server:
        assert "Nothing has been recorded yet." in ask(server)[1]
        append(path, [begin(), *rows(1, 10)])
        assert "<td >10\n" in ask(server)[1].replace("<br>", "\n")
        os.rename(path, folder / "run" / "record-1.jsonl")
        assert "<td >10\n" in ask(server)[1].replace("<br>", "\n")  # until there is a new one
        append(path, [begin(), *rows(1, 3)])
        assert "<td >3<" in ask(server)[1]
        (folder / "other.csv").write_text("steps,samples,epochs,time,date,loss\n7,28,,0.0,0.0,0.5\n")
        assert "<td >7<" in ask(server)[1]


def test_what_cannot_be_read_is_said_and_what_was_read_stays(folder, at_once):
    path = folder / "run" / "record.jsonl"
    append(path, [begin(), *rows(1, 10)])
    with served(folder / "run") as server:
        assert "reads records" not in ask(server)[1]
        with path.open("ab") as file:
            file.write(b"no <line>\n")
        page = ask(server)[1]
        assert "Line 13 of" in page and "no &lt;line&gt;" in page and "<strong>10</strong>" in page


def test_checkpoints_are_followed(folder, at_once):
    def step(state, batch):
        return ms.logs().add_metric("loss", 0.5), state + 1

    def train(stop, **options):
        ms.loop(0, range(40), {ms.every(1): step, ms.every(10): ms.checkpoint(folder)}, stop=stop, **options)

    train(10)
    with served(folder) as server:
        assert "the checkpoint of step 10" in ask(server)[1]
        with pytest.warns(UserWarning, match="cannot be started in the middle"):
            train(20, resume=folder)
        assert "the checkpoint of step 20" in ask(server)[1]


def test_wrong_arguments_are_named(folder):
    with pytest.raises(ValueError, match="millstream watch needs at least one run"):
        serve([])
    with pytest.raises(ValueError, match=r"millstream watch.* port .*65,?535.*70,?000"):
        serve([folder], port=70_000)
    with serve([folder]) as server:
        with pytest.raises(
            OSError, match=rf"millstream watch cannot listen on port {server.server_port}: .*Choose a different"
        ):
            serve([folder], port=server.server_port)


def command(*arguments):
    return [sys.executable, "-m", "millstream", *map(str, arguments)]


@pytest.mark.parametrize("words", [["watch"], ["report", "--watch"]])
def test_the_command_serves_until_it_is_interrupted_and_uses_no_device(folder, words):
    append(folder / "run" / "record.jsonl", [begin(), *rows(1, 10)])
    process = subprocess.Popen(
        command(*words, folder / "run"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "nothing"},  # whatever starts a backend fails
    )
    with process:
        assert process.stdout is not None and process.stderr is not None
        url = urlsplit(process.stdout.readline().split()[0])
        connection = http.client.HTTPConnection("127.0.0.1", url.port or 0, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", url.path)
            assert "<h1>run</h1>" in connection.getresponse().read().decode()
        process.send_signal(signal.SIGINT)
        assert (process.wait(60), process.stdout.read(), process.stderr.read()) == (0, "", "")
    assert sorted(path.name for path in folder.rglob("*")) == ["record.jsonl", "run"]  # it has written nothing


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["report", "run", "--port", "1"], "millstream report needs --watch with --port"),
        (["report", "run", "--watch", "-o", "x.html"], "not allowed with argument"),
        (["watch", "run", "--port", "70000"], "port"),
    ],
)
def test_options_that_do_not_go_together_are_named(arguments, text):
    done = subprocess.run(command(*arguments), capture_output=True, text=True)
    assert done.returncode == 2 and text in done.stderr and "Traceback" not in done.stderr


# In a browser

in_browser = pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason=MISSING)


@in_browser
def test_the_page_follows_its_runs_and_keeps_what_the_reader_has_chosen(folder, at_once):
    paths = [folder / name / "record.jsonl" for name in ("a", "b")]
    for number, path in enumerate(paths):
        append(path, [begin(), *rows(1, 100, offset=number)])
    with served(folder / "a", folder / "b", folder / "c") as server, browser() as window:
        window.size(1200, 700)
        window.open(server.url)

        def wait_until(script, what: bool | str = True):
            deadline = time.monotonic() + 120
            while (found := window.run(script)) != what:
                assert time.monotonic() < deadline, found
                time.sleep(0.05)

        wait_until("return document.getElementById('live').textContent.startsWith('live, as of')")
        window.run("document.querySelectorAll('#runs button')[1].click()")
        window.run("window.kept = document.querySelectorAll('figure')[0]; kept.scrollIntoView(); scrollBy(0, -100)")
        left, top, width = window.run(
            "const box = kept.querySelector('.area').getBoundingClientRect(); return [box.left, box.top, box.width]"
        )
        window.drag(left + width / 2, left + width - 2, top + 50)
        window.run("kept.focus({preventScroll: true})")
        window.press("ArrowLeft")
        state = (
            "return [scrollY, document.activeElement === kept, document.querySelectorAll('.raw.c1').length,"
            " kept.querySelector('.x-axis').textContent, kept.querySelector('.readout').textContent.slice(0, 8)]"
        )
        before = window.run(state)
        assert before[1] and before[2] == 0 and before[4]
        for number, path in enumerate(paths):
            append(path, rows(101, 300, offset=number))
        wait_until("return [...document.querySelectorAll('td')].some(cell => cell.textContent.startsWith('300'))")
        assert window.run(state) == before
        window.run("window.pressed = kept.querySelectorAll('.legend button')[1]; pressed.click(); pressed.focus()")
        append(paths[0], rows(301, 310))
        wait_until("return [...document.querySelectorAll('td')].some(cell => cell.textContent.startsWith('310'))")
        assert (
            window.run("return document.activeElement === pressed && pressed.getAttribute('aria-pressed')") == "false"
        )
        assert window.run("pressed.click(); return kept.querySelectorAll('.raw.s1').length") == 1
        window.run("document.getElementById('back').click(); document.querySelectorAll('#runs button')[1].click()")
        assert "300" in window.run("return kept.querySelector('.x-axis').textContent")
        assert window.run("return document.querySelectorAll('.raw.c1').length") > 0
        count = window.run("return document.querySelectorAll('figure').length")
        append(folder / "c" / "record.jsonl", [begin(), {**next(rows(1, 1)), "logged": {"new": 1.0}}, *rows(2, 30)])
        wait_until(f"return document.querySelectorAll('figure').length > {count}")
        assert {address.startswith(server.url) for address in window.requests()} == {True}
        assert window.messages() == []
        server.shutdown()
        server.server_close()
        wait_until("return document.getElementById('live').textContent", "millstream watch has ended")
