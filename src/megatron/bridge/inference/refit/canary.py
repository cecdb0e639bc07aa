# SPDX-License-Identifier: Apache-2.0
"""Check that an engine has the new weights: its log-probabilities of fixed texts must equal the trainer's.

Some engines report success although they keep their old weights.
"""

from collections.abc import Sequence
from typing import Any

import torch

from megatron.bridge.checkpoint.model_io import unwrap
from megatron.bridge.inference.engine import Engine, EngineConfig
from megatron.bridge.inference.requests import Sampling
from megatron.bridge.models.chunk_info import evaluation_mode
from megatron.bridge.utils.errors import UserError

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}
"""Maximum difference of log-probabilities by compute dtype; two layouts round differently."""
SCORING = Sampling(max_new_tokens=0, prompt_logprobs=0)


class Canary:
    """Texts, as token ids, for which the log-probabilities of trainer and engine must agree within ``tolerance``."""

    def __init__(self, prompts: Sequence[Sequence[int]], tolerance: float | None = None) -> None:
        if not prompts or any(len(prompt) < 2 for prompt in prompts):
            raise UserError(
                "a canary needs texts of at least two tokens, of which the first is not scored"
            )
        self.prompts = [list(prompt) for prompt in prompts]
        self._tolerance = tolerance
        self._old: list[float] | None = None

    def trainer_logprobs(self, chunks: Sequence[Any]) -> list[float]:
        """Return log-probabilities of the model in training and restore its mode; all its ranks must call this."""
        config: Any = unwrap(chunks[0]).config
        longest = max(32, *map(len, self.prompts))
        limits = EngineConfig(
            longest, config.vocab_size, kv_memory=1 << 30, max_requests=len(self.prompts)
        )
        with evaluation_mode(chunks), Engine(chunks, limits) as engine:
            jobs = [engine.submit(prompt, SCORING)[0] for prompt in self.prompts]
            list(engine.run())
        self._dtype = config.params_dtype
        return [
            token_logprob.logprob
            for job in jobs
            for token_logprob in job.completion.prompt_logprobs
        ]

    def check(self, expected: Sequence[float], actual: Sequence[float]) -> float:
        """Compare the engine's log-probabilities with the trainer's and return the largest difference.

        ``expected`` is saved for the next comparison.

        Raises:
            UserError: the engine has other weights, or still has the previous ones.
        """
        limit = TOLERANCE[self._dtype] if self._tolerance is None else self._tolerance
        worst = _largest_difference(expected, actual)
        old = self._old
        self._old = list(expected)
        if not worst <= limit:
            raise UserError(
                f"the engine's log-probabilities of the canary differ from the trainer's by {worst:.2g}, more than "
                f"{limit:.2g}: it does not have the weights that were sent, so restart it"
            )
        if (
            old is not None
            and _largest_difference(old, expected) > 0
            and _mean_difference(old, actual) < _mean_difference(expected, actual)
        ):
            raise UserError(
                "the engine's log-probabilities of the canary are closer to the trainer's previous values than to the "
                "current ones: it kept its old weights, so restart it from an export"
            )
        return worst


def _largest_difference(expected: Sequence[float], actual: Sequence[float]) -> float:
    """Return the largest difference, or NaN if any number is NaN."""
    return float((torch.tensor(expected).double() - torch.tensor(actual).double()).abs().max())


def _mean_difference(expected: Sequence[float], actual: Sequence[float]) -> float:
    return float((torch.tensor(expected).double() - torch.tensor(actual).double()).abs().mean())
