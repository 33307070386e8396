"""Ways to use a stream up. Each continues wherever an error has ended it, and comes to the same batches."""

import contextlib
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import millstream as ms
from soak import oracle
from soak.run import Run
from soak.storage_faults import DamagedCheckpoint


def drawn(run: Run) -> None:
    """By iterators: whole, in blocks, kept, or broken off."""
    with contextlib.ExitStack() as stack:
        loader = None
        while True:
            try:
                if loader is None:
                    loader = run.loader()
                    run.show(loader)
                    stack.enter_context(loader if run.case.way == "kept" else contextlib.nullcontext())
                if run.position >= run.steps:
                    return run.settle()
                _leg(run, loader, _most(run))
            except (Exception, KeyboardInterrupt) as error:
                if run.meet(error):
                    stack.close()
                    loader = None


def _most(run: Run) -> int:
    """How many batches are taken from the next iterator."""
    if run.case.way in ("iterate", "block"):
        return run.steps
    return run.chance.randint(1, max(2, run.steps // 2))


def _leg(run: Run, loader: Any, most: int) -> None:
    """Some batches of one iterator, which is then left as it is."""
    batches = loader.iterate(run.begin(loader), steps=run.steps - run.position)
    if run.case.way == "broken" and not run.case.buffered and run.position and run.chance.random() < 0.5:
        saved = batches.get_state()
        batches = loader.iterate(loader.init_state(run.words, 0), steps=1)
        batches.set_state(saved)
    with batches if run.case.way == "block" else contextlib.nullcontext():
        if not run.case.ordered:
            for batch, mask in batches:
                run.take(0, batch, mask)
            return run.note({"after": int(batches.state.step), "ends": True})
        for count, (batch, mask) in enumerate(batches, 1):
            after = run.position + 1 if run.case.buffered else int(batches.state.step)
            run.take(after, batch, mask, batches.state)
            if count >= most:
                return
    if batches.interrupted and run.log is not None:
        raise KeyboardInterrupt  # a program that is told to end does so
    if not run.case.buffered and not batches.interrupted and int(batches.state.step) > run.position:
        run.note({"after": int(batches.state.step), "ends": True})  # the last ones were left out


def stepped(run: Run) -> None:
    """By `next_batch`, in Python or compiled."""
    loader, step = run.loader(), _compiled_next if run.case.way == "jit" else _next
    state = run.begin(loader)
    while run.position < run.steps:
        try:
            batch, after, mask = step(loader, state)
            run.take(run.position + 1, batch, mask, after)
            state = after
        except Exception as error:
            if run.meet(error):
                loader.close()
                loader = run.loader()
            state = run.begin(loader)
    loader.close()


def _next(loader: Any, state: Any) -> Any:
    return loader.next_batch(state)


_compiled_next = jax.jit(_next)


def scanned(run: Run) -> None:
    """By `scan_epoch`, an epoch at a time."""
    loader = run.loader()
    while run.position < run.steps:
        try:
            state, _, (batches, masks) = loader.scan_epoch(run.begin(loader), (), _collect)
        except Exception as error:
            loader = run.loader() if run.meet(error) else loader
            continue
        for number in range(len(masks)):
            run.take(run.position + 1, {name: leaf[number] for name, leaf in batches.items()}, masks[number])
        assert int(state.step) == run.position


def _collect(carry: Any, batch: Any, mask: Any) -> Any:
    return carry, (batch, mask)


@jax.jit
def train_step(state: Any, batch: Any) -> Any:
    """Fold a batch into the state, so that it says what came and in what order."""
    found = oracle.word(jnp, *batch)
    state = {"total": state["total"] * np.uint32(31) + found, "steps": state["steps"] + np.int32(1)}
    return ms.logs().add_metric("word", found), state


def start() -> Any:
    return {"total": np.uint32(0), "steps": np.int32(0)}


def train(run: Run, stop: int) -> Any:
    """One leg of a training run: it begins or resumes from its newest checkpoint."""

    def observed(state: Any, batch: Any) -> Any:
        result = train_step(state, batch)
        run.came_by()
        return result

    fused = run.case.way == "fused"
    every = 2 + run.case.number % 3
    return ms.train_loop(
        start(),
        run.loader(),
        {
            ms.on_train_step: train_step if fused else observed,
            ms.every(every): ms.checkpoint(run.folder / "run", keep=2),
        },
        stop=stop,
        key=jax.random.key(run.case.seed),
        resume=True,
        fuse=4 if fused else None,
    )


def trained(run: Run) -> None:
    """By a training loop with checkpoints, taken up again after each error."""
    output, stops = None, [run.steps]
    damages = [fault for fault in run.faults if isinstance(fault, DamagedCheckpoint)]
    if damages:
        stops.insert(0, min(run.steps, max(5, damages[0].moment)))  # there are two checkpoints then
    while stops:
        try:
            output = train(run, stops[0])
            if output.elapsed.steps < stops[0]:  # an interrupt has ended it
                if run.log is not None:
                    raise KeyboardInterrupt
                continue
            stops.pop(0)
            if stops:
                damages[0].strike()
            else:
                run.settle()
        except (Exception, KeyboardInterrupt) as error:
            if isinstance(error, KeyboardInterrupt) and run.log is not None:
                raise
            run.meet(error)
    enter_history(run, output)


def enter_history(run: Run, output: Any) -> None:
    """Take over what a training run has seen, step by step."""
    total, run.entries = 0, [{"digest": word} for word in output.history.to_dict()["word"]]
    if run.log is not None:
        run.log.write_text("".join(json.dumps(entry) + "\n" for entry in run.entries))
    for entry in run.entries:
        total = (total * 31 + entry["digest"]) % 2**32
    assert (int(output.state["total"]), int(output.state["steps"])) == (total, len(run.entries))


_WAYS = {"next_batch": stepped, "jit": stepped, "scan": scanned, "train": trained, "fused": trained}


def use_up(run: Run) -> None:
    """Use a run up in the way of its case."""
    if run.case.cached and run.position >= run.steps:
        # The program before was ended after its last batch. Whoever opens the cache next removes what that left there.
        loader = run.loader()
        with contextlib.suppress(Exception), loader.iterate(loader.init_state(run.words, 0), steps=1) as batches:
            next(batches)
    _WAYS.get(run.case.way, drawn)(run)
