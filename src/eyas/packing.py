"""Linear layers whose weights are laid out once, as the CPU's matrix library wants them, not anew at every call.

oneDNN multiplies a blocked copy of a bfloat16 matrix; the stock layer makes that copy every time, which for the few rows of a
draft level costs more than the multiplication. The numbers that come out are the same to the last bit.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from eyas.errors import EyasError

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
        keep: hold on to the weight as it was, too: others read it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, keep: bool = False) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), FEW_ROWS)
        self.weight = nn.Parameter(weight.detach(), requires_grad=False) if keep else None
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out], bfloat16.

        Raises:
            EyasError: another dtype: the model was cast after it had been packed.
        """
        if x.dtype != torch.bfloat16:
            raise EyasError(f"a layer packed for bfloat16 was given {x.dtype}; load the model with packed=False to cast it")
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out

    def _save_to_state_dict(self, *args: Any, **options: Any) -> None:
        """Refuse: the file would lack these weights.

        Raises:
            EyasError: always.
        """
        raise EyasError("a packed model is for inference and cannot be saved; load it with packed=False")


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
    if not _all_can_be_packed(module):
        return module
    clone = copy.deepcopy(module)
    _replace(clone, keep=None)
    return clone


def pack_model(model: PreTrainedModel) -> None:
    """Pack all linear layers of a loaded model in place, where that is possible; its LM head keeps its weight besides.

    The model gives the same numbers, takes no gradient, and cannot be saved any more.
    """
    if _all_can_be_packed(model):
        _replace(model, keep=model.get_output_embeddings())


def is_packed(module: nn.Module) -> bool:
    """Whether layers of it are packed."""
    return any(isinstance(part, PackedLinear) for part in module.modules())


def _all_can_be_packed(module: nn.Module) -> bool:
    layers = [part for part in module.modules() if isinstance(part, nn.Linear)]
    return all(type(layer) is nn.Linear and can_pack(layer.weight) for layer in layers)


def _replace(module: nn.Module, keep: nn.Module | None) -> None:
    """Put packed layers in the place of a module's linear ones, one by one, so that no two copies of all lie in memory."""
    for name in [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]:
        layer = module.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        parent, _, own = name.rpartition(".")
        setattr(module.get_submodule(parent), own, PackedLinear(layer.weight, layer.bias, keep=layer is keep))
