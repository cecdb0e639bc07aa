# SPDX-License-Identifier: Apache-2.0
"""The quick memory of a layout against the exact count on the sharded model."""

from dataclasses import replace

import pytest

from megatron.bridge.autotune.memory import memory_per_rank
from megatron.bridge.autotune.search.price import Pricer
from megatron.bridge.autotune.search.search import candidate_of
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.recipes.catalog import catalog
from tests.unit_tests.autotune.models import provider
from tests.unit_tests.autotune.test_memory import configured

TP, PP, VP = (f"{kind}_model_parallel_size" for kind in ("tensor", "pipeline", "virtual_pipeline"))
EP, SP = "expert_model_parallel_size", "sequence_parallel"
CASES = [
    ("llama", {}, 2),
    ("llama", {TP: 2, SP: True, PP: 2}, 8),
    ("llama", {PP: 2, VP: 2}, 4),
    ("qwen3_moe", {EP: 2, PP: 2}, 8),
    ("deepseek_v3", {EP: 4}, 4),
]


@pytest.mark.parametrize(("family", "values", "world_size"), CASES)
def test_quick_memory_is_the_exact_one(family, values, world_size):
    config = configured(provider(family, 16, **values)).resolve(world_size).config
    exact = [rank.total for rank in memory_per_rank(config, world_size)]
    pricer, candidate = Pricer(config, world_size, "H100 80GB"), candidate_of(config)
    assert tensors(pricer, candidate) == pytest.approx(exact, rel=0.02)
    assert min(pricer.memory(candidate)) > max(exact) + 2e9, (
        "a context and three communicators of NCCL, at least"
    )


def tensors(pricer, candidate):
    """Bytes of tensors on each stage."""
    return [pricer.reserve(candidate).inside(needed) for needed in pricer.memory(candidate)]


@pytest.mark.parametrize(("family", "values", "world_size"), CASES[1:4])
def test_frozen_weights_have_no_gradients(family, values, world_size):
    config = configured(provider(family, 16, **values)).resolve(world_size).config
    whole = Pricer(config, world_size, "H100 80GB").price(candidate_of(config))
    config.peft = LoRA(dim=8)
    exact = [rank.total for rank in memory_per_rank(config, world_size)]
    pricer = Pricer(config, world_size, "H100 80GB")
    adapted = pricer.price(candidate_of(config))
    assert tensors(pricer, candidate_of(config)) == pytest.approx(exact, rel=0.02)
    assert max(adapted.memory) < max(whole.memory)
    assert adapted.seconds < whole.seconds


def test_a_model_whose_experts_overlap_is_priced():
    """On one rank, of which layers are counted, nothing overlaps."""
    values = {EP: 2, "overlap_moe_expert_parallel_comm": True}
    config = configured(provider("qwen3_moe", 4, **values)).resolve(2).config
    config.model.cuda_graph_impl = "local"  # a toy would wait for the CPU in both
    price = Pricer(config, 2, "H100 80GB").price(candidate_of(config))
    config.model.overlap_moe_expert_parallel_comm = False
    assert price.seconds < Pricer(config, 2, "H100 80GB").price(candidate_of(config)).seconds


def test_a_given_layout_is_priced_as_it_is():
    config = configured(provider("llama", 14, **{PP: 2})).resolve(2).config
    pricer, even = Pricer(config, 2, "H100 80GB"), candidate_of(config)
    given = replace(
        even, virtual=8, layout="|".join(["E", *["t"] * 14, "L"])
    )  # fewer layers than chunks
    assert pricer.divide(given) == (given, [0, *[1] * 14, 0])
    assert (
        pricer.price(given).prediction.split["bubble"]
        < pricer.price(even).prediction.split["bubble"]
    )


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_small_kernels_wait_for_the_cpu_unless_a_graph_replays_them(family):
    config = configured(provider(family, 4)).resolve(1).config
    candidate = candidate_of(config)
    launched = Pricer(config, 1, "H100 80GB").price(candidate).prediction
    config.model.cuda_graph_impl = "local"
    replayed = Pricer(config, 1, "H100 80GB").price(candidate).prediction
    assert replayed.split["host"] == 0.0
    microbatches = launched.pipeline.microbatches
    of_layer = 2 * 1.1e-3 if family == "llama" else 2.2e-3 + 2.1e-3
    busy = launched.seconds - sum(
        launched.split[kind] for kind in ("gradients", "parameters", "optimizer", "other", "bubble")
    )
    assert busy == pytest.approx(4 * of_layer * microbatches)


def test_large_kernels_do_not_wait_for_the_cpu():
    recipe = catalog()["llama3_8b_pretrain_config"]
    config = recipe().resolve(recipe.gpus).config
    price = Pricer(config, recipe.gpus, "H100 80GB").price(candidate_of(config))
    assert price.prediction.split["host"] == 0.0
