"""The callbacks of ciclo."""

from millstream.callbacks import early_stopping as early_stopping
from millstream.callbacks import keras_bar as keras_bar
from millstream.callbacks import tqdm_bar as tqdm_bar
from millstream.callbacks import wandb_logger as wandb_logger
from millstream.loops import Callback as LoopCallbackBase
from millstream.loops import checkpoint as checkpoint
from millstream.loops import inner_loop as inner_loop
from millstream.loops import noop as noop

__all__ = [
    "LoopCallbackBase",
    "checkpoint",
    "early_stopping",
    "inner_loop",
    "keras_bar",
    "noop",
    "tqdm_bar",
    "wandb_logger",
]
