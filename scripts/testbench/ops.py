# SPDX-License-Identifier: Apache-2.0
"""The operators of the testbench: parts of a model, its ends, the optimizer, collectives and copies."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn

from megatron.bridge.autotune import activations
from megatron.bridge.autotune.layers import layers_of
from megatron.bridge.backends.cpu.device import has_cuda
from megatron.bridge.models.flops import operations_between
from megatron.bridge.training import setup
from megatron.bridge.training.optim.optimizer import build_optimizer
from scripts.testbench.bench import Bench, Target
from scripts.testbench.test_op import Call, TestOp, TestWithHiddenInputs, register


def _named(*endings: str) -> Callable[[str, Any], bool]:
    return lambda path, module: path.rpartition(".")[2] in endings and isinstance(module, nn.Module)


def _typed(name: str) -> Callable[[str, Any], bool]:
    return lambda path, module: name in type(module).__name__


def _has(mark: str, ending: str = "") -> Callable[[str, Any], bool]:
    return lambda path, module: path.endswith(ending) and hasattr(module, mark)


class _Block(TestWithHiddenInputs):
    """A part whose input the table counts with the layer, because a norm before it may be recomputed."""

    def activations(self, bench: Bench) -> float | None:
        return (super().activations(bench) or 0) + bench.sizes.stream_bytes


class _SelfAttention(_Block):
    def activations(self, bench: Bench) -> float | None:
        return (super().activations(bench) or 0) + _rotary(bench)


def _rotary(bench: Bench) -> int:
    """Cosines and sines, which all layers share, so that the table leaves them out."""
    model: Any = bench.sized.model
    width = (
        model.qk_pos_emb_head_dim
        if model.multi_latent_attention
        else model.kv_channels * model.rotary_percent
    )
    return (
        int(2 * bench.sizes.tokens * width * bench.sizes.bytes_per_element)
        if bench.sizes.has_rope
        else 0
    )


class _Column(_Block):
    """A linear layer whose output the next operator keeps."""

    def activations(self, bench: Bench) -> float | None:
        return bench.sizes.stream_bytes


class _Attention(TestWithHiddenInputs):
    """Attention alone."""

    def __init__(self, split: bool) -> None:
        super().__init__(_named("core_attention"))
        self.split = split

    def is_in(self, bench: Bench) -> bool:
        return (bench.run.context > 1) == self.split and super().is_in(bench)

    def activations(self, bench: Bench) -> float | None:
        """Queries, keys, values, the output, and the sums of exponentials."""
        if bench.config.model.multi_latent_attention or self.split:
            return None
        part: Any = self._attention(bench)
        heads, width = part.num_attention_heads_per_partition, part.hidden_size_per_attention_head
        numbers = 2 * (heads + part.num_query_groups_per_partition) * width
        return bench.sizes.tokens * (numbers * bench.sizes.bytes_per_element + 4 * heads)

    def _attention(self, bench: Bench) -> nn.Module:
        return bench.meta.get_submodule(self.part(bench.meta)[0].rpartition(".")[0])

    def calc_theoretical_flops(self, bench: Bench) -> dict[str, float | None]:
        forward = operations_between(self._attention(bench), bench.case.seqlen) * bench.run.tokens
        return {"forward": forward, "backward": 2.5 * forward}


class _Embedding(TestWithHiddenInputs):
    """Looks up rows, which is no product, and keeps the numbers of the tokens."""

    def activations(self, bench: Bench) -> float | None:
        return 8 * bench.sizes.tokens

    def worked(self, path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        yield from ()


class _Layer(TestWithHiddenInputs):
    def activations(self, bench: Bench) -> float | None:
        return activations.counts_of_layer(self.part(bench.meta)[1], bench.sizes).full + _rotary(
            bench
        )


class _Decoder(TestWithHiddenInputs):
    """All layers; the final norm keeps its input."""

    def activations(self, bench: Bench) -> float | None:
        layers = self.part(bench.meta)[1].layers
        kept = sum(activations.counts_of_layer(each, bench.sizes).full for each in layers)
        return kept + bench.sizes.stream_bytes + _rotary(bench)


class _Mtp(TestWithHiddenInputs):
    def is_in(self, bench: Bench) -> bool:
        return bool(bench.config.model.mtp_num_layers) and super().is_in(bench)

    def activations(self, bench: Bench) -> float | None:
        return None


class _End(TestWithHiddenInputs):
    """A method of the chunk before or behind the decoder."""

    def __init__(self, method: str, weight: str) -> None:
        super().__init__(lambda path, module: not path, method)
        self.weight = weight

    def is_in(self, bench: Bench) -> bool:
        return hasattr(bench.chunk, self.method)

    def weights(self, bench: Bench) -> int:
        return self._bytes(bench.chunk)

    def calc_theoretical_memory(self, bench: Bench) -> dict[str, float | None]:
        return {"weights": self._bytes(bench.meta), "activations": None}

    def worked(self, path: str, module: Any) -> Iterator[tuple[str, nn.Module]]:
        if self.weight == "output_layer":
            yield from ((f"mtp.{index}", layer) for index, layer in enumerate(_ahead(module)))
            yield from _heads(module)

    def _bytes(self, chunk: Any) -> int:
        part = getattr(chunk, self.weight)
        return sum(parameter.nbytes for parameter in part.parameters()) if part is not None else 0


class _Model(TestWithHiddenInputs):
    def worked(self, path: str, module: Any) -> Iterator[tuple[str, nn.Module]]:
        yield from ((f"layers.{index}", layer) for index, layer in enumerate(layers_of(module)))
        yield from _heads(module)

    def activations(self, bench: Bench) -> float | None:
        return None


def _ahead(chunk: Any) -> list[nn.Module]:
    """Layers of multi-token prediction."""
    return layers_of(chunk)[len(chunk.decoder.layers) :]


def _heads(chunk: Any) -> Iterator[tuple[str, nn.Module]]:
    """The output layer, or the embedding that it shares its weight with, as often as it runs."""
    tied = chunk.share_embeddings_and_output_weights
    head = chunk.embedding.word_embeddings if tied else chunk.output_layer
    yield from [("output_layer", head)] * (1 + len(_ahead(chunk)))


class _Dispatcher(TestWithHiddenInputs):
    """Tokens go to their experts, and come back as they are."""

    def target(self, bench: Bench) -> Target:
        return self.part(bench.chunk)[1], "preprocess"

    def prepare_input(self, bench: Bench) -> Call:
        layer, _ = self.target(bench)
        args, kwargs = bench.inputs((layer, "preprocess"))
        return Call(lambda: self._there_and_back(layer, *args, **kwargs))

    def _there_and_back(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
        sent = layer.dispatch(*layer.preprocess(*args, **kwargs))
        tokens, _, _ = layer.token_dispatcher.dispatch_postprocess(*sent)
        back = layer.combine(layer.token_dispatcher.combine_preprocess(tokens))
        return layer.postprocess(back, None)

    def weights(self, bench: Bench) -> int:
        return 0

    def calc_theoretical_memory(self, bench: Bench) -> dict[str, float | None]:
        return {"weights": 0, "activations": None}

    def worked(self, path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        yield from ()


class _OptimizerStep(TestOp):
    """A step of the optimizer over the gradients of one microbatch."""

    backward = False

    def prepare_input(self, bench: Bench) -> Call:
        model = setup.build_model(bench.config)
        optimizer = build_optimizer(
            bench.config.optimizer, model, bench.config.dist.use_gloo_process_groups
        )
        setup.connect(model, optimizer, bench.config.ddp, bench.config.dist.align_grad_reduce)
        chunk: Any = model[0]
        chunk(**bench.batch).sum().backward()
        chunk.finish_grad_sync()
        return Call(optimizer.step)


class Collective(TestOp):
    """A collective of one tensor of the residual stream over the group of a parallel dimension.

    Args:
        name: A method below.
    """

    backward = False

    def __init__(self, name: str) -> None:
        self.name = name

    def is_in(self, bench: Bench) -> bool:
        return dist.get_world_size() > 1

    def prepare_input(self, bench: Bench) -> Call:
        rows, group = bench.sizes.sp_tokens, _group(bench)
        rows -= rows % group.size()
        data = torch.ones(rows, bench.sizes.hidden_size, device=torch.cuda.current_device())
        return Call(getattr(self, self.name), (data.to(bench.dtype), group))

    @staticmethod
    def all_reduce(data: torch.Tensor, group: Any) -> None:
        dist.all_reduce(data, group=group)

    @staticmethod
    def all_gather(data: torch.Tensor, group: Any) -> None:
        dist.all_gather_into_tensor(
            data.new_empty(len(data) * group.size(), *data.shape[1:]), data, group=group
        )

    @staticmethod
    def reduce_scatter(data: torch.Tensor, group: Any) -> None:
        dist.reduce_scatter_tensor(data[: len(data) // group.size()].clone(), data, group=group)

    @staticmethod
    def all_to_all(data: torch.Tensor, group: Any) -> None:
        dist.all_to_all_single(torch.empty_like(data), data, group=group)

    @staticmethod
    def send_receive(data: torch.Tensor, group: Any) -> None:
        """To the next rank, from the one before."""
        rank, size = group.rank(), group.size()
        after, before = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
        sends = [
            dist.P2POp(dist.isend, data, after, group),
            dist.P2POp(dist.irecv, torch.empty_like(data), before, group),
        ]
        for work in dist.batch_isend_irecv(sends):
            work.wait()


def _group(bench: Bench) -> Any:
    """Of the first dimension of parallelism that has several ranks; all ranks if none has."""
    run = bench.run
    if run.tensor > 1:
        return parallel_state.get_tensor_model_parallel_group()
    if run.context > 1:
        return parallel_state.get_context_parallel_group()
    return parallel_state.get_expert_model_parallel_group() if run.expert > 1 else dist.group.WORLD


class _Copy(TestOp):
    """A copy of the residual stream between host and device; with ``beside``, while an all-reduce runs."""

    backward = False

    def __init__(self, to_device: bool, beside: bool = False) -> None:
        self.to_device, self.beside = to_device, beside

    def is_in(self, bench: Bench) -> bool:
        return not self.beside or dist.get_world_size() > 1

    def prepare_input(self, bench: Bench) -> Call:
        host = torch.zeros(bench.sizes.stream_bytes, dtype=torch.uint8, pin_memory=has_cuda())
        device = torch.zeros_like(host, device=torch.cuda.current_device())
        source, target = (host, device) if self.to_device else (device, host)
        return Call(
            self._run, (source, target, torch.ones_like(device, dtype=torch.float), _group(bench))
        )

    def _run(
        self, source: torch.Tensor, target: torch.Tensor, other: torch.Tensor, group: Any
    ) -> None:
        work = dist.all_reduce(other, group=group, async_op=True) if self.beside else None
        target.copy_(source, non_blocking=True)
        if work is not None:
            work.wait()


register("Embedding", _Embedding(_named("embedding")))
register("Preprocess", _End("_preprocess", "embedding"))
register(
    "LayerNorm",
    TestWithHiddenInputs(_named("input_layernorm", "pre_mlp_layernorm", "final_layernorm")),
)
register(
    "ColumnParallelLinear",
    _Column(_named("linear_qkv", "linear_q_down_proj", "linear_q_proj", "in_proj")),
)
register("RowParallelLinear", TestWithHiddenInputs(_named("linear_proj", "out_proj")))
register("DotProductAttention", _Attention(split=False))
register("AttentionWithCP", _Attention(split=True))
register("SelfAttention", _SelfAttention(_has("core_attention", "self_attention")))
register(
    "MLPDense", _Block(lambda path, module: path.endswith(".mlp") and hasattr(module, "linear_fc1"))
)
register("Router", _Block(_named("router")))
register("Dispatcher", _Dispatcher(_has("token_dispatcher")))
register("GroupedMLP", TestWithHiddenInputs(_named("experts")))
register("SharedExpertMLP", _Block(_named("shared_experts")))
register("MoELayer", _Block(_has("router", ".mlp")))
register("MambaMixer", TestWithHiddenInputs(_has("d_inner_local_tp")))
register("GatedDeltaNet", TestWithHiddenInputs(_has("num_v_heads_local_tp")))
register("TransformerLayer", _Layer(lambda path, module: path == "decoder.layers.0"))
register("Decoder", _Decoder(_named("decoder")))
register("Postprocess", _End("_postprocess", "output_layer"))
register("MTP", _Mtp(_named("mtp")))
register("GPTModel", _Model(lambda path, module: not path))
register("OptimizerStep", _OptimizerStep())
register("AllReduce", Collective("all_reduce"))
register("AllGather", Collective("all_gather"))
register("ReduceScatter", Collective("reduce_scatter"))
register("AllToAll", Collective("all_to_all"))
register("SendReceive", Collective("send_receive"))
register("HostToDevice", _Copy(to_device=True))
register("DeviceToHost", _Copy(to_device=False))
register("CopyBesideAllReduce", _Copy(to_device=True, beside=True))
