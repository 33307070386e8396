"""Notebooks, in a real kernel: the example in full, cells that are interrupted, and modules that are loaded again."""

import base64
import io
import os
import pathlib
import queue
import textwrap
import time

import nbformat
import numpy as np
import PIL.Image
import pytest
from conftest import CACHE
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient

EXAMPLES = sorted((pathlib.Path(__file__).parent.parent / "examples").glob("*.ipynb"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_notebooks_are_kept_without_outputs(path):
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code and not [cell for cell in code if cell.outputs or cell.execution_count]
    assert notebook.cells[0].source.startswith("# ")


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """What each cell of the example shows: texts, and other forms by their type."""
    (path,) = EXAMPLES
    notebook = nbformat.read(path, 4)
    folder = tmp_path_factory.mktemp("notebook")
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    client.execute(env=os.environ | CACHE)
    assert list(folder.iterdir()) == []
    return [(cell.source, outputs_of(cell)) for cell in notebook.cells if cell.cell_type == "code"]


def outputs_of(cell):
    found = {"text": ""}
    for output in cell.outputs:
        assert output.output_type != "error", output
        found["text"] += output.get("text", "")
        found |= output.get("data", {})
    return found


def cell_with(shown, text):
    (found,) = [output for source, output in shown if text in source]
    return found


@pytest.mark.parametrize("line", ["axis.imshow(", "history.plot(", 'label=f"rate {rate}"'])
def test_a_picture_in_the_notebook_is_a_picture(shown, line):
    picture = np.asarray(PIL.Image.open(io.BytesIO(base64.b64decode(cell_with(shown, line)["image/png"]))).convert("L"))
    assert min(picture.shape) > 80 and picture.std() > 5 and len(np.unique(picture)) > 20


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("digits = ms.Array", ["ArraySampleSource", "1,438", "u8[8,8,1]"]),
        ("loader = ms.DataLoader([train", ["BatchTransform(64)", "image f32[64,64]", "19 steps"]),
        ("loader.explain()", ["BatchTransform", "19 batches of 64"]),
        ('output = fit("undisturbed")', ["152 steps, 8 epochs", "accuracy_test", "<svg"]),
        ("in_workers.stats()", ["reading: HostMapTransform(inverted)", "1,157"]),
    ],
)
def test_the_last_line_of_a_cell_is_shown_as_a_page(shown, line, words):
    page = cell_with(shown, line)["text/html"]
    assert all(word in page for word in words) and "<script" not in page


def test_the_notebook_trains_is_interrupted_and_continues(shown):
    assert "8/8" in cell_with(shown, 'output = fit("undisturbed")')["text"]
    assert "True after step 80 of 152" in cell_with(shown, "stopped = fit(")["text"]
    assert "identical to the run that was left alone" in cell_with(shown, "continued = fit(")["text"]


class Kernel:
    """A kernel, and what its cells have said."""

    def __init__(self, folder):
        self.manager, self.client = start_new_kernel(cwd=str(folder), env=os.environ | CACHE)

    def run(self, code, interrupt_at=None):
        """The texts of a cell; with `interrupt_at`, its kernel is interrupted when they have that in them."""
        request, said, interrupted = self.client.execute(textwrap.dedent(code)), "", False
        deadline = time.monotonic() + 300
        while True:
            assert time.monotonic() < deadline, said
            try:
                message = self.client.get_iopub_msg(timeout=1)
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            assert message["msg_type"] != "error", "\n".join(content["traceback"])
            said += content.get("text", "") + content.get("data", {}).get("text/plain", "")
            if interrupt_at is not None and interrupt_at in said and not interrupted:
                self.manager.interrupt_kernel()
                interrupted = True
            if content.get("execution_state") == "idle":
                return said


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    kernel = Kernel(tmp_path_factory.mktemp("kernel"))
    kernel.run(
        """
        import time, jax, jax.numpy as jnp, numpy as np, millstream as ms

        loader = ms.DataLoader([ms.ArraySampleSource({"x": np.arange(64.0)}), ms.BatchTransform(8)])

        @jax.jit
        def train_step(state, batch):
            loss = jnp.mean(jnp.square(batch[0]["x"] / 64 - state))
            return ms.logs().add_metric("loss", loss), 0.9 * state + 0.1 * loss

        def fit(folder, wait=0.0):
            def slow(state, batch, elapsed):
                if elapsed.steps == 30:
                    print("step 30", flush=True)
                time.sleep(wait if elapsed.steps > 30 else 0)

            tasks = {ms.on_train_step: train_step, ms.every(7): ms.checkpoint(folder), ms.every(1): slow}
            return ms.train_loop(jnp.float32(0), loader, tasks, stop=200, key=jax.random.key(0), resume=True)
        """
    )
    yield kernel
    kernel.client.stop_channels()
    kernel.manager.shutdown_kernel(now=True)


def test_a_cell_that_is_interrupted_ends_well_and_continues_to_the_same_numbers(kernel):
    alone = kernel.run("alone = fit('alone'); print(alone.elapsed.steps, alone.interrupted)")
    assert alone.endswith("200 False\n")
    said = kernel.run("run = fit('run', wait=0.1); print(run.interrupted, run.elapsed.steps)", interrupt_at="step 30")
    interrupted, steps = said.split()[-2:]
    assert interrupted == "True" and 30 <= int(steps) < 200
    said = kernel.run(
        """
        again = fit("run")
        print(run.elapsed.steps < again.elapsed.steps, again.history.collect("loss") == alone.history.collect("loss"))
        print(float(again.state) == float(alone.state), again.interrupted)
        """
    )
    assert said.split()[-4:] == ["True", "True", "True", "False"]


def test_functions_of_cells_reach_worker_processes_and_modules_may_be_loaded_again(kernel):
    said = kernel.run(
        """
        %load_ext autoreload
        %autoreload 2
        import os, pathlib, sys
        sys.path.insert(0, os.getcwd())
        pathlib.Path("changing.py").write_text("def scaled(sample):\\n    return {'x': sample['x'] * 2}\\n")
        import changing

        def shifted(sample):
            return {"x": changing.scaled(sample)["x"] + OFFSET}

        OFFSET = 1
        def total():
            stages = [ms.ArraySampleSource({"x": np.arange(64.0)}), ms.HostMapTransform(shifted), ms.BatchTransform(8)]
            loader = ms.DataLoader(stages, executor=ms.Processes(2))
            return sum(float(batch["x"].sum()) for batch, _ in loader.iterate(loader.init_state(jax.random.key(0))))

        print(total())
        """
    )
    assert said.split()[-1] == str(float(2 * 2016 + 64))
    kernel.run(
        """
        pathlib.Path("changing.py").write_text("def scaled(sample):\\n    return {'x': sample['x'] * 3}\\n# longer\\n")
        """
    )
    assert kernel.run("print(total())").split()[-1] == str(float(3 * 2016 + 64))
    said = kernel.run("fit('run').elapsed.steps")
    assert said.endswith("200")
