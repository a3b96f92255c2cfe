"""Frozen layers in 8-bit floating point: both factors of their linear maps in e4m3, with a scale for every row.

Weights are rounded once, a scale for each output; inputs at every pass, a scale for each token, so that no token's
rounding depends on its neighbours. Products are summed in float32 by the device's own fp8 units and come out in
bfloat16, in which everything between the linear maps is computed. The head is none of the layers and stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from limbeck.models.causal import layers_of

TYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(TYPE).max
MULTIPLE = 16
"""Both sizes of a weight must be multiples of this for the device's product."""
CAPABILITY = (8, 9)
"""The first CUDA compute capability that multiplies fp8."""
BYTES = 1.0
"""Per parameter of a linear map."""
# a row of zeros has no largest value to divide by
_SMALLEST_SCALE = 1e-12


def lacking(device: torch.device) -> str | None:
    """Missing feature of a device that cannot multiply fp8, for a sentence; None where it can."""
    needed = "{}.{}".format(*CAPABILITY)
    if device.type != "cuda" or torch.version.hip is not None:
        return f"a CUDA device of compute capability {needed}"
    capability = torch.cuda.get_device_capability(device)
    return None if capability >= CAPABILITY else f"compute capability {needed}, not {capability[0]}.{capability[1]}"


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` [..., n] as e4m3 values [..., n] and float32 scales [..., 1]: the largest of a row becomes 448.

    Made of plain operations, which torch.compile joins to whatever has computed ``x``, and makes once for all maps
    that read the same ``x``.
    """
    scale = (x.abs().amax(-1, keepdim=True).float() / LARGEST).clamp(min=_SMALLEST_SCALE)
    return (x.float() / scale).to(TYPE), scale


def reference_product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``(a * a_scale) @ (b * b_scale).T`` in ``dtype``, on any device: a [m, k], a_scale [m, 1], b [n, k], b_scale
    [n, 1]. The products of e4m3 numbers are exact in float32."""
    return ((a.float() @ b.float().t()) * a_scale * b_scale.t()).to(dtype)


def scaled_product(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, *, fast_sums: bool = True
) -> Tensor:
    """The same by the device's fp8 units; k and n are multiples of 16, ``dtype`` is bfloat16.

    ``fast_sums``: in the units' own registers, which drop a few of float32's digits, instead of beside them.
    """
    # the units want the second factor column by column, which the view `b.t()` is: no copy
    return torch._scaled_mm(a, b.t(), scale_a=a_scale, scale_b=b_scale.t(), out_dtype=dtype, use_fast_accum=fast_sums)


class Fp8Linear(nn.Module):
    """A frozen linear map with its weight [out, in] in e4m3 and a float32 scale [out, 1]; results in bfloat16.

    Args:
        linear: the map that it stands for, with a weight on the device that will compute.
        native: by the device's fp8 units; otherwise by ``reference_product``.
    """

    weight: Tensor
    weight_scale: Tensor

    def __init__(self, linear: nn.Linear, *, native: bool) -> None:
        super().__init__()
        self.in_features, self.out_features, self.native = linear.in_features, linear.out_features, native
        weight, scale = quantize_rows(linear.weight.detach())
        # no parameters: nothing trains them, and a model's type is the type of its parameters
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", scale)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., in] -> [..., out]."""
        values, scale = quantize_rows(x.reshape(-1, self.in_features))
        product = scaled_product if self.native else reference_product
        out = product(values, scale, self.weight, self.weight_scale, torch.bfloat16)
        if self.bias is not None:
            out = out + self.bias.to(out.dtype)
        return out.reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, native={self.native}"


@dataclass
class Converted:
    """Names of a body's linear maps by what became of them; ``plain``: sizes that are no multiples of 16."""

    fp8: list[str] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)


@torch.no_grad()
def convert_layers(body: nn.Module, device: torch.device) -> Converted:
    """Put an ``Fp8Linear`` in place of each linear map of a body's layers, in place and one after the other."""
    native, converted = lacking(device) is None, Converted()
    names = {module: name for name, module in body.named_modules()}
    for layer in layers_of(body):
        # lists, here and below: modules are replaced while they are walked
        for parent in list(layer.modules()):
            for attribute, child in list(parent.named_children()):
                if type(child) is nn.Linear and child.in_features % MULTIPLE == child.out_features % MULTIPLE == 0:
                    setattr(parent, attribute, Fp8Linear(child, native=native))
                    converted.fp8.append(names[child])
                elif isinstance(child, nn.Linear):
                    converted.plain.append(names[child])
                elif isinstance(child, Fp8Linear):
                    converted.fp8.append(names[child])
    return converted
