"""What it runs on, by name."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def processor() -> str:
    """The processor's name, where the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def accelerator(device: torch.device) -> str | None:
    """An accelerator's name, or that of its kind; None for the processor itself."""
    if device.type == "cpu":
        return None
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
