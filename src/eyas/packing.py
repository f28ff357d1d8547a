"""Linear layers whose weights are laid out once, as the CPU's matrix library wants them, not anew at every call.

oneDNN multiplies a blocked copy of a bfloat16 matrix; the stock layer makes that copy every time, which for the few rows of a
draft level costs more than the multiplication. The numbers that come out are the same to the last bit.
"""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)
FEW_ROWS = 8  # the layout is made for about so many; it serves any number


def can_pack(weight: Tensor) -> bool:
    """Whether this torch and CPU have what packing takes, for a weight like this."""
    operations = torch.ops.mkldnn
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and all(hasattr(operations, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))
        and bool(operations._is_mkldnn_bf16_supported())
    )


class PackedLinear(nn.Module):
    """``x @ weight.T + bias`` with a packed copy of the weight; for inference.

    Args:
        weight: [out, in] bfloat16, on the CPU.
        bias: [out] or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), FEW_ROWS)
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return out


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Module:
    """A layer for these weights, packed where that is possible."""
    if can_pack(weight):
        return PackedLinear(weight, bias)
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return layer


def packed(module: Module) -> Module:
    """The module, or where packing is possible a copy of it with all linear layers packed."""
    layers = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    if not all(can_pack(module.get_submodule(name).weight) for name in layers):  # type: ignore[arg-type]
        return module
    clone = copy.deepcopy(module)
    for name in layers:
        parent, _, own = name.rpartition(".")
        layer = clone.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        setattr(clone.get_submodule(parent), own, PackedLinear(layer.weight, layer.bias))
    return clone
