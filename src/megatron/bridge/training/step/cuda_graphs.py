# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false
"""CUDA graphs: of complete layers or their parts (``local``), or of forward and backward of all microbatches."""

from collections.abc import Callable
from typing import Any

from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.cuda_graphs import delete_cuda_graphs

FULL_ITERATION = "full_iteration"


def schedule_of(model: Any) -> Callable[..., Any]:
    """Megatron-Core's schedule for the layout of this process, captured after the warm-up if ``model`` asks for it.

    ``local`` needs nothing here: layers capture themselves at the end of the first call of any schedule.
    """
    schedule = get_forward_backward_func()
    if model.cuda_graph_impl != FULL_ITERATION:
        return schedule
    return FullCudaGraphWrapper(
        schedule, model.cuda_graph_warmup_steps, model.cuda_graph_use_single_mempool
    )


def release(run: Any) -> None:
    """Delete the graphs of this process, which Megatron-Core keeps in classes, so that another run can capture."""
    if run.config.model.cuda_graph_impl == "local":
        delete_cuda_graphs()
    elif isinstance(run.schedule, FullCudaGraphWrapper):
        run.schedule.reset_cuda_graph()
        StaticBufferLoader.static_buffers = {"training": [], "validation": []}
