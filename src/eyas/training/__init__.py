"""Training a draft head on conversations of the target with itself."""

from eyas.training.loop import train
from eyas.training.options import TrainOptions
from eyas.training.processes import join_processes
from eyas.training.rehearsal import read_inputs, rehearse

__all__ = ["TrainOptions", "join_processes", "read_inputs", "rehearse", "train"]
