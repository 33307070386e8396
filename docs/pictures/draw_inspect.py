"""Draw the pictures of a loader: its pipeline, its order, a mixture, and lengths.

`python docs/pictures/draw_inspect.py` writes pipeline.svg, order.svg, mixture.svg and
lengths.svg beside it.
"""

import pathlib

import numpy as np

import millstream as ms

FOLDER = pathlib.Path(__file__).parent


def read(index):
    """A small image and its label."""
    return {
        "image": np.full((32, 32, 3), index % 256, np.uint8),
        "label": np.int32(index % 10),
    }


def resize(sample):
    """Half of it, in both directions."""
    return {**sample, "image": sample["image"][::2, ::2]}


def flip(batch, mask, key):
    """Stands for an augmentation."""
    return batch


def pipeline() -> ms.inspect.Explanation:
    """Samples that threads read, and a batch that the device finishes."""
    stages = [
        ms.DiskSampleSource(50_000, read),
        ms.HostMapTransform(resize),
        ms.BatchTransform(256),
        ms.RandomMapTransform(flip),
        ms.NormalizeImageTransform(),
    ]
    return ms.DataLoader(stages, executor=ms.Threads(8)).explain()


def order() -> ms.inspect.EpochOrders:
    """A block shuffle that four hosts share."""
    shuffle = ms.Shuffle("blocks", block_size=200, lanes=8, window=400)
    source = ms.ArraySampleSource({"x": np.arange(20_000)}, ordering=shuffle)
    loader = ms.DataLoader([source, ms.BatchTransform(128)])
    return ms.inspect.order(loader, hosts=4)


def mixture() -> ms.inspect.MixturePlan:
    """Less and less of the web, more and more code."""
    sizes = {"web": 30_000, "books": 3_000, "code": 9_000}
    sources = {
        name: ms.ArraySampleSource({"x": np.zeros(size)})
        for name, size in sizes.items()
    }
    weights = {
        "web": ms.views.ramp(5, 1, samples=20_000),
        "books": 1,
        "code": ms.views.ramp(0, 4, samples=30_000),
    }
    view = ms.views.mix(sources, weights)
    return ms.inspect.mixture(ms.DataLoader([view, ms.BatchTransform(128)]))


def lengths() -> ms.inspect.LengthDistribution:
    """Documents as they often are: many short ones, few long ones."""
    found = np.random.default_rng(0).lognormal(4.5, 0.8, 20_000).astype(int) + 1
    source = ms.ArraySampleSource({"x": np.zeros(len(found))})
    return ms.inspect.lengths(source, np.minimum(found, 1024), buckets=6, pack=2048)


def main() -> None:
    """Draw them all."""
    for draw in (pipeline, order, mixture, lengths):
        draw().save(FOLDER / f"{draw.__name__}.svg")


if __name__ == "__main__":
    main()
