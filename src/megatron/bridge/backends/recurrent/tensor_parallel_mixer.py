# SPDX-License-Identifier: Apache-2.0
"""The base of mixers that replace attention and split their features over tensor-parallel ranks.

A mixer carries a state along the sequence. Under context parallelism, ranks exchange their part of the tokens for a
part of the features of all tokens, mix these, and exchange back, as Megatron-Core's Mamba-2 mixer does.
"""

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor, nn

from megatron.bridge.backends.attention.block_mask import PackedSegment, packed_segments
from megatron.bridge.backends.attention.context_parallel import heads_to_sequence, sequence_to_heads
from megatron.bridge.backends.decoding.recurrent_cache import RecurrentCache
from megatron.bridge.backends.recurrent.gated_delta_net import init_conv_weight, recomputed


class TensorParallelMixer(MegatronModule):
    """A mixer with attention's interface and an output projection.

    Attributes:
        cache: states of the texts while the model decodes, else None.
        cut: the dimension along which ranks split a parameter, by its name; other parameters are replicated. A
            module with a name here is one of PyTorch's.
        projected: names of the parts of ``in_proj``, if it has any; each part is sharded separately.
        features: number of this rank's features that the output projection reads.
        cp_group: the context-parallel ranks that share the tokens, or None.
    """

    cache: RecurrentCache | None = None
    cut: ClassVar[dict[str, int]]
    projected: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        config: Any,
        submodules: Any,
        layer_number: int,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(
            required_pgs=["tp", "cp"]
        )
        self.layer_number = layer_number
        self.tp_group = groups.tp
        is_split = config.context_parallel_size > 1
        self.cp_group: dist.ProcessGroup | None = groups.cp if is_split else None
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.like: Any = {"device": device, "dtype": config.params_dtype}
        common = {"config": config, "bias": False, "is_expert": False, "tp_group": groups.tp}
        first = {"init_method": config.init_method, "gather_output": False, "skip_bias_add": False}
        last = {
            "init_method": config.output_layer_init_method,
            "input_is_parallel": True,
            "skip_bias_add": True,
        }
        self.first_options: Any = {**common, **first, "tp_comm_buffer_name": "fc1"}
        inner = self.prepare(submodules)
        self.features = inner // groups.tp.size()
        self.out_proj = build_module(
            submodules.out_proj,
            inner,
            config.hidden_size,
            **common,
            **last,
            tp_comm_buffer_name="fc2",
        )

    @property
    def operations(self) -> float:
        """Count forward operations of one token between the matrices, on this rank's features."""
        raise TypeError(f"{type(self).__name__} is abstract")

    def scan_numbers(self, tokens: int) -> int:
        """Return the fp32 numbers in memory in the backward pass of ``mix`` (measured on a CPU, 2026-11-27)."""
        raise TypeError(f"{type(self).__name__} is abstract: it has no numbers of {tokens} tokens")

    def prepare(self, submodules: Any) -> int:
        """Build all modules before the output projection; return the number of its input features over all ranks."""
        raise TypeError(f"{type(self).__name__} is abstract: it has no parts of {submodules}")

    def project(self, hidden_states: Tensor) -> Tensor:
        """Compute the parts that depend on one token each, [s, b, parts]."""
        in_proj: Any = self.in_proj
        return in_proj(hidden_states)[0]

    def mix(self, projected: Tensor, *states: Any) -> tuple[Tensor, tuple[Any, ...]]:
        """Compute outputs [b, s, features] of texts that continue from ``states``, or begin, and their new states."""
        raise TypeError(
            f"{type(self).__name__} is abstract: it does not mix {projected.shape} with {states}"
        )

    def mix_packed(self, projected: Tensor, packed_seq_params: PackedSeqParams | None) -> Tensor:
        """Compute outputs [b, s, features] of packed sequences, each from its start."""
        raise TypeError(
            f"{type(self).__name__} is abstract: no {projected.shape} of {packed_seq_params}"
        )

    def forward(
        self, hidden_states: Tensor, packed_seq_params: PackedSeqParams | None = None, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Map [s, b, hidden] to the same shape; there is no bias."""
        projected = self.project(hidden_states)
        if self.cache is not None:
            return self.out_proj(self.cache.run(projected, self.features, self.mix))
        if self.cp_group is not None:
            return self.out_proj(self._mix_across_ranks(projected, packed_seq_params))
        mixed = recomputed(self.mix_packed, projected.transpose(0, 1), packed_seq_params)
        return self.out_proj(mixed.transpose(0, 1).contiguous())

    def _mix_across_ranks(
        self, projected: Tensor, packed_seq_params: PackedSeqParams | None
    ) -> Tensor:
        """Mix [s, b, parts] of this rank's tokens to [s, b, features], with a part of the features of all tokens."""
        group = self.cp_group
        assert group is not None, "one rank has all tokens"
        size = group.size()
        total = len(projected) * size
        segments = [PackedSegment(0, total, total)]
        if packed_seq_params is not None:
            segments = packed_segments(packed_seq_params)[0]
        parts = projected.split(self.part_widths(), -1)
        by_rank = torch.cat([part.unflatten(-1, (size, -1)) for part in parts], -1)
        all_tokens = sequence_to_heads(by_rank, segments, group).squeeze(2)
        mixed = recomputed(self.mix_packed, all_tokens.transpose(0, 1), packed_seq_params)
        by_token = mixed.transpose(0, 1).unsqueeze(2).contiguous()
        return heads_to_sequence(by_token, segments, group).flatten(2)

    def part_widths(self) -> list[int]:
        """Return the widths of the parts of ``project``'s result, which context-parallel ranks share evenly each."""
        return [self.features] * len(self.projected)

    def share(self, name: str) -> Tensor:
        """Return the part of a parameter that belongs to the features which this context-parallel rank mixes."""
        parameter = self.get_parameter(name)
        if self.cp_group is None or name not in self.cut:
            return parameter
        return parameter.chunk(self.cp_group.size(), self.cut[name])[self.cp_group.rank()]

    def make_parameters(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Register this rank's parameters with these shapes: random matrices and convolutions, ones for the others."""
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.ones(shape, **self.like)))
            weight = getattr(self, name)
            if name in self.cut:
                set_tensor_model_parallel_attributes(weight, True, self.cut[name], 1)
            if self.config.perform_initialization:
                self._initialize(name, weight)

    @torch.no_grad()
    def _initialize(self, name: str, weight: Tensor) -> None:
        """Draw the weight of all ranks and keep this rank's shard: the model is the same under any layout."""
        if name == "dt_bias":
            weight.fill_(-4.6)  # its softplus is 0.01
        elif "conv1d" in name:
            init_conv_weight(weight, self.tp_group)
        elif name.endswith("proj"):
            ranks = self.tp_group.size() if name in self.cut else 1
            dim = self.cut.get(name, 0)
            all_ranks = torch.cat([torch.empty_like(weight)] * ranks, dim)
            self.config.init_method(all_ranks)  # type: ignore[misc]
            weight.copy_(all_ranks.chunk(ranks, dim)[self.tp_group.rank() if ranks > 1 else 0])

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        parameters = {
            name: weight
            for name, weight in self.named_parameters()
            if "." not in name or name in self.cut
        }
        state = make_sharded_tensors_for_checkpoint(
            parameters, prefix, self.cut, sharded_offsets, **groups
        )
        for name, module in self.named_children():
            if f"{name}.weight" in parameters:
                continue
            options: Any = (f"{prefix}{name}.", sharded_offsets, metadata)
            state |= sharded_state_dict_default(module, *options, tp_group=self.tp_group)
        if parts := list(self.projected):
            weight = f"{prefix}in_proj.weight"
            state[weight] = _split_tensor_factory(
                state[weight], [self.features] * len(parts), parts, 0
            )
        return state
