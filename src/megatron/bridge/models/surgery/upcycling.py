# SPDX-License-Identifier: Apache-2.0
"""Upcycling: a mixture of experts that begins with the function of a dense model.

Each expert is a copy of the dense MLP (https://arxiv.org/abs/2212.05055), or one of ``granularity`` equal slices of it
(https://arxiv.org/abs/2410.07524). The experts of all slices of one copy are a group, and have the same row in the
router, so that they are chosen together. The weights of the chosen experts add up to 1, so the outputs of slices are
multiplied by ``granularity``.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.bridge.models.hf_pretrained.causal_lm import PreTrainedCausalLM
from megatron.bridge.models.surgery.folder import NewTensor, write_model
from megatron.bridge.utils.errors import UserError, refuse

DENSE = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class SparseClass:
    """A class of transformers with experts, and how its config and tensors are called."""

    architecture: str
    model_type: str
    experts_key: str  # number of experts in the config
    width_key: str  # width of an expert in the config
    block: str  # module of the experts in a layer
    matrices: tuple[str, str, str]  # names of gate, up and down in an expert
    further: dict[str, Any]  # other keys of the config
    dropped: tuple[str, ...] = ()  # keys of the dense config that it does not have
    must_be_off: tuple[str, ...] = ()  # keys that it cannot express


_MIXTRAL = SparseClass(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    experts_key="num_local_experts",
    width_key="intermediate_size",
    block="block_sparse_moe",
    matrices=("w1", "w3", "w2"),
    further={},
    dropped=("attention_bias", "mlp_bias", "pretraining_tp"),
    must_be_off=("attention_bias", "mlp_bias"),
)
_QWEN3_MOE = SparseClass(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    experts_key="num_experts",
    width_key="moe_intermediate_size",
    block="mlp",
    matrices=DENSE,
    further={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    dropped=("layer_types", "max_window_layers"),
    must_be_off=("use_sliding_window",),
)
SPARSE_CLASSES = {"llama": _MIXTRAL, "mistral": _MIXTRAL, "qwen3": _QWEN3_MOE}
"""``model_type`` of a dense model -> the class with the same attention and experts."""


@dataclass(frozen=True)
class UpcyclingPlan:
    """Sizes of the experts.

    Attributes:
        experts: Experts of a layer.
        active: Experts of a token.
        granularity: Slices of the dense MLP, of which each expert has one.
        seed: Of the weights of the routers.
    """

    experts: int
    active: int
    granularity: int = 1
    seed: int = 1234

    def problems(self, width: int) -> Iterator[str]:
        """Yield a sentence for each size that does not fit ``width``, that of the dense MLP."""
        slices = self.granularity
        for key, value in (("--experts", self.experts), ("--active", self.active)):
            if value < 1 or value % slices:
                yield f"{key} {value}: must be a multiple of --granularity {slices}"
        if self.active > self.experts:
            yield f"--active {self.active}: must be at most --experts {self.experts}"
        if width % slices:
            yield f"--granularity {slices}: must divide intermediate_size={width} of the dense model"


def upcycle(source: PreTrainedCausalLM, folder: Path, plan: UpcyclingPlan) -> str:
    """Write the model with experts into ``folder``, and return its transformers class.

    Raises:
        UserError: The architecture has no counterpart with experts, or the sizes do not fit.
    """
    config = source.raw_config
    target = _class_for(config)
    refuse(plan.problems(config["intermediate_size"]))
    tensors = dict(_tensors(source, target, plan))
    write_model(source, folder, _sparse_config(config, target, plan), tensors)
    return target.architecture


def _class_for(config: dict[str, Any]) -> SparseClass:
    model_type = config.get("model_type")
    if model_type not in SPARSE_CLASSES:
        raise UserError(
            f"model_type={model_type} has no class with experts and the same attention in transformers: upcycle one "
            f"of {', '.join(SPARSE_CLASSES)}"
        )
    target = SPARSE_CLASSES[model_type]
    for key in target.must_be_off:
        if config.get(key):
            raise UserError(
                f"{key}={config[key]}: {target.architecture} does not have it, so {model_type} models with it cannot "
                "be upcycled"
            )
    return target


def _sparse_config(
    config: dict[str, Any], target: SparseClass, plan: UpcyclingPlan
) -> dict[str, Any]:
    shared = {key: value for key, value in config.items() if key not in target.dropped}
    sizes = {
        target.experts_key: plan.experts,
        target.width_key: config["intermediate_size"] // plan.granularity,
        "num_experts_per_tok": plan.active,
    }
    names = {"architectures": [target.architecture], "model_type": target.model_type}
    return shared | names | sizes | target.further


def _tensors(
    source: PreTrainedCausalLM, target: SparseClass, plan: UpcyclingPlan
) -> Iterator[tuple[str, NewTensor]]:
    """Yield the tensors of the new model; those of a layer follow each other."""
    stored = source.state
    for name in stored:
        entry = stored.entries[name]
        layer, mlp, matrix = name.partition(".mlp.")
        if not mlp:
            yield name, NewTensor(entry.dtype, entry.shape, partial(stored.__getitem__, name))
            continue
        kind = matrix.removesuffix(".weight")
        if kind not in DENSE:
            raise UserError(f"{name}: an MLP has gate_proj, up_proj and down_proj without biases")
        yield from _experts(name, layer, kind, source, target, plan)
        if kind == DENSE[0]:
            index = int(layer.rpartition(".")[2])
            shape = (plan.experts, entry.shape[1])
            std = source.raw_config.get("initializer_range", 0.02)
            make = partial(_router, shape, plan, index, std)
            yield f"{layer}.{target.block}.gate.weight", NewTensor(entry.dtype, shape, make)


def _experts(
    name: str,
    layer: str,
    kind: str,
    source: PreTrainedCausalLM,
    target: SparseClass,
    plan: UpcyclingPlan,
) -> Iterator[tuple[str, NewTensor]]:
    """Yield one matrix of each expert: its slice of the dense one, which is divided along the width."""
    entry = source.state.entries[name]
    dim = 1 if kind == "down_proj" else 0
    shape = list(entry.shape)
    shape[dim] //= plan.granularity
    matrix = target.matrices[DENSE.index(kind)]
    for expert in range(plan.experts):
        make: Callable[[], Tensor] = partial(_slice, source, name, dim, expert, plan.granularity)
        expert_name = f"{layer}.{target.block}.experts.{expert}.{matrix}.weight"
        yield expert_name, NewTensor(entry.dtype, tuple(shape), make)


def _slice(
    source: PreTrainedCausalLM, name: str, dim: int, expert: int, granularity: int
) -> Tensor:
    part = source.state[name].chunk(granularity, dim)[expert % granularity]
    is_output = dim == 1
    return part * granularity if is_output and granularity > 1 else part


def _router(shape: tuple[int, int], plan: UpcyclingPlan, layer: int, std: float) -> Tensor:
    """Return the router of a layer: a random row for each group of slices."""
    generator = torch.Generator().manual_seed(plan.seed * 1_000_003 + layer)
    groups = torch.randn(shape[0] // plan.granularity, shape[1], generator=generator) * std
    return groups.repeat_interleave(plan.granularity, dim=0)
