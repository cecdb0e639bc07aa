# SPDX-License-Identifier: Apache-2.0
"""Divergences over a split vocabulary are those over the whole one, and so are their gradients: in fp64."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state

from megatron.bridge.training.distillation import divergence
from megatron.bridge.training.distillation.divergence import (
    kl_divergence,
    mixed_divergence,
    top_kl_divergence,
    top_tokens,
)
from tests.fake_cuda import fake_cuda, fake_mode
from tests.workers import forget_model_parallel, leave

VOCABULARY, TEMPERATURE = 40, 0.7  # below 1, the lowest number of a padded row becomes infinite


def logits(seed, spread=8.0):
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(7, 2, VOCABULARY, generator=generator, dtype=torch.float64) * spread
    found[..., -3:] = torch.finfo(torch.float64).min  # rows that pad a vocabulary
    return found


def naive(student, teacher, temperature):
    """By the definition."""
    p, q = ((x / temperature).log_softmax(-1) for x in (teacher, student))
    return (p.exp() * torch.where(p.exp() > 0, p - q, 0.0)).sum(-1)


def naive_top(student, teacher, count, temperature):
    """By the definition, of distributions over ``count`` tokens and one that stands for the others."""
    chosen = teacher.topk(count, dim=-1).indices

    def lumped(x):
        probs = (x / temperature).softmax(-1)
        named = probs.gather(-1, chosen)
        others = probs.scatter(-1, chosen, 0.0).sum(-1, keepdim=True)
        return torch.cat((named, others), dim=-1)

    p, q = lumped(teacher), lumped(student)
    return (p * (p.log() - q.log())).sum(-1)


def naive_mixed(student, teacher, beta, temperature):
    """The generalized Jensen-Shannon divergence by its definition; at the ends the two Kullback-Leibler divergences."""
    # rows that pad a vocabulary are left out: log 0 has no gradient
    p, q = ((x / temperature)[..., :-3].log_softmax(-1) for x in (teacher, student))
    if beta == 1.0:
        return (q.exp() * (q - p)).sum(-1)
    m = (beta * p.exp() + (1 - beta) * q.exp()).log()
    return beta * (p.exp() * (p - m)).sum(-1) + (1 - beta) * (q.exp() * (q - m)).sum(-1)


def compare(size):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    group = parallel_state.get_tensor_model_parallel_group()

    def mine(x):
        return x.chunk(size, dim=-1)[group.rank()]

    weights = torch.linspace(0.5, 2.0, 14, dtype=torch.float64).view(7, 2)
    teacher = logits(1)
    top = top_tokens(mine(teacher), 5, TEMPERATURE, group)
    cases = {
        "whole": (
            lambda x: naive(x, teacher, TEMPERATURE),
            lambda x: kl_divergence(x, mine(teacher), TEMPERATURE, group),
        ),
        "top": (
            lambda x: naive_top(x, teacher, 5, TEMPERATURE),
            lambda x: top_kl_divergence(x, top, TEMPERATURE, group),
        ),
    }
    for beta in (0.1, 0.5, 1.0):
        cases[f"mixed {beta}"] = (
            lambda x, beta=beta: naive_mixed(x, teacher, beta, TEMPERATURE),
            lambda x, beta=beta: mixed_divergence(x, mine(teacher), beta, TEMPERATURE, group),
        )
    found = {}
    for name, (reference, ours) in cases.items():
        whole = logits(2).requires_grad_()
        expected = reference(whole)
        (expected * weights).sum().backward()
        part = mine(logits(2)).clone().requires_grad_()
        value = ours(part)
        (value * weights).sum().backward()
        assert expected.min() > 0.005  # the distributions differ
        found[name] = (
            (value - expected).abs().max().item(),
            (part.grad - mine(whole.grad)).abs().max().item(),
        )
    forget_model_parallel()
    return found


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    leave()


@pytest.fixture
def group(one_process):
    parallel_state.initialize_model_parallel()
    return parallel_state.get_tensor_model_parallel_group()


def assert_equal(found):
    for name, (value, gradient) in found.items():
        assert value < 1e-12, name
        assert gradient < 1e-12, name


def test_one_rank(one_process):
    assert_equal(compare(1))


def test_two_ranks(two_workers):
    for found in two_workers.run(compare, 2):
        assert_equal(found)


def test_blocks_change_nothing(group, monkeypatch):
    expected = kl_divergence(logits(2), logits(1), 1.0, group)
    monkeypatch.setattr(divergence, "BLOCK_LOGITS", 3 * VOCABULARY)
    torch.testing.assert_close(
        kl_divergence(logits(2), logits(1), 1.0, group), expected, rtol=0, atol=1e-14
    )


def test_a_gpu_gets_larger_blocks():
    with fake_mode():
        rows = fake_cuda(8192, 128 << 10, dtype=torch.bfloat16)
        assert len(divergence._row_blocks(rows)) == 16


def test_the_named_tokens_are_the_likeliest(group):
    found = top_tokens(logits(1), 5, TEMPERATURE, group)
    probs = (logits(1) / TEMPERATURE).log_softmax(-1)
    torch.testing.assert_close(found.log_probs, probs.topk(5).values)
    torch.testing.assert_close(found.ids, probs.topk(5).indices)
    torch.testing.assert_close(
        found.log_probs.exp().sum(-1) + found.log_rest.exp(), torch.ones(7, 2).double()
    )


def test_more_named_tokens_say_more(group):
    bounds = [
        top_kl_divergence(logits(2), top_tokens(logits(1), count, 1.0, group), 1.0, group)
        for count in (1, 5, 20)
    ]
    whole = kl_divergence(logits(2), logits(1), 1.0, group)
    for less, more in zip(bounds, [*bounds[1:], whole], strict=True):
        assert (less <= more + 1e-12).all()
    assert (bounds[0] < whole - 0.1).any()


def test_a_copy_of_the_teacher_has_no_loss_and_no_gradient(group):
    for divergence_of in (
        lambda x: kl_divergence(x, logits(1), 1.0, group),
        lambda x: mixed_divergence(x, logits(1), 0.5, 1.0, group),
        lambda x: mixed_divergence(x, logits(1), 1.0, 1.0, group),
        lambda x: top_kl_divergence(x, top_tokens(logits(1), 5, 1.0, group), 1.0, group),
    ):
        student = logits(1).requires_grad_()
        value = divergence_of(student)
        value.sum().backward()
        assert value.abs().max() < 1e-12
        assert student.grad.abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_precision_is_computed_in_single(group, dtype):
    student, teacher = logits(2).to(dtype), logits(1).to(dtype)
    found = kl_divergence(student, teacher, TEMPERATURE, group)
    assert found.dtype == torch.float32
    assert F.l1_loss(found.double(), naive(student.double(), teacher.double(), TEMPERATURE)) < 1e-5
