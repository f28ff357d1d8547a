"""Before a run: its inputs read and checked, one conversation shown, its cost told. Nothing is trained or written."""

from __future__ import annotations

from rich.console import Console

from eyas.checkpoint import check_writable, read_checkpoint
from eyas.conversations import Conversations, read_conversations
from eyas.target import Target
from eyas.training.dataset import make_dataset
from eyas.training.options import TrainOptions
from eyas.training.plan import make_plan
from eyas.training.preview import show_sample
from eyas.training.start import planned_head
from eyas.training.state import check_unused

PREVIEWED = 100  # conversations among which one that can be trained on is looked for


def read_inputs(
    options: TrainOptions, data: str, heldout: str | None, strict: bool, split: str = "train"
) -> tuple[Conversations, Conversations | None]:
    """Check what needs no target, and read the conversations.

    Args:
        split: of data sets on the hub.

    Raises:
        EyasError: an output folder, a draft to start from, or data that cannot be used.
    """
    check_writable(options.out)
    check_unused(options)
    if options.from_draft is not None:
        read_checkpoint(options.from_draft)
    found = read_conversations(data, strict=strict, split=split)
    return found, read_conversations(heldout, strict=strict, split=split) if heldout else None


def rehearse(
    target: Target, data: Conversations, heldout: Conversations | None, options: TrainOptions, preview: bool, strict: bool
) -> list[str]:
    """Show the first conversation with its mask (``preview``, on standard output), or give the lines of a plan.

    Raises:
        EyasError: as `eyas.training.train` would.
    """
    if preview:
        dataset = make_dataset(target, Conversations(data.rows[:PREVIEWED]), Conversations([]), options, strict)
        show_sample(dataset.samples[0], target.tokenizer, Console())
        return dataset.notes
    dataset = make_dataset(target, data, heldout, options, strict)
    config = planned_head(target, options)
    return [*dataset.notes, *(f"{name:<18} {value}" for name, value in make_plan(target, dataset, config, options))]
