# SPDX-License-Identifier: Apache-2.0
"""The CPU device layer: each adaptation, and each trap that would be wrong without an error."""

import importlib
import logging
import pickle
import queue
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import random as parallel_random

from megatron.bridge.backends.cpu import device, import_hook

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the layer is off where there is CUDA"
)


def test_package_imports_without_torch():
    script = "import megatron.bridge, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


CORE_FIRST = """
import torch
{first}
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
import megatron.core.dist_checkpointing
import megatron.bridge
from tests.toy_run import run_toy

experts = {{"num_moe_experts": 4, "moe_router_topk": 2, "moe_grouped_gemm": True, "hidden_dropout": 0.1}}
record = run_toy({{"train": {{"train_iters": 2}}, "model": experts}})
swiglu = megatron.core.fusions.fused_bias_swiglu.swiglu
print(record.losses, record.grad_norms, hasattr(swiglu, "_torchdynamo_orig_callable"))
"""


@pytest.mark.sampled
def test_order_of_imports_changes_nothing():
    """Frameworks import Megatron-Core before the bridge."""
    losses = [
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", CORE_FIRST.format(first=first)],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for first in ("", "import megatron.bridge")
    ]
    assert losses[0] == losses[1]
    assert losses[0].endswith("False\n")  # its functions are not compiled


def test_registered_once():
    before = list(sys.meta_path)
    import_hook.register()
    importlib.reload(import_hook).register()
    assert sys.meta_path == before


def test_installed_once():
    zeros, current = torch.zeros, torch.cuda.current_device
    device.install()
    assert device.installed()
    assert torch.zeros is zeros
    assert torch.cuda.current_device is current


def test_inert_with_cuda(monkeypatch):
    """Nothing is replaced where CUDA is available."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    names = [name for name in dir(torch.cuda) if not name.startswith("__")]
    before = {name: getattr(torch.cuda, name) for name in names}
    device.install()
    assert {name: getattr(torch.cuda, name) for name in names} == before


@pytest.mark.parametrize("where", ["cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 3)])
def test_factories_create_on_the_cpu(where):
    like = torch.ones(2)
    created = [
        torch.tensor([1.0], device=where),
        torch.zeros(2, device=where),
        torch.ones(2, device=where, pin_memory=True),
        torch.empty(2, device=where),
        torch.full((2,), 3, device=where),
        torch.arange(3, device=where),
        torch.randint(0, 3, (2,), device=where),
        torch.zeros_like(like, device=where),
        torch.empty_like(like, device=where),
        torch.zeros(2, device=torch.cuda.current_device()),
    ]
    assert all(tensor.device.type == "cpu" for tensor in created)


def test_other_devices_are_left_alone():
    """``with torch.device("meta")``, which transformers loads models under, must not lose its effect."""
    with torch.device("meta"):
        assert torch.zeros(2).device.type == "meta"
        assert torch.tensor([1.0]).device.type == "meta"
        assert torch.nn.Linear(2, 2).weight.device.type == "meta"
    assert torch.empty(2, device="meta").device.type == "meta"


def test_type_names_match_either_spelling():
    assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(1).type() == "torch.FloatTensor"
    assert torch.zeros(1, dtype=torch.bfloat16).type() in [
        "torch.cuda.HalfTensor",
        "torch.cuda.BFloat16Tensor",
    ]
    assert torch.zeros(1).type() != "torch.cuda.HalfTensor"
    assert {torch.zeros(1).type(): 1}["torch.FloatTensor"] == 1
    assert torch.zeros(1).type(torch.float64).dtype is torch.float64


def test_moves_and_streams_do_nothing():
    x, layer = torch.ones(2), torch.nn.Linear(2, 2)
    assert x.cuda(non_blocking=True) is x
    assert x.pin_memory() is x
    assert layer.cuda() is layer
    stream = torch.cuda.Stream(priority=-1)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream):
        start.record()
        stream.wait_stream(torch.cuda.current_stream())
        stream.wait_event(stream.record_event())
        x.record_stream(stream)
        end.record(stream)
    torch.cuda.synchronize()
    assert end.query()
    assert start.elapsed_time(end) >= 0.0
    assert not torch.cuda.is_current_stream_capturing()


def test_functions_are_not_compiled():
    """Compiled at import, they would cost half a minute in the first step."""
    from megatron.core import jit
    from megatron.core.fusions.fused_bias_swiglu import swiglu

    def function(x):
        return x

    assert jit.jit_fuser(function) is function
    assert not hasattr(swiglu, "_torchdynamo_orig_callable")
    assert torch.compile.__module__ == "torch"  # its own again once the import is done


def test_torch_compile_still_loads():
    """Dynamo refuses to load if one object has two names in torch."""
    compiled = torch.compile(lambda x: torch.zeros(2) + x.sin(), backend="eager")
    torch.testing.assert_close(compiled(torch.ones(2)), torch.ones(2).sin())


def test_synchronous_saves_start_no_process():
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    assert type(filesystem_async.get_write_results_queue()) is queue.Queue


# ------------------------------------------------------------------------------------------------- random numbers


def test_random_states_are_restored():
    """Without the layer this is only queued for the day when CUDA is initialised."""
    state = parallel_random._get_cuda_rng_state()
    first = torch.rand(3)
    parallel_random._set_cuda_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    torch.cuda.manual_seed(4)
    second = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    torch.cuda.manual_seed(4)
    assert torch.equal(torch.rand(3), second)


def new_tracker():
    tracker = parallel_random.CudaRNGStatesTracker()
    tracker.add("one", 1)
    tracker.add("two", 2)
    return tracker


def drawn(seed, count):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, generator=generator)


def test_tracker_continues_each_state(caplog):
    torch.manual_seed(9)
    tracker = new_tracker()
    got = {"one": [], "two": [], "default": []}
    with caplog.at_level(logging.WARNING):
        for name in ("one", "two", "one", "one", "two"):
            with tracker.fork(name):
                got[name].append(torch.rand(1))
            got["default"].append(torch.rand(1))
    assert not caplog.records
    assert torch.equal(torch.cat(got["one"]), drawn(1, 3))
    assert torch.equal(torch.cat(got["two"]), drawn(2, 2))
    assert torch.equal(torch.cat(got["default"]), drawn(9, 5))


@pytest.mark.usefixtures("one_rank")
def test_tracker_is_seeded_as_torch_if_nobody_has_seeded_it():
    """Megatron-LM's ``_set_random_seed`` seeds the tracker only where it sees a CUDA device."""
    torch.manual_seed(9)
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tensor_parallel.model_parallel_cuda_manual_seed(9)
    with tracker.fork():
        expected = torch.rand(2)
    torch.manual_seed(9)
    tracker.reset()
    with tracker.fork():
        assert torch.equal(torch.rand(2), expected)
    assert torch.equal(torch.rand(1), drawn(9, 1))


@pytest.mark.usefixtures("one_rank")
def test_tracker_without_any_seed_is_refused():
    """The seed of such a process is random, so parameters that ranks replicate would differ."""
    seed = torch.initial_seed()
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.reset()
    torch.seed()
    try:
        with (
            pytest.raises(KeyError, match=r"model-parallel-rng.*torch\.manual_seed"),
            tracker.fork(),
        ):
            pass
    finally:
        torch.manual_seed(seed % 2**32)


def test_torch_script_and_pickle_know_the_factories():
    def script(x: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(3, device=x.device) + torch.zeros_like(x)
        return x + zeros + torch.arange(3) + torch.full((3,), 2.0) + torch.tensor([1.0, 2.0, 3.0])

    x = torch.ones(3)
    assert torch.equal(torch.jit.script(script)(x), script(x))
    assert pickle.loads(pickle.dumps(torch.zeros)) is torch.zeros


def test_tracker_forks_nest():
    torch.manual_seed(9)
    tracker = new_tracker()
    with tracker.fork("one"):
        first = torch.rand(1)
        with tracker.fork("two"):
            inner = torch.rand(1)
            with tracker.fork("one"):
                second = torch.rand(1)
            inner = torch.cat([inner, torch.rand(1)])
        third = torch.rand(1)
    assert torch.equal(torch.cat([first, second, third]), drawn(1, 3))
    assert torch.equal(inner, drawn(2, 2))
    assert torch.equal(torch.rand(1), drawn(9, 1))


def test_tracker_restores_after_an_error():
    torch.manual_seed(9)
    tracker = new_tracker()
    with pytest.raises(ZeroDivisionError), tracker.fork("one"):
        torch.rand(1 // 0)
    assert torch.equal(torch.rand(1), drawn(9, 1))
    with pytest.raises(KeyError, match=r"three.*torch\.manual_seed"), tracker.fork("three"):
        pass


def test_tracker_states_survive_a_checkpoint():
    tracker = new_tracker()
    with tracker.fork("one"):
        torch.rand(2)
    states = tracker.get_states()
    with tracker.fork("one"):
        first = torch.rand(2)
    tracker.set_states(states)
    with tracker.fork("one"):
        assert torch.equal(torch.rand(2), first)


@pytest.mark.parametrize("forked", [False, True])
def test_recomputation_draws_the_same_dropout(forked):
    """Value and gradient of x * mask must tell of one mask, inside the tracker and outside."""
    tracker = parallel_random.get_cuda_rng_tracker()
    tracker.reset()
    tracker.add("model-parallel-rng", 5)

    def layer(x):
        if not forked:
            return F.dropout(x, 0.5)
        with tracker.fork():
            return F.dropout(x, 0.5)

    x = torch.ones(1000, requires_grad=True)
    out = tensor_parallel.checkpoint(layer, False, x)
    between = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(x.grad, out)
    assert torch.equal(torch.get_rng_state(), between)
    assert 0 < (out == 0).sum() < 1000
