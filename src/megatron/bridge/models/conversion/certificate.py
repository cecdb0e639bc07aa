# SPDX-License-Identifier: Apache-2.0
"""Proof that a Megatron model holds the numbers of a Hugging Face checkpoint, as a document."""

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from megatron.bridge.models.conversion.model_bridge import HFWeightTuple
from megatron.bridge.models.conversion.verify import LogitReport
from megatron.bridge.models.hf_pretrained.safetensors_files import Checkpoint


@dataclass(frozen=True)
class TensorProof:
    """One tensor on both sides.

    Attributes:
        shape: of the whole tensor.
        dtype: as stored in the checkpoint.
        sha256: of the checkpoint's bytes.
        equal: whether the model's numbers, in that dtype, are the same bytes.
    """

    shape: tuple[int, ...]
    dtype: str
    sha256: str
    equal: bool


@dataclass(frozen=True)
class Certificate:
    """What was compared, and how it came out.

    Attributes:
        hf_model: the checkpoint.
        megatron: the Megatron checkpoint.
        tensors: by Hugging Face name.
        missing: tensors of the checkpoint that the model does not give back.
        logits: both models' logits on the same tokens; None where they were not run.
        tolerance: largest allowed difference of two logits over their standard deviation.
    """

    hf_model: str
    megatron: str
    tensors: dict[str, TensorProof]
    missing: tuple[str, ...]
    logits: LogitReport | None
    tolerance: float

    @property
    def different(self) -> list[str]:
        """Tensors that are not equal."""
        return [name for name, proof in self.tensors.items() if not proof.equal]

    @property
    def holds(self) -> bool:
        """Whether everything that was compared is equal."""
        agree = self.logits is None or self.logits.relative <= self.tolerance
        return agree and not self.different and not self.missing

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return {"holds": self.holds, **asdict(self)}


def prove(weights: Iterable[HFWeightTuple], source: Checkpoint) -> tuple[dict[str, TensorProof], tuple[str, ...]]:
    """Compare a stream of exported tensors with the checkpoint, one at a time.

    Returns:
        Proofs by name, and the checkpoint's tensors that the stream did not have.
    """
    proofs = {name: _compare(weight, source[name]) for name, weight in _known(weights, source)}
    return proofs, tuple(name for name in source if name not in proofs)


def _known(weights: Iterable[HFWeightTuple], source: Checkpoint) -> Iterable[HFWeightTuple]:
    for weight in weights:
        assert weight.param_name in source, f"the plan closed and yet exports {weight.param_name}"
        yield weight
        source.release(weight.param_name)


def _compare(found: Tensor, stored: Tensor) -> TensorProof:
    mine, theirs = _bytes(found.detach().cpu().to(stored.dtype)), _bytes(stored)
    return TensorProof(
        shape=tuple(stored.shape),
        dtype=str(stored.dtype).removeprefix("torch."),
        sha256=hashlib.sha256(memoryview(theirs.numpy())).hexdigest(),
        equal=found.shape == stored.shape and torch.equal(mine, theirs),
    )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
