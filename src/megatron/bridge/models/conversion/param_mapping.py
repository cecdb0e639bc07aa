# SPDX-License-Identifier: Apache-2.0
"""How a Megatron parameter and its Hugging Face tensors are made of the same numbers: all mappings by name.

``mapping_base`` has the algebra and the mappings of one tensor to one parameter, ``fused_mapping`` those of
attention and feed-forward layers, ``recurrent_mapping`` those of layers without attention.
"""

from megatron.bridge.models.conversion.fused_mapping import (
    ConcatenatedGatedMLPMapping,
    ConcatenatedQKVMapping,
    GatedMLPMapping,
    GatedQKVMapping,
    InterleavedGatedMLPMapping,
    KVMapping,
    QKVMapping,
    merge_kv_weights,
    merge_qkv_biases,
    merge_qkv_weights,
    split_kv_weights,
    split_qkv_biases,
    split_qkv_weights,
)
from megatron.bridge.models.conversion.mapping_base import (
    AutoMapping,
    Block,
    ColumnParallelMapping,
    DirectMapping,
    Heads,
    HFNames,
    HFWeights,
    Kind,
    MegatronParamMapping,
    Part,
    Piece,
    ReplicatedMapping,
    RowParallelMapping,
    Shard,
    parallel_kind,
)
from megatron.bridge.models.conversion.recurrent_mapping import (
    GDNConv1dMapping,
    GDNLinearMapping,
    MambaConv1dMapping,
    MambaInProjMapping,
    RMSNorm2ZeroCenteredRMSNormMapping,
    SegmentedMapping,
)

__all__ = [
    "AutoMapping",
    "Block",
    "ColumnParallelMapping",
    "ConcatenatedGatedMLPMapping",
    "ConcatenatedQKVMapping",
    "DirectMapping",
    "GDNConv1dMapping",
    "GDNLinearMapping",
    "GatedMLPMapping",
    "GatedQKVMapping",
    "HFNames",
    "HFWeights",
    "Heads",
    "InterleavedGatedMLPMapping",
    "KVMapping",
    "Kind",
    "MambaConv1dMapping",
    "MambaInProjMapping",
    "MegatronParamMapping",
    "Part",
    "Piece",
    "QKVMapping",
    "RMSNorm2ZeroCenteredRMSNormMapping",
    "ReplicatedMapping",
    "RowParallelMapping",
    "SegmentedMapping",
    "Shard",
    "merge_kv_weights",
    "merge_qkv_biases",
    "merge_qkv_weights",
    "parallel_kind",
    "split_kv_weights",
    "split_qkv_biases",
    "split_qkv_weights",
]
