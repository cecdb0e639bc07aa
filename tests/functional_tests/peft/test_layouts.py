# SPDX-License-Identifier: Apache-2.0
"""Adapters under parallel layouts: the same training as in one process, and the same adapter written."""

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.bridge.peft.canonical_lora import CanonicalLoRA
from megatron.bridge.peft.dora import DoRA
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.peft.vera import VeRA
from megatron.bridge.utils.errors import UserError
from tests.toy_adapters import (
    adapted,
    exported,
    gradients,
    is_last_stage,
    make,
    reference,
    reference_train,
    saved_by_peft,
    shake,
    train,
)
from tests.toy_models import make_llama
from tests.unit_tests.peft import test_parity
from tests.workers import forget_model_parallel

PISSA_PARTS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

TP2 = {"tensor_model_parallel_size": 2}
SP2 = {**TP2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
EP2 = {"expert_model_parallel_size": 2}

METHODS = {
    "lora": LoRA(dim=4, alpha=8),
    "dora": DoRA(dim=4, alpha=8),
    "canonical": CanonicalLoRA(dim=4, alpha=8),
    "last_layer": LoRA(target_modules=["*.layers.1.*"], dim=4, alpha=8),
    "router": LoRA(
        target_modules=["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "router"],
        dim=4,
        alpha=8,
    ),
}
DENSE = {
    "lora pp2": ("lora", PP2),
    "lora dp2": ("lora", {}),
    "last layer pp2": ("last_layer", PP2),
    "lora recomputed": ("lora", {**SP2, **FULL}),
    "dora tp2": ("dora", TP2),
    "dora sp2": ("dora", SP2),
    "canonical sp2": ("canonical", SP2),
}
EXPERTS = {
    "lora ep2": ("router", EP2),
    "lora sp2 etp2": ("router", {**SP2, "expert_tensor_parallel_size": 2}),
    "lora sp2 ep2": ("router", {**SP2, **EP2, "expert_tensor_parallel_size": 1}),
    "dora sp2 etp2": ("dora", {**SP2, "expert_tensor_parallel_size": 2}),
}
STEPS = 4
TOLERANCE = 1e-5


def run(directory, scratch, method, layout):
    """Losses and adapters after some steps; the numbers do not depend on the layout's first values."""
    torch.manual_seed(0)
    bridge, model = adapted(Path(directory), METHODS[method], layout)
    shake(bridge, model, Path(scratch))
    losses = train(model, STEPS)
    tensors = {name: tensor.numpy() for name, tensor in exported(bridge, model).items()}
    last = is_last_stage()
    forget_model_parallel()
    return losses if last else None, tensors


def run_all(directory, scratch, cases):
    return {name: run(directory, f"{scratch}/{name}", *case) for name, case in cases.items()}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    make("llama", directory)
    return directory


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    directory = tmp_path_factory.mktemp("experts")
    make("qwen3_moe", directory)
    return directory


def compare(directory, tmp_path, pool, cases):
    """All cases in one go: starting a worker's function costs more than its steps."""
    alone = {
        method: run(directory, tmp_path / f"alone {method}", method, {})
        for method in dict.fromkeys(method for method, _ in cases.values())
    }
    ranks = pool.run(run_all, str(directory), str(tmp_path), cases)
    for name, (method, _) in cases.items():
        losses, tensors = alone[method]
        for rank in ranks:
            found, theirs = rank[name]
            assert found is None or found == pytest.approx(losses, abs=TOLERANCE), name
            assert theirs.keys() == tensors.keys(), name
            for key, tensor in tensors.items():
                np.testing.assert_allclose(
                    theirs[key], tensor, rtol=TOLERANCE, atol=TOLERANCE, err_msg=f"{name} {key}"
                )
        assert any(rank[name][0] is not None for rank in ranks)


def test_dense(llama, tmp_path, two_workers):
    compare(llama, tmp_path, two_workers, DENSE)


def test_experts(experts, tmp_path, two_workers):
    compare(experts, tmp_path, two_workers, EXPERTS)


PRINCIPAL = {
    "fused": LoRA(dim=4, alpha=8, init_lora_weights="pissa"),
    "parts": LoRA(target_modules=PISSA_PARTS, dim=4, alpha=8, init_lora_weights="pissa_niter_3"),
}
PRINCIPAL_CASES = {
    "llama": [("fused", SP2), ("parts", TP2), ("parts", PP2), ("fused", {})],
    "experts": [
        ("fused", EP2),
        ("fused", {**SP2, "expert_tensor_parallel_size": 2}),
        ("fused", {**SP2, **EP2, "expert_tensor_parallel_size": 1}),
    ],
}


def principal_start(directory, method, layout):
    """Products of the first factors, losses, and products of the trained factors, by module."""
    torch.manual_seed(0)
    bridge, model = adapted(Path(directory), PRINCIPAL[method], layout)
    start = first_products(bridge, model)
    losses = train(model, STEPS, epsilon=1e-3)
    last = is_last_stage()
    end = first_products(bridge, model)
    forget_model_parallel()
    return start, losses if last else None, end


def first_products(bridge, model):
    """The products of the trained halves of the factors, which do not depend on signs of singular vectors."""
    tensors = exported(bridge, model)
    products = {}
    for name, a in tensors.items():
        if "lora_A" in name:
            b = tensors[name.replace("lora_A", "lora_B")]
            products[name] = (b[:, :4] @ a[:4]).numpy()
    return products


def all_principal_starts(directory, cases):
    return [principal_start(directory, *case) for case in cases]


@pytest.mark.parametrize("kind", PRINCIPAL_CASES)
def test_principal_factors_are_those_of_one_process(llama, experts, two_workers, kind):
    directory = {"llama": llama, "experts": experts}[kind]
    cases = PRINCIPAL_CASES[kind]
    alone = {
        method: principal_start(directory, method, {})
        for method in dict.fromkeys(method for method, _ in cases)
    }
    for ranks in two_workers.run(all_principal_starts, str(directory), cases):
        for (method, _), (start, losses, end) in zip(cases, ranks, strict=True):
            first, losses_alone, last = alone[method]
            assert losses is None or losses == pytest.approx(losses_alone, abs=TOLERANCE)
            assert start.keys() == first.keys()
            for name, product in start.items():
                np.testing.assert_allclose(product, first[name], atol=1e-6, err_msg=name)
                np.testing.assert_allclose(end[name], last[name], atol=TOLERANCE, err_msg=name)


VECTORS = {
    "fused": VeRA(dim=8, projection_prng_key=1),
    "parts": VeRA(target_modules=PISSA_PARTS, dim=8, projection_prng_key=1),
}
VECTOR_CASES = {
    "llama": [("fused", SP2), ("parts", TP2), ("parts", SP2), ("parts", PP2), ("fused", {})],
    "experts": PRINCIPAL_CASES["experts"],
}


def vector_training(directory, method, layout):
    """Losses, the trained adapters in LoRA's form, and gradients of the vectors d, which no rank cuts."""
    torch.manual_seed(0)
    bridge, model = adapted(Path(directory), VECTORS[method], layout)
    with torch.no_grad():
        for name, parameter in model[0].named_parameters():
            if name.endswith(".scale"):
                parameter.fill_(0.3)
    losses = train(model, STEPS, epsilon=1e-3)
    last = is_last_stage()
    tensors = {name: tensor.numpy() for name, tensor in exported(bridge, model).items()}
    for chunk in model:
        chunk.zero_grad_buffer()
    gradients(model)
    of_d = {
        name: parameter.main_grad.numpy().copy()
        for name, parameter in model[0].module.named_parameters()
        if name.endswith(".d")
    }
    forget_model_parallel()
    return losses if last else None, tensors, of_d


def all_vector_trainings(directory, cases):
    return [vector_training(directory, *case) for case in cases]


@pytest.mark.parametrize("kind", VECTOR_CASES)
def test_vectors_are_those_of_one_process(llama, experts, two_workers, kind):
    directory = {"llama": llama, "experts": experts}[kind]
    cases = VECTOR_CASES[kind]
    alone = {
        method: vector_training(directory, method, {})
        for method in dict.fromkeys(method for method, _ in cases)
    }
    for ranks in two_workers.run(all_vector_trainings, str(directory), cases):
        for (method, layout), (losses, tensors, of_d) in zip(cases, ranks, strict=True):
            losses_alone, tensors_alone, of_d_alone = alone[method]
            assert losses is None or losses == pytest.approx(losses_alone, abs=TOLERANCE)
            assert tensors.keys() == tensors_alone.keys()
            for name, tensor in tensors.items():
                np.testing.assert_allclose(
                    tensor, tensors_alone[name], atol=TOLERANCE, err_msg=f"{layout} {name}"
                )
            if layout.keys() & {*PP2, *EP2}:  # ranks have different layers or experts
                continue
            for name, gradient in of_d_alone.items():
                np.testing.assert_allclose(
                    of_d[name], gradient, rtol=1e-3, atol=TOLERANCE, err_msg=f"{layout} {name}"
                )


def save_start(directory, scratch):
    bridge, model = adapted(Path(directory), METHODS["canonical"], SP2)
    shake(bridge, model, Path(scratch))
    losses = train(model, STEPS)
    return losses, {name: tensor.numpy() for name, tensor in exported(bridge, model).items()}


def test_tensor_parallel_against_peft(llama, tmp_path, two_workers):
    ranks = two_workers.run(save_start, str(llama), str(tmp_path / "adapter"))
    theirs = reference("llama", tmp_path / "adapter", share=False)
    losses = reference_train(theirs, STEPS)
    saved = saved_by_peft(theirs)
    for found, tensors in ranks:
        assert found == pytest.approx(losses, abs=TOLERANCE)
        for name, tensor in tensors.items():
            np.testing.assert_allclose(
                tensor, saved[name].numpy(), rtol=TOLERANCE, atol=TOLERANCE, err_msg=name
            )


def dropped_out(directory, position, layout):
    """Losses with dropout, and the factors that both ranks hold as a whole, after some steps."""
    torch.manual_seed(0)
    _, model = adapted(
        Path(directory), LoRA(dim=4, alpha=8, dropout=0.5, dropout_position=position), layout
    )
    losses = train(model, STEPS)
    whole = {
        name: one.detach().numpy().copy()
        for name, one in model[0].module.named_parameters()
        if one.requires_grad and not one.tensor_model_parallel
    }
    forget_model_parallel()
    return losses, whole


def all_dropped_out(directory):
    cases = [(position, layout) for position in ("pre", "post") for layout in (TP2, SP2)]
    return [dropped_out(directory, *case) for case in cases]


def test_dropout_leaves_shared_factors_shared(llama, two_workers):
    """Where ranks hold the same activations they must drop the same ones, or their copies of a factor drift."""
    first, second = two_workers.run(all_dropped_out, str(llama))
    for (losses, whole), (other_losses, other_whole) in zip(first, second, strict=True):
        assert losses == pytest.approx(other_losses, abs=TOLERANCE)
        assert (
            len(whole) == 8
        )  # one of two factors beside each of four linear layers, in two layers
        for name, factor in whole.items():
            np.testing.assert_array_equal(factor, other_whole[name], err_msg=name)
    (_, inputs), _, (_, outputs), _ = first
    assert all(
        np.abs(inputs[name] - outputs[name]).max() > 1e-6 for name in inputs
    )  # something was dropped


def experts_start_and_end(directory):
    """Ten steps of adapters on experts that are cut over two ranks: everything before and after."""
    bridge, model = adapted(
        Path(directory), test_parity.ROUTED, {**SP2, "expert_tensor_parallel_size": 2}
    )
    found = [numbers(bridge, model), train(model, 10), numbers(bridge, model)]
    forget_model_parallel()
    return found


def numbers(bridge, model):
    tensors = {name: tensor.numpy() for name, tensor in exported(bridge, model).items()}
    return tensors, [(a.numpy(), b.numpy()) for a, b in test_parity.raw_factors(model)]


def joined(first, second):
    """Factors from those of two ranks: experts have B of the first layer cut, A of the second."""
    for mine, others in zip(first, second, strict=True):
        halves, experts = mine[1].ndim == 4, mine[0].ndim == 3
        a = np.concatenate((mine[0], others[0]), axis=2) if experts and not halves else mine[0]
        b = np.concatenate((mine[1], others[1]), axis=2) if halves else mine[1]
        yield test_parity.as_peft(torch.from_numpy(a), torch.from_numpy(b))


def test_experts_cut_over_ranks_against_peft(experts, two_workers):
    (start, losses, end), (other_start, other_losses, other_end) = two_workers.run(
        experts_start_and_end, experts
    )
    tensors = {name: torch.from_numpy(tensor) for name, tensor in start[0].items()}
    factors = joined(start[1], other_start[1])
    theirs = test_parity.reference_with_experts("qwen3_moe", test_parity.ROUTED, tensors, factors)
    assert losses == other_losses == pytest.approx(reference_train(theirs, 10), abs=TOLERANCE)
    tensors = {name: torch.from_numpy(tensor) for name, tensor in end[0].items()}
    test_parity.compare_with_experts(tensors, joined(end[1], other_end[1]), theirs)


def train_half_of_a_tie(directory, modules):
    method = LoRA(target_modules=["linear_qkv"], dim=2, modules_to_save=modules)
    with pytest.raises(UserError, match=r"are tied over pipeline stages: name both"):
        adapted(directory, method, PP2)
    forget_model_parallel()


@pytest.mark.parametrize("modules", [["output_layer"], ["*.word_embeddings"]])
def test_one_copy_of_a_tied_embedding_is_not_trained_alone(tmp_path, two_workers, modules):
    make_llama(tmp_path / "hf", tie_word_embeddings=True)
    two_workers.run(train_half_of_a_tie, tmp_path / "hf", modules)
