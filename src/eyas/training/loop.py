"""The training loop: conversations in, a draft checkpoint out."""

from __future__ import annotations

import torch
from rich.console import Console

from eyas.checkpoint import check_writable
from eyas.conversations import Conversations
from eyas.errors import EyasError
from eyas.packing import is_packed
from eyas.progress import progress_bar
from eyas.target import Target
from eyas.training.dataset import make_dataset
from eyas.training.options import TrainOptions
from eyas.training.order import learning_rate, steps
from eyas.training.processes import agree, interruptible, open_accelerator
from eyas.training.start import planned_head
from eyas.training.state import check_unused
from eyas.training.trainer import Evaluation, Trainer


def train(
    target: Target,
    data: Conversations,
    heldout: Conversations | None,
    options: TrainOptions,
    console: Console | None = None,
    strict: bool = False,
) -> Evaluation | None:
    """Train a draft head for a target and write it to ``options.out``.

    The same call serves one process and, under ``accelerate launch``, many. An unfinished run in ``options.out`` is resumed.

    Args:
        data: conversations to train on.
        heldout: conversations to evaluate on; None: some of the data are held out.
        console: where progress goes; None: standard error.
        strict: refuse a conversation that cannot be trained on, instead of leaving it out.

    Returns:
        The kept head's evaluation, or None where nothing could be held out.

    Raises:
        EyasError: bad data or options, a packed target, one without a chat template, no room on the disk.
        KeyboardInterrupt: after Ctrl-C or SIGTERM; the run's state has been saved.
    """
    accelerator = open_accelerator(target.device, options.out)
    console = (console or Console(stderr=True)) if accelerator.is_main_process else Console(quiet=True)
    check_writable(options.out)
    check_unused(options)
    if options.accumulate < accelerator.num_processes:
        raise EyasError(
            f"accumulate is {options.accumulate}, so {accelerator.num_processes} processes would share one micro-batch a step; "
            f"pass --accumulate {accelerator.num_processes} or a multiple"
        )
    if is_packed(target.model):
        raise EyasError(f"target {target.name} is packed for inference; load it with packed=False to train a draft for it")
    planned_head(target, options)  # what does not fit is told now
    target.model.eval().requires_grad_(False)
    devices = [target.device] if target.device.type == "cuda" else []
    with torch.random.fork_rng(devices), interruptible() as interrupted:
        dataset = make_dataset(target, data, heldout, options, strict)
        trainer = Trainer(accelerator, target, dataset, options, console)
        with progress_bar(console, total=1.0) as update:
            for step in steps(dataset.samples, options, trainer.position):
                minutes, stop = agree(accelerator, trainer.minutes, interrupted())
                done = max(step.share, minutes / options.minutes if options.minutes else 0.0)
                if done >= 1:
                    break
                if stop:
                    trainer.save()
                    trainer.say(f"stopped after step {trainer.steps_done}; the same command continues from there")
                    raise KeyboardInterrupt
                loss = trainer.step(step, learning_rate(done, options))
                update(done, f"step {trainer.steps_done} loss {loss:.3f}")
                if trainer.steps_done % options.evaluate_every == 0:
                    trainer.keep_best()
                if trainer.steps_done % options.save_every == 0:
                    trainer.save()
        return trainer.finish()
