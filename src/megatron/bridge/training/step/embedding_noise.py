# SPDX-License-Identifier: Apache-2.0
"""NEFTune: uniform noise on the embeddings of training samples (https://arxiv.org/abs/2310.05914).

The noise depends on the seed, the position of a sample in the run and the position of a token in the sample, and on
nothing else. So it is the same in every layout and after a resume, and takes no random numbers from dropout.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron.bridge.checkpoint.model_io import unwrap
from megatron.bridge.data.finetuning.packing import cut_for_rank
from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.state import Run
from megatron.bridge.training.step.trained_tokens import bounds_on_host

SEED_OF_A_SAMPLE = (
    1_000_003  # a prime, so that samples of runs with neighboring seeds share no noise
)


class EmbeddingNoise(Callback):
    """Adds noise from ``[-1, 1] * alpha / sqrt(tokens * hidden size)`` to the embeddings of the first stage.

    ``tokens`` are those of the sample of a token, without padding.
    """

    def __init__(self, alpha: float) -> None:
        self._alpha = alpha
        self._run: Run | None = None
        self._batch: dict[str, Any] = {}  # the microbatch of the forward pass
        self._microbatch = 0  # its number in the step
        self._is_pending = False  # the embedding of the microbatch has not run yet

    def on_train_start(self, context: Run) -> None:
        """Watch the microbatches of the first chunk and its embedding."""
        first_chunk: Any = unwrap(context.model[0])
        if not first_chunk.pre_process:
            return
        self._run = context
        context.forward_step = self._with_batches(context.forward_step, first_chunk)
        first_chunk.embedding.register_forward_hook(self._add_noise)

    def on_train_step_start(self, context: Run) -> None:
        self._microbatch = 0

    def _with_batches(self, step: Callable[..., Any], first_chunk: Any) -> Callable[..., Any]:
        def forward_step(data_iterator: Any, model: Any, *rest: Any, **options: Any) -> Any:
            if model.training and unwrap(model) is first_chunk:
                data_iterator = self._watch(data_iterator)
            return step(data_iterator, model, *rest, **options)

        return forward_step

    def _watch(self, batches: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for batch in batches:
            self._batch = batch
            self._is_pending = True
            yield batch

    def _add_noise(self, embedding: Any, _inputs: Any, output: Tensor) -> Tensor:
        # layers of multi-token prediction embed their tokens with the same module
        if not embedding.training or not self._is_pending:
            return output
        self._is_pending = False
        noise = self._noise(output.shape[-1], output.device)
        self._microbatch += 1
        return output + noise.to(output.dtype)

    def _noise(self, width: int, device: torch.device) -> Tensor:
        """Return the noise [sequence of this rank, rows, hidden size] of the microbatch."""
        lengths = sample_lengths(self._batch)
        rows = torch.stack(
            [
                self._noise_of_row(row, lengths.shape[1], width, device)
                for row in range(len(lengths))
            ]
        )
        noise = rows * (self._alpha / (lengths.to(device) * width).sqrt()).unsqueeze(-1)
        return cut_for_layout(noise, self._batch, self._run)

    def _noise_of_row(self, row: int, length: int, width: int, device: torch.device) -> Tensor:
        assert self._run is not None, "training has started"
        train = self._run.config.train
        data_rank = parallel_state.get_data_parallel_rank()
        data_ranks = parallel_state.get_data_parallel_world_size()
        block = self._microbatch * data_ranks + data_rank
        sample = self._run.progress.consumed_train_samples + block * train.micro_batch_size + row
        generator = torch.Generator(device)
        generator.manual_seed((self._run.config.rng.seed * SEED_OF_A_SAMPLE + sample) % 2**63)
        values = torch.empty(length, width, device=device)
        return values.uniform_(-1.0, 1.0, generator=generator)


def sample_lengths(batch: dict[str, Any]) -> Tensor:
    """Return for each position [rows, sequence] the tokens of its sample without padding, and 1 where it is padding."""
    tokens = batch["tokens"]
    counted = torch.ones_like(tokens, dtype=torch.float32)
    if "padding_mask" in batch:
        counted = (~batch["padding_mask"]).float()
    lengths = torch.empty_like(counted)
    bounds = bounds_on_host(batch)
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        lengths[:, start:stop] = counted[:, start:stop].sum(1, keepdim=True)
    return lengths.clamp(min=1.0)


def cut_for_layout(noise: Tensor, batch: dict[str, Any], run: Run | None) -> Tensor:
    """Return the part [sequence, rows, hidden size] of this context-parallel and sequence-parallel rank.

    Args:
        noise: Of complete rows, [rows, sequence, hidden size].
        batch: The microbatch on the host.
        run: Its config says whether sequences are split.
    """
    assert run is not None, "training has started"
    context: Any = parallel_state.get_context_parallel_group()
    if context.size() > 1:
        places = cut_for_rank(bounds_on_host(batch), context.rank(), context.size())
        noise = noise[:, torch.from_numpy(places).to(noise.device)]
    noise = noise.transpose(0, 1)
    if run.config.model.sequence_parallel:
        rank = parallel_state.get_tensor_model_parallel_rank()
        noise = noise.chunk(parallel_state.get_tensor_model_parallel_world_size())[rank]
    return noise
