# SPDX-License-Identifier: Apache-2.0
"""Prove that a Megatron model has the same weights as a Hugging Face checkpoint, and record the proof."""

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from megatron.bridge.models.conversion.check.compare_logits import LogitComparison
from megatron.bridge.models.conversion.model_bridge import HFWeightTuple
from megatron.bridge.models.hf_pretrained.quantized_checkpoint import QuantizedCheckpoint
from megatron.bridge.models.hf_pretrained.safetensors_files import SafetensorsCheckpoint, dtype_name
from megatron.bridge.models.hf_pretrained.safetensors_writer import not_finite


@dataclass(frozen=True)
class TensorProof:
    shape: tuple[int, ...]  # shape of the full tensor
    dtype: str  # as stored in the checkpoint
    sha256: str  # hash of the checkpoint's bytes
    equal: bool  # whether the model's values, in that dtype, have the same bytes
    not_finite: int = 0  # number of values that are NaN or infinite
    # whether the checkpoint has other values because it holds the nearest ones that its stored scales allow
    quantized: bool = False


@dataclass(frozen=True)
class Certificate:
    hf_model: str
    megatron: str
    tensors: dict[str, TensorProof]  # by Hugging Face name
    missing: tuple[str, ...]  # tensors of the checkpoint that the model does not export
    logits: (
        LogitComparison | None
    )  # both models' logits for the same tokens; None if the models were not run
    tolerance: float  # maximum difference of two logits relative to their standard deviation

    @property
    def different(self) -> list[str]:
        """Tensors that neither are equal nor hold the model's values rounded to nearest."""
        return [
            name for name, proof in self.tensors.items() if not proof.equal and not proof.quantized
        ]

    @property
    def quantized(self) -> list[str]:
        """Tensors that hold the model's values rounded to nearest."""
        return [name for name, proof in self.tensors.items() if proof.quantized]

    @property
    def not_finite(self) -> list[str]:
        """Tensors with NaN or infinite values: the outputs of such a model cannot be compared."""
        return [name for name, proof in self.tensors.items() if proof.not_finite]

    @property
    def holds(self) -> bool:
        """Whether all values are finite and everything that was compared is equal, or quantized from the model."""
        agree = self.logits is None or self.logits.relative <= self.tolerance
        return agree and not self.different and not self.missing and not self.not_finite

    def as_dict(self) -> dict[str, object]:
        return {"holds": self.holds, **asdict(self)}


def prove(
    weights: Iterable[HFWeightTuple], source: SafetensorsCheckpoint
) -> tuple[dict[str, TensorProof], tuple[str, ...]]:
    """Compare exported tensors with the checkpoint; return proofs by name, and names that were not exported."""
    proofs: dict[str, TensorProof] = {}
    for name, weight in _known_weights(weights, source):
        proof = _compare_tensors(weight, source[name])
        if not proof.equal and isinstance(source, QuantizedCheckpoint) and name in source.packed:
            is_nearest = source.packed[name].has_nearest_codes(source.stored, weight)
            proof = replace(proof, quantized=is_nearest)
        proofs[name] = proof
    return proofs, tuple(name for name in source if name not in proofs)


def _known_weights(
    weights: Iterable[HFWeightTuple], source: SafetensorsCheckpoint
) -> Iterable[HFWeightTuple]:
    for weight in weights:
        assert weight.param_name in source, (
            f"the plan covers both sides but exports {weight.param_name}"
        )
        yield weight
        source.release(weight.param_name)


def _compare_tensors(tensor: Tensor, stored: Tensor) -> TensorProof:
    tensor_bytes = _byte_view(tensor.detach().cpu().to(stored.dtype))
    stored_bytes = _byte_view(stored)
    return TensorProof(
        shape=tuple(stored.shape),
        dtype=dtype_name(stored.dtype),
        sha256=hashlib.sha256(memoryview(stored_bytes.numpy())).hexdigest(),
        equal=tensor.shape == stored.shape and torch.equal(tensor_bytes, stored_bytes),
        not_finite=not_finite(stored),
    )


def _byte_view(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
