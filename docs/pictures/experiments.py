"""Draw the pictures of docs/experiments.md: its program is run, and the images that it writes are kept.

`python docs/pictures/experiments.py` writes learning-rate.png and sweep.png beside it.
"""

import os
import pathlib
import re
import shutil
import tempfile

FOLDER = pathlib.Path(__file__).parent
PICTURES = {"rates.png": "learning-rate.png", "sweep.png": "sweep.png"}


def main() -> None:
    """Run all blocks of the page in a folder of their own."""
    page = (FOLDER.parent / "experiments.md").read_text()
    program = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    before = pathlib.Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            exec(
                compile(program, "experiments.md", "exec"), {"__name__": "experiments"}
            )
        finally:
            os.chdir(before)
        for made, name in PICTURES.items():
            shutil.copy(pathlib.Path(folder) / made, FOLDER / name)


if __name__ == "__main__":
    main()
