"""Training a draft head on conversations of the target with itself."""

from eyas.training.loop import train
from eyas.training.options import TrainOptions

__all__ = ["TrainOptions", "train"]
