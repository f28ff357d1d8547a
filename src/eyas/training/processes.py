"""One process or many: Hugging Face accelerate's, and what they must agree on."""

from __future__ import annotations

import importlib.util
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import InitProcessGroupKwargs, ProjectConfiguration, broadcast

PATIENCE = timedelta(hours=6)  # the others wait while the main process evaluates


def join_processes(device: str) -> bool:
    """Join the processes of ``accelerate launch``, before anything is put on a device; whether this is the main one.

    Args:
        device: as the user says it; with ``"cpu"`` accelerate stays off accelerators.
    """
    return bool(PartialState(cpu=device == "cpu", timeout=PATIENCE).is_main_process)


def open_accelerator(device: torch.device, out: Path) -> Accelerator:
    """accelerate's engine for this process; it logs to tensorboard under ``out/logs`` where that is installed.

    Precision is ours to choose: the head's forward runs under autocast if the target's features are no float32.
    """
    return Accelerator(
        cpu=device.type == "cpu",
        mixed_precision="no",
        log_with="tensorboard" if importlib.util.find_spec("tensorboard") else None,
        project_config=ProjectConfiguration(project_dir=str(out), logging_dir=str(out / "logs")),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
    )


def agree(accelerator: Accelerator, minutes: float, stop: bool) -> tuple[float, bool]:
    """The main process's clock and whether it was told to stop: all must take the same step, or none."""
    if accelerator.num_processes == 1:
        return minutes, stop
    said = broadcast(torch.tensor([minutes, float(stop)], device=accelerator.device)).tolist()
    return said[0], bool(said[1])


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C, and the first SIGTERM, into an answer "yes" of the yielded function; the second works as ever.

    (Launchers send SIGTERM after the user's Ctrl-C, which must not cut the saving short.) Outside the main thread signals
    cannot be caught, and the answer is always "no".
    """
    asked = False
    caught = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.getsignal(number) for number in caught}

    def ask(received: int, _: Any) -> None:
        nonlocal asked
        asked = True
        signal.signal(received, before[signal.Signals(received)])

    for number in caught:
        signal.signal(number, ask)
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
