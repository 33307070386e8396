"""Every code block of the documents runs, and so does every example in a docstring."""

import contextlib
import dataclasses
import doctest
import importlib
import importlib.util
import io
import linecache
import pathlib
import pkgutil
import re
from xml.etree import ElementTree

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import code_blocks, shown_blocks

import millstream as ms
from millstream.reading import batch_holders

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
DOCUMENTS = [ROOT / "CONTRIBUTING.md", *PAGES]
NOT_RUN = (
    "",
    "console",
    "bash",
    "text",
    "py",
    "yaml",
)  # drawings, what is typed or shown in a shell, programs for other libraries, files for other programs


def modules_with_examples():
    """The names of modules with something to run in their docstrings."""
    names = []
    for module in pkgutil.walk_packages(ms.__path__, "millstream."):
        found = importlib.util.find_spec(module.name)
        assert found is not None and found.origin is not None
        if ">>>" in pathlib.Path(found.origin).read_text():
            names.append(module.name)
    return names


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_code_blocks_of_a_document_run(document, usual_promotion, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": document.stem}
    checker = doctest.OutputChecker()
    for number, (block, shown) in enumerate(shown_blocks(document.read_text()), 1):
        name = f"<{document.stem}, block {number}>"
        linecache.cache[name] = len(block), None, block.splitlines(keepends=True), name  # whoever inspects it finds it
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(block, name, "exec"), namespace)
        found = output.getvalue()
        if shown is not None:
            assert checker.check_output(shown, found, doctest.ELLIPSIS), f"{name} prints:\n{found}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_block_of_a_document_says_what_it_is(document):
    fences = re.findall(r"^ *(?:```|~~~)(.*)$", document.read_text(), re.MULTILINE)
    assert set(fences[1::2]) <= {""}, "a block is not closed"
    assert set(fences[::2]) <= {"python", *NOT_RUN}, "only blocks that begin with ```python are run"


def test_blocks_inside_of_notes_tabs_and_lists_are_run():
    document = """
- An item.

    ```python
    if True:
        first = 1
    ```

!!! note

    === "Tab"

        ```python
        second = 2
        ```
"""
    assert code_blocks(document) == ["if True:\n    first = 1\n", "second = 2\n"]


def test_a_block_of_text_right_after_a_program_is_what_it_prints():
    document = """
```python
print(1)
```

```text
1
```

```python
print(2)
```

It prints:

```text
3
```
"""
    assert shown_blocks(document) == [("print(1)\n", "1\n"), ("print(2)\n", None)]


@pytest.mark.parametrize("document", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_programs_fit_into_the_column_of_the_site(document):
    wide = [line for block in code_blocks(document.read_text()) for line in block.splitlines() if len(line) > 88]
    assert wide == []


def test_links_between_documents_lead_somewhere():
    for document in DOCUMENTS:
        text = document.read_text()
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.mark.parametrize("picture", sorted((ROOT / "docs").rglob("*.svg")), ids=lambda path: path.stem)
def test_a_picture_is_whole_says_what_it_shows_and_loads_nothing(picture):
    root = ElementTree.parse(picture).getroot()
    assert root.get("aria-label")
    assert re.findall(r"https?://[^\"' ]+", picture.read_text()) == ["http://www.w3.org/2000/svg"]


@pytest.mark.parametrize("name", modules_with_examples())
def test_the_examples_in_docstrings_run(name, usual_promotion, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stages = [ms.ArraySampleSource({"x": np.arange(10.0)}), ms.BatchTransform(4)]
    loader = ms.DataLoader(stages)
    known = {"ms": ms, "jax": jax, "jnp": jnp, "np": np, "dataclasses": dataclasses, "stages": stages, "loader": loader}
    known["state"] = loader.init_state(jax.random.key(0))
    if "policy" in name or ".rl" in name:
        env, env_params = gymnax.make("CartPole-v1")
        weights = jnp.zeros((4, 2))
        known |= {
            "gymnax": gymnax,
            "cartpole": ms.rl.GymnaxSource(env, env_params, policy_fn=act, policy_params=weights),
        }
    batch_holders._handed_out.clear()  # an example does not know of batches that earlier tests have kept alive
    finder, runner = doctest.DocTestFinder(exclude_empty=True), doctest.DocTestRunner()
    module = importlib.import_module(name)
    for test in finder.find(module, name, extraglobs=known):
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


def act(obs, weights, key):
    return jax.random.categorical(key, obs @ weights)


def test_public_classes_have_an_example():
    for name, member in [(name, getattr(room, name)) for room in (ms, ms.inspect) for name in room.__all__]:
        if isinstance(member, type) and not issubclass(member, Exception) and name != "LoaderState":
            assert ">>>" in (member.__doc__ or ""), f"{name} has no example"
