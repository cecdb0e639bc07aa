# SPDX-License-Identifier: Apache-2.0
"""Caches and recurrent states for decoding, attached to the layers of the model that is also trained.

No layer is replaced by another implementation: each layer reads earlier tokens from its ``cache``, so generated
log-probabilities equal those of training. Caches are attached explicitly and can be removed.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.utils import GlobalMemoryBuffer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron.bridge.backends.attention.sparse_attention import Indexer
from megatron.bridge.backends.attention.torch_attention import TorchAttention
from megatron.bridge.backends.decoding.attention_cache import (
    AttentionCache,
    LatentCache,
    WindowCache,
)
from megatron.bridge.backends.decoding.expert_cache import ExpertCache
from megatron.bridge.backends.decoding.op_recorder import run_unrecorded
from megatron.bridge.backends.decoding.packed_linear import (
    PackedForward,
    PackedLayer,
    PackedWeight,
    can_pack,
    pack_weight,
)
from megatron.bridge.backends.decoding.recurrent_cache import RecurrentCache
from megatron.bridge.backends.decoding.step import ROW_MULTIPLE, DecodingStep, padded_rows
from megatron.bridge.backends.moe.grouped_experts import (
    ColumnParallelGroupedLinear,
    GroupedLinear,
    RowParallelGroupedLinear,
)
from megatron.bridge.backends.moe.router_replay import routers_of, rows_of_rank
from megatron.bridge.backends.recurrent.mamba import TorchMambaMixer
from megatron.bridge.backends.specs.torch_spec import TorchLatentAttention
from megatron.bridge.checkpoint.model_io import unwrap
from megatron.bridge.models.features.registry import FEATURES
from megatron.bridge.models.features.rope import frequencies_and_factor
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.patching import patched

_PARALLEL_LINEAR = (tensor_parallel.ColumnParallelLinear, tensor_parallel.RowParallelLinear)
# mixers whose earlier tokens are states of one size
_RECURRENT = tuple(kind for feature in FEATURES for kind in feature.recurrent_modules)


class DecodingState:
    """Caches for all layers of this rank's chunks.

    The caches hold ``tokens`` tokens of all requests together, and the recurrent states of ``requests`` requests. With
    ``pack``, weights on CPUs are stored in a packed format while the caches are attached; meanwhile, the
    parameters are empty.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        tokens: int,
        requests: int,
        pack: bool = False,
        rings: bool = False,
    ) -> None:
        self._pack = pack
        self.bare: list[Any] = [unwrap(chunk) for chunk in chunks]
        check_layers(self.bare)
        device = torch.device(torch.cuda.current_device())
        cache_specs = Kept.of(self.bare, rings)
        self._cores = [item.replaces for item in cache_specs if item.replaces is not None]
        self.spare = tokens  # a cache slot that no text uses, for idle ranks
        caches = [(item.modules, item.make(tokens + 1, requests, device)) for item in cache_specs]
        self._caches = [(module, cache) for modules, cache in caches for module in modules]
        self._expert_caches = [
            (module, cache) for module, cache in self._caches if isinstance(cache, ExpertCache)
        ]
        self._attributes: list[tuple[Any, str, Any]] = [
            *((layer, "core_attention", core) for layer, core in self._cores),
            *((module, "cache", cache) for module, cache in self._caches),
            *((router, "router_replay", cache.choice) for router, cache in self._expert_caches),
        ]
        self._rotary = [
            (item, _Angles(item, self)) for item in _modules_of_kind(self.bare, RotaryEmbedding)
        ]
        self.device = device
        config: Any = self.bare[0].config
        self._vocabulary: int = config.padded_vocab_size // config.tensor_model_parallel_size
        self._step: DecodingStep | None = None
        self._rows: Tensor | None = None
        self._packing = Changes()
        self._is_attached = False

    @property
    def step(self) -> DecodingStep:
        assert self._step is not None, "begin() comes first"
        return self._step

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Attach the caches to the layers inside the context."""
        with Changes() as changes, self._packing:
            # steps run in inference mode, and a training pass may not write into the buffers that they allocate
            buffers = {"_GLOBAL_MEMORY_BUFFER": GlobalMemoryBuffer()}
            changes.enter_context(patched(parallel_state, **buffers))
            for module, name, value in self._attributes:
                changes.set(module, name, value)
            for module, angles in self._rotary:
                changes.set(module, "forward", angles)
            for module in _modules_of_kind(self.bare, GroupedLinear):
                changes.set(module, "row_multiple", ROW_MULTIPLE)
            changes.set(self, "_is_attached", True)
            if self._pack:
                self._pack_weights(self._packing)
            for module in _modules_of_kind(
                self.bare, MoELayer
            ):  # they read the tokens of each expert
                changes.set(module, "forward", partial(run_unrecorded, module.forward))
            for module in _modules_of_kind(self.bare, SharedExpertMLP):
                plain = module.use_shared_expert_gate and not isinstance(
                    module.gate_weight, DTensor
                )
                if plain and not module.config.moe_shared_expert_overlap:
                    changes.set(module, "use_shared_expert_gate", False)
                    changes.callback(module.register_forward_hook(_apply_shared_gate).remove)
            for chunk in self.bare:
                changes.set(chunk, "mtp_process", False)
                changes.set(chunk.config, "mtp_num_layers", None)
                if getattr(chunk, "output_layer", None) is not None:
                    changes.callback(
                        chunk.output_layer.register_forward_pre_hook(self._select_rows).remove
                    )
                    changes.set(
                        chunk.output_layer, "sequence_parallel", False
                    )  # the hook has already gathered them
            yield

    @contextmanager
    def plain_weights(self) -> Iterator[None]:
        """Restore the values of the parameters inside the context, where they may be changed."""
        self._packing.close()
        try:
            yield
        finally:
            if self._pack and self._is_attached:
                self._pack_weights(self._packing)

    def when_weights_move(self, action: Callable[[], object]) -> None:
        """Call ``action`` once, before the packed weights are replaced."""
        self._packing.callback(action)

    def _pack_weights(self, changes: "Changes") -> None:
        for layer in pack_layers(self.bare):
            changes.set(layer.module, layer.name, layer.value)
            if layer.is_embedding:
                changes.move_to_file(layer.weights[0])
            elif _is_plain(layer.module):  # an adapter may need the unpacked weight
                for weight, packed in zip(layer.weights, layer.packed, strict=True):
                    changes.empty(weight, packed)

    def begin(
        self, step: DecodingStep, rows: Sequence[int] | None, records_experts: bool = False
    ) -> None:
        """Prepare for a forward pass over ``step`` that computes the logits of ``rows``, or of all rows if None."""
        self._step = step
        for _, cache in self._caches:
            cache.step = step
        for _, cache in self._expert_caches:
            cache.is_recording = records_experts
        self.select_logits(rows)

    def select_logits(self, rows: Sequence[int] | None) -> None:
        """Let the output layer compute the logits of ``rows`` of the step, or of all rows if None."""
        if rows is None:
            self._rows = None
            return
        padding = self.padded_logits(len(rows)) - len(rows)
        self._rows = torch.tensor([*rows, *[0] * padding], device=self.device)

    def padded_logits(self, rows: int) -> int:
        """Return the number of rows of logits that are computed for ``rows`` rows."""
        # PyTorch computes up to 63 elements at the end of a tensor with scalar code that rounds differently. They must
        # not belong to a row that is used, so an odd vocabulary size needs one more row.
        return padded_rows(rows + bool(self._vocabulary % ROW_MULTIPLE))

    def copy(self, source: int, target: int, count: int) -> None:
        for cache in {id(cache): cache for _, cache in self._caches}.values():
            if isinstance(cache, AttentionCache | ExpertCache):
                cache.copy(source, target, count)

    def choose_experts(self, experts: Tensor, layers: Sequence[int]) -> None:
        """Let routers choose ``experts`` [rows of the step, layers, topk]; ``layers`` has the number of each layer."""
        for router, cache in self._expert_caches:
            chosen = experts[:, layers.index(router.layer_number)]
            cache.choice.experts = rows_of_rank(chosen, router)

    def routed_experts(self) -> dict[int, Tensor]:
        """Return the experts [places, topk] of all cached tokens, by the number of each layer of this rank."""
        return {router.layer_number: cache.experts for router, cache in self._expert_caches}

    @property
    def has_recurrent_layers(self) -> bool:
        return any(isinstance(cache, RecurrentCache) for _, cache in self._caches)

    def find_changing_kernels(self) -> str | None:
        """Name what changes in another single-token step and is not called again by its replay, or return None."""
        config: Any = self.bare[0].config
        if getattr(config, "vision", None) is not None:
            return "a vision tower, because positions have three axes or images change the step"
        if switch_length(self.bare) is not None:
            return "LongRoPE, because long texts have other angles"
        if any(isinstance(module, Indexer) for module, _ in self._caches):
            return "sparse attention, because each text has a choice of its keys"
        return None

    def _select_rows(self, module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Keep the hidden states whose logits are needed, with padding: a hook before the output layer."""
        hidden, *other_args = args
        if module.config.sequence_parallel and module.tp_group.size() > 1:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, group=module.tp_group
            )
        return hidden if self._rows is None else hidden[self._rows], *other_args


class Changes(ExitStack):
    """Changes to modules, which closing undoes."""

    def set(self, instance: Any, name: str, value: Any) -> None:
        """Set an attribute of the instance; closing restores the old value, or removes the attribute if it was new."""
        had = name in vars(instance)
        old = vars(instance).get(name)
        object.__setattr__(instance, name, value)
        self.callback(
            lambda: (
                object.__setattr__(instance, name, old)
                if had
                else object.__delattr__(instance, name)
            )
        )

    def empty(self, weight: nn.Parameter, packed: PackedWeight) -> None:
        """Free the memory of a weight that is stored in packed format."""
        weight.data = weight.data.new_empty(0)
        self.callback(lambda: setattr(weight, "data", packed.unpacked()))

    def move_to_file(self, weight: nn.Parameter) -> None:
        """Map a weight from a temporary file, so that only rows that are looked up need memory."""
        in_memory = weight.data
        try:
            with tempfile.NamedTemporaryFile() as file:
                file.write(in_memory.contiguous().view(torch.uint8).numpy())
                file.flush()
                mapped = torch.from_file(
                    file.name, shared=True, size=in_memory.numel(), dtype=in_memory.dtype
                ).view_as(in_memory)
        except OSError:  # the disk is full
            return
        weight.data = mapped
        self.callback(lambda: setattr(weight, "data", mapped.clone()))


@dataclass(frozen=True)
class PackedModule:
    """A linear layer that multiplies with packed weights while its attribute ``name`` is ``value``."""

    module: Any
    name: str
    value: Any
    weights: list[nn.Parameter]
    packed: list[PackedWeight]
    is_embedding: bool = False  # whether the weight is that of the embedding


def pack_layers(chunks: Sequence[Any]) -> Iterator[PackedModule]:
    """Pack the weights of the linear layers of bare chunks, one layer at a time."""
    not_packed = {id(layer.linear_kv_up_proj) for layer in _latent_layers(chunks)}
    for chunk in chunks:
        output = getattr(chunk, "output_layer", None)
        if output is not None and output.weight is None:  # it uses the embedding's weight
            weight = chunk.shared_embedding_or_output_weight()
            not_packed.add(id(output))
            if can_pack(weight):
                yield _pack_linear(output, weight, is_embedding=True)
    for module in _modules_of_kind(chunks, _PARALLEL_LINEAR):
        if id(module) not in not_packed and can_pack(module.weight):
            yield _pack_linear(module, module.weight)
    for module in _modules_of_kind(chunks, GroupedLinear):
        weights = module.weights()
        if _is_plain(module) and all(can_pack(weight) for weight in weights):
            packed = [pack_weight(weight) for weight in weights]
            yield PackedModule(module, "packed", packed, weights, packed)


def _pack_linear(layer: Any, weight: nn.Parameter, is_embedding: bool = False) -> PackedModule:
    packed = pack_weight(weight)
    name, value = "_forward_impl", PackedForward(packed)
    if _is_plain(layer) and layer.tp_group.size() == 1:
        name, value = "forward", PackedLayer(layer, packed)
    return PackedModule(layer, name, value, [weight], [packed], is_embedding)


def _is_plain(layer: Any) -> bool:
    """Return whether a linear layer has no adapter; layers with an adapter belong to a subclass."""
    return type(layer) in (*_PARALLEL_LINEAR, ColumnParallelGroupedLinear, RowParallelGroupedLinear)


def _apply_shared_gate(module: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Apply Megatron-Core's gate, one value per row, with padding so that scalar code rounds no row that is used."""
    logits = nn.functional.linear(args[0], module.gate_weight)
    gates = nn.functional.pad(logits.flatten(), (0, -logits.numel() % 64)).sigmoid()
    return output * gates[: logits.numel()].view_as(logits)


class _Angles:
    """Replacement for the forward pass of a rotary embedding: multiplies positions by the angles of position 1."""

    def __init__(self, module: Any, state: DecodingState) -> None:
        self._module = module
        self._state = state
        self._step: DecodingStep | None = None
        self._found: Any = None
        self._unit: tuple[Tensor, float | None] | None = None

    def __call__(self, *_: Any, **__: Any) -> Any:
        if self._step is not self._state.step:
            self._step = self._state.step
            self._found = self._compute(self._step)
        return self._found

    def _compute(self, step: DecodingStep) -> Any:
        if self._unit is None:
            embedding = self._module.get_emb(
                1, 1
            )  # [1, 1, 1, d], including YaRN's factor if there is one
            self._unit = embedding if isinstance(embedding, tuple) else (embedding, None)
        unit, factor = self._unit
        positions = step.positions.float().view(-1, 1, 1, 1)
        angles = positions * unit
        limit = original_length(self._module)
        if limit is not None and any(span.long for span in step.spans):
            frequencies = frequencies_and_factor(self._module._reference, limit + 1)[0].to(
                self._state.device
            )
            long_unit = torch.cat((frequencies, frequencies)).view(1, 1, 1, -1)
            angles = torch.where(step.long_rows, positions * long_unit, angles)
        return angles if factor is None else (angles, factor)


def original_length(module: nn.Module) -> int | None:
    """Return the length above which texts have different rotary frequencies, or None if they never change."""
    reference: Any = getattr(module, "_reference", None)
    if reference is None or reference.rope_parameters["rope_type"] != "longrope":
        return None
    return int(reference.rope_parameters["original_max_position_embeddings"])


@dataclass(frozen=True)
class Kept:
    """A cache and the layers that share it."""

    modules: tuple[Any, ...]  # layers whose ``cache`` attribute it becomes
    make: Callable[
        [int, int, torch.device], Any
    ]  # creates the cache from (tokens of all texts, texts, device)
    per_token: int = 0  # bytes per token
    per_request: int = 0
    replaces: tuple[Any, TorchAttention] | None = (
        None  # a layer, and the core attention that replaces the layer's own
    )

    @classmethod
    def of(cls, chunks: Sequence[nn.Module], rings: bool = False) -> "list[Kept]":
        """Return the caches of this rank's layers; with ``rings``, a layer with a window caches only the window."""
        bare = [unwrap(chunk) for chunk in chunks]
        latent = [_latent_cache(layer) for layer in _latent_layers(bare)]
        absorbed = {id(module) for latent_cache in latent for module in latent_cache.modules}
        foreign = [(layer, _torch_core(layer)) for layer in _foreign_layers(bare)]
        layers_and_cores = [
            (layer, getattr(layer, "core_attention", None))
            for chunk in bare
            for layer in chunk.modules()
        ]
        return [
            *(_attention_cache(layer, core, rings, (layer, core)) for layer, core in foreign),
            *latent,
            *(
                _plain_cache(layer, (1, (layer.linear_wk.out_features, 0)))
                for layer in _modules_of_kind(bare, Indexer)
            ),
            *(
                _attention_cache(layer, core, rings)
                for layer, core in layers_and_cores
                if isinstance(core, TorchAttention) and id(core) not in absorbed
            ),
            *(_recurrent_cache(layer) for layer in _modules_of_kind(bare, _RECURRENT)),
            *(_expert_cache(router) for chunk in bare for router in routers_of(chunk)),
        ]


def _attention_cache(layer: Any, core: TorchAttention, rings: bool, replaces: Any = None) -> Kept:
    if not rings or core.window_size is None:
        return _plain_cache(core, _cache_shape(layer), replaces)
    length = core.window_size[0] + 1
    shape = _cache_shape(layer)
    dtype = core.config.params_dtype
    size = length * AttentionCache.bytes_per_token(*shape, dtype)
    make: Any = lambda _, requests, device: WindowCache(requests, length, *shape, dtype, device)  # noqa: E731
    return Kept((core,), make, per_request=size, replaces=replaces)


def _plain_cache(module: Any, shape: tuple[int, tuple[int, int]], replaces: Any = None) -> Kept:
    dtype = module.config.params_dtype
    make: Any = lambda tokens, _, device: AttentionCache(tokens, *shape, dtype, device)  # noqa: E731
    return Kept((module,), make, AttentionCache.bytes_per_token(*shape, dtype), replaces=replaces)


def _latent_cache(layer: Any) -> Kept:
    config = layer.config
    size = (config.kv_lora_rank + config.qk_pos_emb_head_dim) * config.params_dtype.itemsize
    make: Any = lambda tokens, _, device: LatentCache(tokens, layer, config.params_dtype, device)  # noqa: E731
    return Kept((layer, layer.core_attention), make, size)


def _recurrent_cache(layer: Any) -> Kept:
    shapes = layer.state_shapes()
    make: Any = lambda _, requests, device: RecurrentCache(requests, shapes, device)  # noqa: E731
    return Kept((layer,), make, per_request=sum(state_shape.bytes for state_shape in shapes))


def _expert_cache(router: Any) -> Kept:
    make: Any = lambda tokens, _, device: ExpertCache(tokens, router, device)  # noqa: E731
    return Kept((router,), make, ExpertCache.bytes_per_token(router))


def _modules_of_kind(chunks: Sequence[nn.Module], kinds: Any) -> Iterator[Any]:
    seen_ids: set[int] = set()
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, kinds) and id(module) not in seen_ids:
                seen_ids.add(id(module))
                yield module


def _latent_layers(chunks: Sequence[nn.Module]) -> Iterator[Any]:
    """Yield layers that cache latents; layers with a sharded or adapted up projection cache keys instead."""
    for layer in _modules_of_kind(chunks, TorchLatentAttention):
        up = layer.linear_kv_up_proj
        if _is_plain(up) and not isinstance(up.weight, DTensor):
            yield layer


def _cache_shape(layer: Any) -> tuple[int, tuple[int, int]]:
    if isinstance(layer, TorchLatentAttention):
        return layer.num_attention_heads_per_partition, (layer.q_head_dim, layer.config.v_head_dim)
    width = layer.hidden_size_per_attention_head
    key_width = width + getattr(layer.core_attention, "extra_key_width", 0)
    return layer.num_query_groups_per_partition, (key_width, width)


def check_layers(chunks: Sequence[Any]) -> None:
    config = chunks[0].config
    recurrent = any(True for _ in _modules_of_kind(chunks, _RECURRENT))
    if config.context_parallel_size > 1 and recurrent:
        raise UserError(
            f"context_parallel_size={config.context_parallel_size} splits recurrent layers by heads, which decoding "
            "does not support: set it to 1 to generate"
        )
    if config.moe_expert_capacity_factor is not None:
        raise UserError(
            f"moe_expert_capacity_factor={config.moe_expert_capacity_factor} drops tokens depending on the rest of the "
            "batch: set it to None to generate"
        )
    for module in _modules_of_kind(chunks, (MambaMixer, MultiLatentAttention)):
        if not isinstance(module, (TorchMambaMixer, TorchLatentAttention)):
            raise UserError(
                f"backend={config.backend!r} has {type(module).__name__}, which has no cache: set "
                "model.backend='torch' to generate"
            )


def _foreign_layers(chunks: Sequence[nn.Module]) -> Iterator[Any]:
    """Yield the layers with Megatron-Core's or Transformer Engine's attention."""
    for layer in _modules_of_kind(chunks, SelfAttention):
        if not isinstance(layer.core_attention, TorchAttention):
            yield layer


def _torch_core(layer: Any) -> TorchAttention:
    """Return a core attention for decoding that replaces the layer's own, with the same sinks and hooks."""
    source = layer.core_attention
    scale = getattr(source, "softmax_scale", None)
    core = TorchAttention(
        layer.config, layer.layer_number, layer.attn_mask_type, "self", softmax_scale=scale
    )
    core.eval()
    core.softmax_offset = getattr(source, "softmax_offset", None)
    core._forward_pre_hooks = source._forward_pre_hooks
    core._forward_pre_hooks_with_kwargs = source._forward_pre_hooks_with_kwargs
    return core


def switch_length(chunks: Sequence[nn.Module]) -> int | None:
    """Return the length above which a text has different rotary frequencies; see ``original_length``."""
    for module in _modules_of_kind([unwrap(chunk) for chunk in chunks], RotaryEmbedding):
        limit = original_length(module)
        if limit is not None:
            return limit
    return None
