"""Linear layers whose weights are laid out once, as the CPU's matrix library wants them, not anew at every call.

oneDNN multiplies a blocked copy of a bfloat16 matrix; the stock layer makes that copy every time, which for the few rows of a
draft level costs more than the multiplication. The numbers that come out are the same to the last bit.

Weights that a .gguf file holds in 4 bits can stay in 4 bits: a few rows are multiplied in the time that it takes to read the
weights, and that is a quarter. They are the file's values but for the rounding of each group's scale and offset.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any, TypeVar, cast

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
            EyasError: another dtype or device: the model was cast or moved after it had been packed.
        """
        if x.dtype != torch.bfloat16 or x.device.type != "cpu":
            given = f"{x.dtype} on {x.device.type}"
            raise EyasError(f"a layer packed for bfloat16 on a CPU was given {given}; load the model with packed=False")
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out

    def _save_to_state_dict(self, *args: Any, **options: Any) -> None:
        """Refuse: the file would lack these weights.

        Raises:
            EyasError: always.
        """
        raise EyasError("a packed model is for inference and cannot be saved; load it with packed=False")


GROUP = 32  # weights that share a scale and an offset in Q4_0 and Q4_1, along the inputs
OFF_GRID = 0.1  # of a step between neighbouring values: what rounding to bfloat16 may have moved them
MANY_ROWS = 128  # new tokens of a batch's longest text, from which on 4 bits are slower: every few rows unpack them anew


def four_bits(weight: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """The weights as 4-bit numbers, if that is what they are: in each group of GROUP at most 16 equidistant values.

    Args:
        weight: [out, in].

    Returns:
        Numbers 0 … 15 [out, in] int32, and of each group [out, in / GROUP] float32 the step and the least value; or None.
    """
    if weight.shape[1] % GROUP:
        return None
    groups = weight.float().unflatten(1, (-1, GROUP))
    least, most = groups.aminmax(dim=2, keepdim=True)
    furthest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    eighth = furthest.abs() / 8
    for step, low in (
        ((most - least) / 15, least),  # Q4_1: both ends are used
        (eighth, torch.where(furthest < 0, -8, -7) * eighth),  # Q4_0: -8 … 7 or the reverse, and the furthest is its 8
    ):
        numbers = ((groups - low) / step.clamp(min=1e-30)).round()
        off = ((groups - (numbers * step + low)).abs() > OFF_GRID * step) | (numbers < 0) | (numbers > 15)
        if not bool(off.any()):
            return numbers.flatten(1).int(), step.squeeze(2), low.squeeze(2)
    return None


def can_stay_four_bits(weight: Tensor) -> bool:
    """Whether this torch and CPU multiply 4-bit weights, for a weight like this."""
    operations = torch.ops.aten
    names = ("_convert_weight_to_int4pack_for_cpu", "_weight_int4pack_mm_for_cpu")
    return can_pack(weight) and weight.shape[0] % 16 == 0 and all(hasattr(operations, name) for name in names)


class FourBitLinear(nn.Module):
    """``x @ weight.T + bias`` with the weight in 4 bits; a text of many new tokens is multiplied by a packed bfloat16 copy.

    The longest text of a forward decides: steps of decoding, always of fewer tokens than MANY_ROWS, see the same weights in any
    batch.

    Args:
        weight: [out, in] bfloat16, on the CPU, of at most 16 equidistant values in each group.
        bias: [out] or None.

    Raises:
        ValueError: the weights are not of 4 bits.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        found = four_bits(weight)
        if found is None:
            raise ValueError("weights are not of 4 bits")
        numbers, step, least = found
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1)
        self.scales = torch.stack([step, least + 8 * step], dim=-1).transpose(0, 1).contiguous().bfloat16()  # [groups, out, 2]
        self.many = PackedLinear(weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out], bfloat16.

        Raises:
            EyasError: another dtype.
        """
        rows = x.flatten(0, -2)
        if x.shape[-2] >= MANY_ROWS or x.dtype != torch.bfloat16:
            return cast(Tensor, self.many(x))
        out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(rows.contiguous(), self.packed, GROUP, self.scales)
        out = out.unflatten(0, x.shape[:-1])
        return out if self.many.bias is None else out + self.many.bias

    def _save_to_state_dict(self, *args: Any, **options: Any) -> None:
        """Refuse, as `PackedLinear` does."""
        self.many._save_to_state_dict(*args, **options)


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


def pack_model(model: PreTrainedModel, four_bit: bool = False) -> None:
    """Pack all linear layers of a loaded model in place, where that is possible; its LM head keeps its weight besides.

    The model gives the same numbers, takes no gradient, and cannot be saved any more.

    Args:
        four_bit: layers whose weights are of 4 bits stay so; see the module for what that changes.
    """
    if _all_can_be_packed(model):
        _replace(model, keep=model.get_output_embeddings(), four_bit=four_bit)


def is_packed(module: nn.Module) -> bool:
    """Whether layers of it are packed."""
    return any(isinstance(part, PackedLinear) for part in module.modules())  # a 4-bit layer holds one too


def is_four_bit(module: nn.Module) -> bool:
    """Whether layers of it hold 4-bit weights."""
    return any(isinstance(part, FourBitLinear) for part in module.modules())


def _all_can_be_packed(module: nn.Module) -> bool:
    layers = [part for part in module.modules() if isinstance(part, nn.Linear)]
    return all(type(layer) is nn.Linear and can_pack(layer.weight) for layer in layers)


def _replace(module: nn.Module, keep: nn.Module | None, four_bit: bool = False) -> None:
    """Put packed layers in the place of a module's linear ones, one by one, so that no two copies of all lie in memory."""
    for name in [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]:
        layer = module.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        parent, _, own = name.rpartition(".")
        new: nn.Module | None = None
        if four_bit and layer is not keep and can_stay_four_bits(layer.weight):
            with suppress(ValueError):  # other weights, as a .gguf's LM head has them
                new = FourBitLinear(layer.weight, layer.bias)
        setattr(module.get_submodule(parent), own, new or PackedLinear(layer.weight, layer.bias, layer is keep))
