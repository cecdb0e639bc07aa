# SPDX-License-Identifier: Apache-2.0
"""Steps that a recorded graph replays on several ranks equal usual steps, communication included."""

import pytest

from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.config import DistributedDataParallelConfig
from tests import recorded_graph
from tests.toy_run import run_toy

OVERLAP = {
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "use_distributed_optimizer": True,
}
STAGES = {"pipeline_model_parallel_size": 2}
CASES = {
    "data": {"ddp": OVERLAP},
    "tensor and sequence": {"model": {"tensor_model_parallel_size": 2, "sequence_parallel": True}},
    "context": {"model": {"context_parallel_size": 2}},
    "pipeline": {"model": STAGES | {"batch_p2p_sync": False}},
    "virtual pipeline": {
        "model": STAGES
        | {
            "virtual_pipeline_model_parallel_size": 2,
            "overlap_p2p_comm": True,
            "batch_p2p_comm": False,
        }
    },
}


class CaptureAfterOne(Callback):
    """Turns graphs on after the model was built, because a machine without a GPU refuses them."""

    def on_train_start(self, context):
        context.config.model.cuda_graph_impl = "full_iteration"
        context.config.model.cuda_graph_warmup_steps = 1


def settings(case):
    own = (
        {"ddp": DistributedDataParallelConfig(**CASES[case]["ddp"])} if "ddp" in CASES[case] else {}
    )
    return {"train": {"train_iters": 5}, "model": dict(CASES[case].get("model", {})), **own}


def both(case):
    usual = run_toy(settings(case))
    with pytest.MonkeyPatch.context() as patch:
        graphs = recorded_graph.install(patch)
        captured = run_toy(settings(case), callbacks=[CaptureAfterOne()])
        return usual.numbers, captured.numbers, [graph.replays for graph in graphs]


@pytest.mark.parametrize("case", CASES)
def test_replayed_steps_equal_usual_ones(two_workers, case):
    for usual, captured, replays in two_workers.run(both, case):
        assert replays == [4, 1]
        assert captured == usual
