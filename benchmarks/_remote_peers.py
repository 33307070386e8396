"""Other libraries that read shards of the store: each function makes a pass over all of them, in shuffled batches.

Each is set up as its documentation advises for speed, and its workers end with the pass.
"""

import importlib.metadata
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np


def _use(batches: Iterable[Any], steps: int) -> None:
    """Make JAX arrays of the batches; all of them have to come."""
    import jax

    count = 0
    for batch in batches:
        jax.block_until_ready(jax.device_put(np.asarray(batch)))
        count += 1
    assert count >= steps, (count, steps)


def streaming_epoch(address: str, shards: int, batch: int, steps: int, workers: int) -> Callable[[], None]:
    """MosaicML streaming: MDS shards by its S3 client, since it knows no http. The store answers like S3.

    Every pass has a cache folder of its own, so each shard is fetched in each pass.
    """
    importlib.metadata.version("mosaicml-streaming")  # it is the one that is said to be missing, not torch
    _declare_nms()
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory
    from torch.utils.data import DataLoader

    os.environ |= {
        "S3_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }

    def run() -> None:
        clean_stale_shared_memory()  # of the pass before
        folder = pathlib.Path(tempfile.mkdtemp())
        try:
            data = StreamingDataset(
                remote="s3://mds",
                local=str(folder),
                batch_size=batch,
                shuffle=True,
                shuffle_algo="py1e",
                predownload=64 * batch,  # by default 8 batches
            )
            for stream in data.streams:
                stream._downloader.clean_up()  # or forked workers share the connection that the index came by
            loader = DataLoader(data, batch_size=batch, num_workers=workers, prefetch_factor=4, drop_last=True)
            _use((found["x"] for found in loader), steps)
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # a worker may still be at its end

    return run


def _declare_nms() -> None:
    """Streaming imports torchvision, whose wheel has operators for CUDA alone: beside a torch without it, it names
    some that do not exist. None is used here.
    """
    import torch

    if not torch.version.cuda:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def webdataset_epoch(address: str, shards: int, batch: int, steps: int, workers: int) -> Callable[[], None]:
    """webdataset: the tar files by curl, which is what it opens http with. Shards and samples are shuffled."""
    import webdataset as wds  # before torch, likewise
    from torch.utils.data import default_collate

    urls = [f"{address}/tar/{shard:05}" for shard in range(shards)]

    def run() -> None:
        data = (
            wds.WebDataset(urls, shardshuffle=len(urls))
            .shuffle(6400 // workers)  # as many samples in all as are in flight here
            .map(_pixels)
            .batched(batch, collation_fn=default_collate)  # tensors, which come to this process in shared memory
        )
        loader = wds.WebLoader(data, batch_size=None, num_workers=workers, prefetch_factor=4)
        _use(loader, steps)

    return run


def _pixels(sample: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(bytearray(sample["x"]), np.uint8)  # tensors need memory that can be written to
