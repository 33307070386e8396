"""The site builds without a warning, describes every public name, and needs nothing from elsewhere."""

import ast
import html
import importlib
import importlib.util
import inspect
import os
import pathlib
import pkgutil
import re
import subprocess
import sys
import time

import pytest
from browser import CHROMIUM, DRIVER, MISSING, browser

import millstream as ms
from millstream import dialects, integrations, report
from millstream.cli.main import main

ROOT = pathlib.Path(__file__).parent.parent
ANCHOR = re.compile(r'\bid="([^"]+)"')
DESCRIBED = re.compile(r'<h\d id="(millstream\.[\w.]+)" class="doc doc-heading">')


@pytest.fixture(scope="module")
def folder(tmp_path_factory, once_per_run):
    """The site as a folder of files."""
    pytest.importorskip("mkdocstrings", reason="a tool of development, which not every environment has")
    return once_per_run(lambda: build_site(tmp_path_factory.mktemp("site")))


@pytest.fixture(scope="module")
def site(folder):
    """The files of the site by path: pages with their text, others with none."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_text() if path.suffix == ".html" else "" for path in files}


def build_site(folder):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def modules_of(room):
    names = (module.name for module in pkgutil.walk_packages(room.__path__, f"{room.__name__}."))
    return [importlib.import_module(name) for name in names if "._" not in name]


def exported(module):
    """What a module offers: its `__all__`, or what it defines and what it imports under a name of its own."""
    if hasattr(module, "__all__"):
        return set(module.__all__)
    names = set()
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname for alias in node.names if alias.asname is not None}
    return {name for name in names if not name.startswith("_")}


def public_objects():
    """Every public name with what it names, once; named schedules have one list, in their room."""
    spaces = [room for room in [getattr(ms, name) for name in ms.__all__] if inspect.ismodule(room)]
    names = {room.__name__.rpartition(".")[2] for room in spaces}
    top = {name for name in ms.__all__ if not name.startswith("on_")} - names
    found = {f"millstream.{name}": getattr(ms, name) for name in top}
    for room in [*spaces, report, *modules_of(integrations)]:
        found |= {f"{room.__name__}.{name}": getattr(room, name) for name in exported(room) - top}
    return found | {module.__name__: module for module in modules_of(integrations)}


def descriptions(site):
    """The HTML between the heading of a name and the next such heading."""
    found = {}
    for page in site.values():
        parts = DESCRIBED.split(page)
        for name, text in zip(parts[1::2], parts[2::2], strict=True):
            assert name not in found, f"{name} is described twice"
            found[name] = text
    return found


def words(text):
    """A text without tags, marks of code and spaces."""
    return re.sub(r"[`*\\\s]", "", html.unescape(re.sub(r"<[^>]*>", "", text)))


def test_every_public_name_is_described_on_a_page_of_the_api(site):
    assert sorted(public_objects().keys() - descriptions(site).keys()) == []


def test_a_description_has_signature_docstring_and_parameters(site):
    found = descriptions(site)
    checked = 0
    for name, member in public_objects().items():
        if not (inspect.isclass(member) or inspect.isroutine(member) or inspect.ismodule(member)):
            continue
        docstring = inspect.cleandoc(member.__doc__ or "")
        assert words(docstring.partition("\n\n")[0]) in words(found[name]), f"{name} is shown without its docstring"
        if not inspect.ismodule(member) and "Args:\n" in docstring:
            checked += 1
            assert "doc-signature" in found[name], f"{name} is shown without its signature"
            first = re.search(r"^ *Args:\n +(\**)(\w+)", docstring, re.MULTILINE)
            assert first is not None, f"{name} names no argument"
            spelled = (f"<code>{first[1]}{first[2]}</code>", f"<code>{first[2]}</code>")
            assert any(text in found[name] for text in spelled), f"{name} is shown without Args"
    assert checked > 100


def test_examples_of_docstrings_are_shown_as_code(site):
    loader = descriptions(site)["millstream.DataLoader"]
    assert '<span class="n">loader</span> <span class="o">=</span> <span class="n">ms</span>' in loader
    assert not any("<blockquote>" in text for text in descriptions(site).values())


def test_code_can_be_copied_without_prompts(site):
    for path, page in site.items():
        for block in re.findall(r"<pre.*?</pre>", page, re.DOTALL):
            assert not re.search(r"^(&gt;&gt;&gt;|\.\.\.|\$) ", re.sub(r"<[^>]*>", "", block), re.MULTILINE), path


def test_what_an_example_shows_is_a_comment_after_it(site):
    text = html.unescape(re.sub(r"<[^>]*>", "", descriptions(site)["millstream.BatchTransform"]))
    assert 'loader.steps_per_epoch, loader.element_spec()["x"].shape\n# (3, (4,))\n' in text


def test_the_names_of_a_page_of_the_api_are_listed_for_those_who_read_it_in_the_repository():
    path = ROOT / "docs" / "_hooks" / "names.py"
    spec = importlib.util.spec_from_file_location("names", path)
    assert spec is not None and spec.loader is not None
    names = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(names)
    assert len(names.pages()) > 10
    for page, text in names.pages().items():
        assert page.read_text() == text, f"{page.name} is not what the docstrings give. Run: python {path}"


def test_the_index_of_the_search_can_be_read_from_the_disk(folder, site):
    index = (folder / "search" / "search_index.js").read_text()
    assert index.startswith("var __index = {") and "Validate every N steps" in index
    assert '<script src="javascripts/iframe-worker.js"></script>' in site["index.html"]
    assert '<script src="../javascripts/iframe-worker.js"></script>' in site["api/loading.html"]


@pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason=MISSING)
def test_a_browser_finds_words_on_a_page_that_it_reads_from_the_disk(folder):
    with browser() as window:
        window.size(1280, 900)
        window.open(folder / "index.html")
        window.run("document.querySelector('#__search').click()")
        window.run(
            "const field = document.querySelector('.md-search__input'); field.focus();"
            "field.value = 'troubleshooting'; field.dispatchEvent(new Event('keyup'))"
        )
        found: list[str] = []
        for _ in range(200):
            found = window.run("return [...document.querySelectorAll('.md-search-result__link')].map(a => a.href)")
            if found:
                break
            time.sleep(0.1)
        assert any("troubleshooting.html" in address for address in found)
        assert not [address for address in window.requests() if re.match(r"https?:", address)]


def test_names_in_docstrings_and_types_lead_to_their_descriptions(site):
    loader = descriptions(site)["millstream.DataLoader"]
    assert '<a href="executors.html#millstream.BatchCache"><code>BatchCache</code></a>' in loader  # in a text
    assert re.search(r'<a [^>]*href="executors.html#millstream.InGraph"[^>]*>InGraph</a>', loader)  # in a type
    assert '<a href="api/loading.html#millstream.DataLoader.iterate">' in site["runtimes.html"]


def test_every_name_of_a_dialect_is_in_the_overview(site):
    page = site["api/dialects.html"]
    for module in modules_of(dialects):
        short = module.__name__.removeprefix("millstream.dialects.")
        row = re.search(rf"<tr>\s*<td><code>{re.escape(short)}</code></td>(.*?)</tr>", page, re.DOTALL)
        assert row is not None, f"{short} is missing"
        assert set(re.findall(r"<code>(\w+)</code>", row[1])) == exported(module), short


def test_every_command_and_option_is_on_the_page_of_the_command_line(site, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    page = site["api/command-line.html"]
    commands = re.findall(r"^    (\w+) ", shown_help(capsys), re.MULTILINE)
    assert "launch" in commands
    for command in commands:
        assert f'id="millstream-{command}"' in page, f"millstream {command} is missing"
        for line in re.findall(r"^  (-.*?)(?:  |$)", shown_help(capsys, command), re.MULTILINE):
            for option in set(re.findall(r"(?<!\S)--?[\w-]+", line)) - {"-h", "--help"}:
                assert re.search(rf"<code>{option}[ <]", page), f"{option} of millstream {command} is missing"


def shown_help(capsys, *command):
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    return capsys.readouterr().out


def test_links_inside_of_the_site_lead_somewhere(site):
    anchors = {path: {html.unescape(name) for name in ANCHOR.findall(page)} for path, page in site.items()}
    for path, page in site.items():
        if path == "404.html":
            continue
        for target in re.findall(r'<a [^>]*?href="([^"]*)"', page):
            file, _, anchor = html.unescape(target).partition("#")
            if re.match(r"\w+:", file):
                continue
            other = os.path.normpath(os.path.join(os.path.dirname(path), file)) if file else path
            other = "index.html" if other == "." else other
            assert other in site, f"{path} links to {target}"
            assert anchor in anchors[other] or anchor in ("", "__top"), f"{path} links to {target}"


def test_pages_load_nothing_from_elsewhere(site):
    for path, page in site.items():
        loaded = re.findall(r'<(?:script|img|iframe|source)\b[^>]*\bsrc="([^"]*)"', page)
        loaded += re.findall(r'<link\b[^>]*\bhref="([^"]*)"', page)
        assert not [target for target in loaded if re.match(r"(\w+:)?//", target)], path
