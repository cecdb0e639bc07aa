# SPDX-License-Identifier: Apache-2.0
"""The messages of a rank that is rehearsed alone are those that it sends among others."""

from collections import Counter

import pytest

from megatron.bridge.backends.cpu.without_memory import one_rank
from megatron.bridge.cli.rehearse.rank import messages_of_step
from megatron.bridge.training import setup
from megatron.bridge.training.optim.optimizer import build_optimizer
from tests.unit_tests.autotune.models import provider
from tests.unit_tests.autotune.test_memory import configured
from tests.workers import forget_model_parallel, leave

TP, PP, VP = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
)
LAYOUTS = [
    ("llama", {TP: 2, "sequence_parallel": True, PP: 2}, {}),
    ("llama", {PP: 2, VP: 2}, {"overlap_grad_reduce": True, "overlap_param_gather": True}),
    pytest.param("llama", {"context_parallel_size": 2, TP: 2}, {}, marks=pytest.mark.slow),
    (
        "qwen3",
        {
            PP: 4,
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
        {},
    ),
]


def messages(family, model, ddp):
    """What is reduced, gathered, sent and received, in order; objects are not exchanged in a rehearsal."""
    config = configured(provider(family, 4, **model))
    config.train.global_batch_size = 8
    for key, value in ddp.items():
        setattr(config.ddp, key, value)
    config = config.resolve(4).config
    try:
        setup.initialize(config)
        chunks = setup.build_model(config)
        found = messages_of_step(config, chunks, build_optimizer(config.optimizer, chunks))
    finally:
        forget_model_parallel()
    return [message for message in found if message.kind not in ("broadcast", "barrier")]


@pytest.mark.parametrize(("family", "model", "ddp"), LAYOUTS)
def test_messages_are_those_of_a_real_step(four_workers, family, model, ddp):
    real = four_workers.run(messages, family, model, ddp)
    leave()
    for rank in range(4):
        with one_rank(rank, 4):
            rehearsed = messages(family, model, ddp)
        assert Counter(rehearsed) == Counter(real[rank])
        assert rehearsed == real[rank]


def test_tokens_are_shared_out_evenly_over_experts():
    leave()
    with one_rank(1, 4):
        found = messages("qwen3_moe", {"expert_model_parallel_size": 2}, {})
    sizes = Counter(message.bytes for message in found if message.kind == "all-to-all")
    tokens, chosen, hidden, layers, microbatches = 256, 2, 128, 4, 2
    there_and_back, forward_and_backward = 2, 2
    # in bf16; their probabilities travel one way
    assert (
        sizes[tokens * chosen * hidden * 2]
        == layers * microbatches * there_and_back * forward_and_backward
    )
    assert sizes[tokens * chosen * 2] == layers * microbatches * forward_and_backward
