"""Training: what is learned for kvjax, one file each."""

from kvjax.train.loop import TrainConfig, Trained, TrainingStopped, train  # pyright: ignore
from kvjax.train.passkeys import Passkeys  # pyright: ignore
from kvjax.train.record import history, plot, restore  # pyright: ignore

__all__ = [
    "Passkeys",
    "TrainConfig",
    "Trained",
    "TrainingStopped",
    "history",
    "plot",
    "restore",
    "train",
]
