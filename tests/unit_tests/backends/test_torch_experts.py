# SPDX-License-Identifier: Apache-2.0
"""Grouped experts equal a loop over the experts, and are saved like Megatron-Core's other experts."""

import pytest
import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import moe_logging
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.bridge.backends.moe import aux_loss_metrics, grouped_experts
from megatron.bridge.backends.moe.grouped_experts import GroupedLinear
from megatron.bridge.backends.specs.torch_spec import TorchSpecProvider
from megatron.bridge.peft import low_rank

pytestmark = pytest.mark.usefixtures("one_rank")
EXPERTS, HIDDEN, FFN = 4, 12, 20
COUNTS = [3, 0, 7, 5]


def build(grouped=True, **settings):
    torch.manual_seed(3)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        num_moe_experts=EXPERTS,
        moe_ffn_hidden_size=FFN,
        use_cpu_initialization=True,
        **{
            "moe_grouped_gemm": grouped,
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "add_bias_linear": False,
            **settings,
        },
    )
    provider = TorchSpecProvider() if grouped else LocalSpecProvider()
    builder = provider.grouped_mlp_modules(grouped)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return builder(EXPERTS, config, pg_collection=groups)


def inputs():
    generator = torch.Generator().manual_seed(5)
    tokens = sum(COUNTS)
    x = torch.randn(tokens, HIDDEN, generator=generator).requires_grad_()
    probs = torch.rand(tokens, generator=generator).requires_grad_()
    return x, torch.tensor(COUNTS), probs


def naive(module, x, counts, probs, activation, gated):
    """Expert by expert, as the formula says."""
    outputs = []
    for index, (rows, scale) in enumerate(
        zip(x.split(counts.tolist()), probs.split(counts.tolist()), strict=True)
    ):
        part = dict(module.named_parameters())
        bias = [part.get(f"linear_fc{layer}.bias{index}") for layer in (1, 2)]
        hidden = F.linear(rows, part[f"linear_fc1.weight{index}"], bias[0])
        if gated:
            gate, value = hidden.chunk(2, dim=-1)
            hidden = activation(gate) * value
        else:
            hidden = activation(hidden)
        outputs.append(
            F.linear(hidden, part[f"linear_fc2.weight{index}"], bias[1]) * scale[:, None]
        )
    return torch.cat(outputs)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gated", [True, False])
def test_equals_a_loop(bias, gated):
    activation = F.silu if gated else F.gelu
    module = build(add_bias_linear=bias, gated_linear_unit=gated, activation_func=activation)
    for name, parameter in module.named_parameters():
        if "bias" in name:
            torch.nn.init.normal_(parameter)
    x, counts, probs = inputs()
    out, leftover = module(x, counts, probs)
    expected = naive(module, x, counts, probs, activation, gated)
    assert leftover is None
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)
    leaves = [x, probs, *module.parameters()]
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(8))
    got = torch.autograd.grad((out * weight).sum(), leaves)
    wanted = torch.autograd.grad((expected * weight).sum(), leaves, allow_unused=True)
    for leaf, one, other in zip(leaves, got, wanted, strict=True):
        torch.testing.assert_close(
            one, torch.zeros_like(leaf) if other is None else other, atol=1e-6, rtol=1e-5
        )


def test_experts_without_tokens_get_zero_gradients():
    """Megatron's gradient buffers wait for every parameter."""
    module = build()
    x, _, probs = inputs()
    module(x[:0], torch.zeros(EXPERTS, dtype=torch.long), probs[:0])[0].sum().backward()
    assert all(
        parameter.grad is not None and not parameter.grad.any() for parameter in module.parameters()
    )


def test_frozen_weights_get_no_gradient():
    module = build()
    module.linear_fc1.requires_grad_(False)
    x, counts, probs = inputs()
    module(x, counts, probs)[0].sum().backward()
    assert module.linear_fc1.weight0.grad is None
    assert module.linear_fc2.weight0.grad is not None
    assert x.grad is not None


@pytest.mark.parametrize("asked", [True, False])
def test_grouped_means_grouped(asked):
    """Megatron-Core's local provider ignores moe_grouped_gemm and builds one module per expert."""
    assert isinstance(build(False), SequentialMLP)
    grouped = build(True, moe_grouped_gemm=asked)
    assert isinstance(grouped, TEGroupedMLP)
    assert isinstance(grouped.linear_fc1, GroupedLinear)
    names = {name for name, _ in grouped.named_parameters()}
    assert names == {
        f"linear_fc{layer}.weight{index}" for layer in (1, 2) for index in range(EXPERTS)
    }


def saved(module):
    """What a checkpoint holds: key, place in the global tensor, and values."""
    state = module.sharded_state_dict("mlp.", metadata=None)
    apply_factories(state)
    tensors = [tensor for tensor in nested_values(state) if isinstance(tensor, ShardedTensor)]
    return {(t.key, t.global_shape, t.global_offset): (t.replica_id, t.data) for t in tensors}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gated", [True, False])
def test_saved_like_sequential_experts(bias, gated):
    settings = {"add_bias_linear": bias, "gated_linear_unit": gated, "activation_func": F.silu}
    grouped, single = build(True, **settings), build(False, **settings)
    for layer in ("linear_fc1", "linear_fc2"):
        for index, expert in enumerate(single.local_experts):
            for kind in ("weight", "bias") if bias else ("weight",):
                source = getattr(grouped, layer).get_parameter(f"{kind}{index}")
                getattr(expert, layer).get_parameter(kind).data = source.data
    ours, theirs = saved(grouped), saved(single)
    assert set(ours) == set(theirs)
    for place, (replica, data) in ours.items():
        assert replica == theirs[place][0]
        assert torch.equal(data, theirs[place][1])


def test_a_model_on_the_meta_device_hides_no_metrics_of_the_next():
    tracker = aux_loss_metrics.GrowingMoEMetricsTracker()
    for device in ("meta", "cpu"):
        tracker.record("load_balancing_loss", torch.ones((), device=device), 2, 3)
    assert tracker.metrics["load_balancing_loss"].values.tolist() == [0, 1, 0]


def test_deeper_models_may_record_metrics():
    """Megatron-Core's tracker is sized by the first model of the process."""
    moe_logging.destroy_moe_metrics_tracker()
    moe_logging.get_moe_metrics_tracker().record("loss", torch.tensor(1.0), 1, 2)
    aux_loss_metrics.install_growing_tracker()
    tracker = moe_logging.get_moe_metrics_tracker()
    aux_loss_metrics.install_growing_tracker()
    assert moe_logging.get_moe_metrics_tracker() is tracker
    tracker.record("loss", torch.tensor(5.0), 4, 4)
    tracker.ensure_initialized("loss", 5)
    tracker.record("loss", torch.tensor(2.0), 2, 2)
    assert tracker.metrics["loss"].values.tolist() == [1.0, 2.0, 0.0, 5.0, 0.0]
    moe_logging.destroy_moe_metrics_tracker()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def grouped_device(request, monkeypatch):
    """One kernel for all experts: PyTorch has it for CPUs too, slowly."""
    if request.param == "cpu":
        monkeypatch.setattr(grouped_experts, "can_use_grouped_mm", lambda x, weight: True)
    return request.param


@pytest.mark.parametrize("frozen", [False, True])
def test_all_experts_in_one_kernel(grouped_device, frozen):
    generator = torch.Generator().manual_seed(5)
    shapes = [(sum(COUNTS), 16), *[(24, 16)] * EXPERTS]
    tensors = [
        torch.randn(shape, generator=generator).bfloat16().to(grouped_device) for shape in shapes
    ]
    x, *weights = (tensor.requires_grad_() for tensor in tensors)
    for weight in weights:
        weight.requires_grad_(not frozen)
    found = grouped_experts._GroupedMatmul.apply(x, COUNTS, False, *weights)
    leaves = [x] if frozen else [x, *weights]
    wide = [tensor.detach().cpu().double().requires_grad_() for tensor in (x, *weights)]
    parts = zip(wide[0].split(COUNTS), wide[1:], strict=True)
    expected = torch.cat([rows @ weight.T for rows, weight in parts])
    grad = torch.randn(expected.shape, generator=generator).bfloat16()
    got = torch.autograd.grad(found, leaves, grad.to(grouped_device))
    wanted = torch.autograd.grad(expected, wide[: len(leaves)], grad.double())
    for one, other in zip((found, *got), (expected, *wanted), strict=True):
        torch.testing.assert_close(
            one.cpu().double(), other, rtol=2**-7, atol=2**-7 * other.abs().max().item()
        )


def test_adapters_of_all_experts_are_one_product(grouped_device, monkeypatch):
    """A loop over 128 experts would launch 256 kernels in each layer and pass."""
    calls, grouped = [], torch._grouped_mm
    weights = torch.randn(EXPERTS, 24, 16).bfloat16().to(grouped_device).requires_grad_()
    x = torch.randn(sum(COUNTS), 16).bfloat16().to(grouped_device)

    def observed(x, weights, **options):
        calls.append(weights)
        return grouped(x, weights, **options)

    monkeypatch.setattr(torch, "_grouped_mm", observed)
    out = low_rank._per_expert(x, weights, COUNTS)
    expected = torch.cat(
        [rows @ weight.T for rows, weight in zip(x.split(COUNTS), weights, strict=True)]
    )
    torch.testing.assert_close(out, expected)
    (stacked,) = calls
    assert stacked.data_ptr() == weights.data_ptr()


def test_weights_behind_one_another_are_not_copied():
    buffer = torch.arange(60.0)
    weights = [
        torch.nn.Parameter(part[:12].view(4, 3)) for part in buffer.split(20)
    ]  # 8 of padding behind each
    for some in (weights, weights[:1]):
        found = grouped_experts.stack_weights(some)
        assert found.data_ptr() == buffer.data_ptr()
        assert torch.equal(found, torch.stack(some))
    for others in (
        weights[::-1],
        [weights[0], weights[2], weights[1]],
        [torch.ones(4, 3) for _ in range(3)],
    ):
        assert torch.equal(grouped_experts.stack_weights(others), torch.stack(others))


@pytest.mark.parametrize("wrapped", [None, False, True])
def test_weights_of_a_model_are_not_copied(wrapped):
    """A wrapper for a distributed optimizer (True) moves the parameters, the last one first."""
    module = build()
    if wrapped is not None:
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=wrapped)
        DistributedDataParallel(module.config, ddp, module)
    for layer in (module.linear_fc1, module.linear_fc2):
        weights = layer.weights()
        assert grouped_experts.stack_weights(weights).data_ptr() == weights[0].data_ptr()
        with torch.no_grad():
            weights[0].add_(1)
        assert len({weight._version for weight in weights}) == 2, (
            "an update of one expert counts for others"
        )


@pytest.mark.gpu
def test_on_cuda():
    """Forward and backward equal the CPU's."""
    module = build()
    x, counts, probs = inputs()
    expected, _ = module(x, counts, probs)
    wanted = torch.autograd.grad(expected.sum(), [x, *module.parameters()])
    module = module.cuda()
    moved = x.detach().cuda().requires_grad_()
    actual, _ = module(moved, counts, probs.detach().cuda())
    got = torch.autograd.grad(actual.sum(), [moved, *module.parameters()])
    torch.testing.assert_close(actual.cpu(), expected, atol=1e-5, rtol=1e-4)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one.cpu(), other, atol=1e-5, rtol=1e-4)
