"""Draw the batch of docs/inspecting.md: its program is run, and the page it saves is kept as a picture.

`python docs/pictures/data.py` writes show-light.png and show-dark.png beside it. It needs chromium and chromedriver.
"""

import os
import pathlib
import re
import sys
import tempfile

FOLDER = pathlib.Path(__file__).parent
ROOT = FOLDER.parents[1]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)

sys.path.insert(0, str(ROOT / "tests"))


def program() -> str:
    """The first block of the page, which has the imports, and the one that saves the batch."""
    blocks = BLOCK.findall((ROOT / "docs" / "inspecting.md").read_text())
    return blocks[0] + next(block for block in blocks if "batch.html" in block)


def main() -> None:
    """Draw it on light and on dark pages."""
    from browser import browser

    with tempfile.TemporaryDirectory() as name, browser() as window:
        os.chdir(name)
        exec(program(), {"__name__": "docs"})
        for scheme in ("light", "dark"):
            window.size(1118, 746)
            window.scheme(scheme)
            window.open(pathlib.Path(name, "batch.html"))
            (FOLDER / f"show-{scheme}.png").write_bytes(window.screenshot())


if __name__ == "__main__":
    main()
