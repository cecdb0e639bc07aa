# SPDX-License-Identifier: Apache-2.0
"""DoRA (https://arxiv.org/abs/2402.09353): trains the norms of a weight's rows separately from their direction."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.bridge.models.conversion.adapters.adapted_layers import LowRankPart
from megatron.bridge.peft.lora import LoRAAdapter, LowRankPEFT
from megatron.bridge.peft.low_rank import LoRAShape
from megatron.bridge.peft.targets import Site


class DoRAAdapter(LoRAAdapter):
    """``magnitude * (W + scaling * B A) x / |W + scaling * B A|``, row by row.

    As in section 4.3 of the paper, no gradient flows through the norm. It is taken over whole rows: where inputs
    are cut, squares are summed over the ranks.

    Attributes:
        magnitude: [experts?, halves?, outputs of this rank]; starts as the norms of the rows of W.
    """

    scales_outputs = True

    def __init__(self, site: Site, shape: LoRAShape) -> None:
        super().__init__(site, shape)
        self.magnitude = self._parameter(site.weights[0], *self.b.shape[:-1])
        self._mark(self.magnitude, cut=site.kind == "column", dim=self.magnitude.ndim - 1)
        with torch.no_grad():
            self.magnitude.copy_(self._norms(site.weights).view_as(self.magnitude))

    def forward(  # type: ignore[override]
        self, base: Tensor, x: Tensor, counts: Sequence[int] | None, weights: Sequence[Tensor]
    ) -> Tensor:
        """The sum of both paths, each output scaled."""
        magnitude = self._rows_of_magnitude()
        if counts is not None:
            magnitude = self._summed_grads(magnitude, "column")
        factor = (magnitude.float() / self._norms(weights)).to(base.dtype)
        if counts is None:
            factor = factor[0]
        else:
            tokens = torch.tensor(counts, device=base.device)
            factor = factor.repeat_interleave(tokens, dim=0, output_size=base.shape[0])
        return (base + self.path(x, counts)) * factor

    def merged_weights(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """The scaled rows, in fp32."""
        factor = self._rows_of_magnitude().float() / self._norms(weights)
        return list(torch.stack(super().merged_weights(weights)) * factor[..., None])

    def parts(self, expert: int) -> list[LowRankPart]:
        return [self.part(expert, magnitude=self._rows_of_magnitude()[expert])]

    def _rows_of_magnitude(self) -> Tensor:
        return self.magnitude.view(1 if self.experts is None else self.experts, -1)

    @torch.no_grad()
    def _norms(self, weights: Sequence[Tensor]) -> Tensor:
        """Norms of the rows of ``W + scaling * B A``, [weights, outputs] in fp32."""
        squares = torch.stack(
            [self.delta_weight(i).add_(w).square_().sum(-1) for i, w in enumerate(weights)]
        )
        if self.kind == "row" and self.group.size() > 1:
            torch.distributed.all_reduce(squares, group=self.group)
        return squares.sqrt()


@dataclass
class DoRA(LowRankPEFT):
    """LoRA with a trained magnitude for each row of the weight.

    Dropout applies only to the low-rank path.
    """

    def adapter_for(self, site: Site) -> nn.Module:
        """Factors and magnitudes for all outputs."""
        return DoRAAdapter(site, self.shape_for(site.name))
