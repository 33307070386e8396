"""What a loop can do besides its steps: bars, writers, checkpoints, and watchers that stop or measure."""

from millstream.callbacks._console_logger import console_logger as console_logger
from millstream.callbacks._csv_logger import csv_logger as csv_logger
from millstream.callbacks._early_stopping import early_stopping as early_stopping
from millstream.callbacks._jsonl_logger import jsonl_logger as jsonl_logger
from millstream.callbacks._keras_bar import keras_bar as keras_bar
from millstream.callbacks._learning_rate import log_learning_rate as log_learning_rate
from millstream.callbacks._mlflow_logger import mlflow_logger as mlflow_logger
from millstream.callbacks._profile import profile as profile
from millstream.callbacks._record import record as record
from millstream.callbacks._rich_bar import rich_bar as rich_bar
from millstream.callbacks._tensorboard import tensorboard as tensorboard
from millstream.callbacks._terminate_on_nan import terminate_on_nan as terminate_on_nan
from millstream.callbacks._throughput import throughput as throughput
from millstream.callbacks._tqdm_bar import tqdm_bar as tqdm_bar
from millstream.callbacks._wandb_logger import wandb_logger as wandb_logger
from millstream.loops._checkpoint import checkpoint as checkpoint

__all__: list[str]
