# SPDX-License-Identifier: Apache-2.0
"""Adapters on a base in few bits under parallel layouts: the training of one process."""

from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig

from megatron.bridge import AutoBridge
from megatron.bridge.backends.low_bit.weight import LowBitWeight
from megatron.bridge.peft.checkpoint import fingerprint
from megatron.bridge.peft.dora import DoRA
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.peft.low_bit_base import low_bit_weights
from tests.toy_adapters import (
    adapted,
    exported,
    is_last_stage,
    make,
    make_gpt_oss_mxfp4,
    shake,
    train,
)
from tests.workers import forget_model_parallel

TP2 = {"tensor_model_parallel_size": 2}
SP2 = {**TP2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
# experts in one tensor, in the codes that they are published in
PUBLISHED = {"sp2 ep2": {**SP2, **EP2, "expert_tensor_parallel_size": 1}, "ep2": EP2}
METHODS = {
    "nf4": LoRA(dim=4, alpha=8, base_precision="nf4"),
    "fp8": LoRA(dim=4, alpha=8, base_precision="fp8"),
    "mxfp4": LoRA(dim=4, alpha=8, base_precision="mxfp4"),
    "dora": DoRA(dim=4, alpha=8, base_precision="nf4"),
}
DENSE = {
    "nf4 tp2": ("nf4", TP2),
    "nf4 sp2 recomputed": ("nf4", {**SP2, **FULL}),
    "fp8 pp2": ("fp8", PP2),
    "mxfp4 sp2": ("mxfp4", SP2),
    "dora tp2": ("dora", TP2),
}
EXPERTS = {
    "nf4 ep2": ("nf4", EP2),
    "fp8 sp2 etp2": ("fp8", {**SP2, "expert_tensor_parallel_size": 2}),
    "mxfp4 pp2": ("mxfp4", PP2),
}
STEPS = 3
TOLERANCE = 1e-5


def run(directory, scratch, method, layout):
    """Losses and adapters after some steps, and the fingerprint of the base."""
    torch.manual_seed(0)
    bridge, model = adapted(Path(directory), METHODS[method], layout)
    shake(bridge, model, Path(scratch))
    base = fingerprint(model)
    assert any(isinstance(weight, LowBitWeight) for weight in model[0].parameters())
    losses = train(model, STEPS, epsilon=1e-4)
    tensors = {name: tensor.numpy() for name, tensor in exported(bridge, model).items()}
    last = is_last_stage()
    forget_model_parallel()
    return losses if last else None, tensors, base


def run_all(directory, scratch, cases):
    return {name: run(directory, f"{scratch}/{name}", *case) for name, case in cases.items()}


@pytest.mark.parametrize(("kind", "cases"), [("wide_llama", DENSE), ("wide_experts", EXPERTS)])
def test_layouts_train_as_one_process(tmp_path, two_workers, kind, cases):
    make(kind, tmp_path / "base")
    alone = {
        method: run(tmp_path / "base", tmp_path / f"alone {method}", method, {})
        for method in dict.fromkeys(method for method, _ in cases.values())
    }
    ranks = two_workers.run(run_all, str(tmp_path / "base"), str(tmp_path), cases)
    for name, (method, _) in cases.items():
        losses, tensors, base = alone[method]
        assert any(rank[name][0] is not None for rank in ranks)
        for rank in ranks:
            of_rank, exported_tensors, base_of_rank = rank[name]
            assert base_of_rank == base, name
            assert of_rank is None or of_rank == pytest.approx(losses, abs=TOLERANCE), name
            assert exported_tensors.keys() == tensors.keys(), name
            for key, tensor in tensors.items():
                np.testing.assert_allclose(
                    exported_tensors[key], tensor, TOLERANCE, TOLERANCE, err_msg=f"{name} {key}"
                )


def export_gpt_oss(directory, scratch, layout):
    """Kept codes, losses and the adapter of some steps."""
    peft = LoRA(
        target_modules=["linear_proj", "*.mlp.experts.linear_fc1", "*.mlp.experts.linear_fc2"],
        dim=4,
        base_precision="mxfp4",
        base_keep_high=["*.self_attention.*"],
    )
    bridge = AutoBridge.from_hf_pretrained(directory)
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.moe_aux_loss_coeff = 0.0
    for name, value in layout.items():
        setattr(provider, name, value)

    def load(chunks):
        peft.lower_base(chunks, is_loaded=False)
        bridge.load_hf_weights(chunks)
        peft(chunks)

    provider.register_pre_wrap_hook(load)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    model = provider.provide_distributed_model(ddp_config=ddp)
    kept = {weight.has_codes_of_source for weight in low_bit_weights(model)}
    shake(bridge, model, Path(scratch))
    losses = train(model, STEPS, epsilon=1e-4)
    tensors = {name: tensor.float().numpy() for name, tensor in exported(bridge, model).items()}
    forget_model_parallel()
    return kept == {True}, losses, tensors


def test_published_experts_train_under_layouts(tmp_path, two_workers):
    make_gpt_oss_mxfp4(tmp_path / "base")
    kept, losses, tensors = export_gpt_oss(tmp_path / "base", tmp_path / "alone", {})
    assert kept
    for name, layout in PUBLISHED.items():
        for rank in two_workers.run(
            export_gpt_oss, str(tmp_path / "base"), f"{tmp_path}/{name}", layout
        ):
            assert rank[0], name
            assert rank[1] == pytest.approx(losses, abs=TOLERANCE), name
            assert rank[2].keys() == tensors.keys(), name
            for key, tensor in tensors.items():
                np.testing.assert_allclose(rank[2][key], tensor, TOLERANCE, TOLERANCE, err_msg=key)
