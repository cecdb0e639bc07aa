# SPDX-License-Identifier: Apache-2.0
"""What training on rewards does before each step: generate, score, and fill the batches of the step."""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.data.finetuning.rows import EpochRows
from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.config.blocks.reinforcement import GRPOConfig
from megatron.bridge.training.generation import engine_config
from megatron.bridge.training.optim.optimizer import gathered_params
from megatron.bridge.training.reinforcement.batches import (
    BatchShape,
    StepRollouts,
    microbatches_of,
    written_tokens,
)
from megatron.bridge.training.reinforcement.critic import Critic, set_advantages
from megatron.bridge.training.reinforcement.replay import RolloutReplay
from megatron.bridge.training.reinforcement.rewards import (
    ScoredCompletion,
    call_rewards,
)
from megatron.bridge.training.reinforcement.rollouts import (
    Generation,
    PromptStream,
    Rollout,
    evaluate_prompts,
    generate_rollouts,
)
from megatron.bridge.training.reinforcement.samples import CompletionSamples
from megatron.bridge.training.reinforcement.scoring import score_completions
from megatron.bridge.training.reinforcement.server_engine import RolloutServer
from megatron.bridge.training.reinforcement.step import PolicyStep
from megatron.bridge.training.reinforcement.tools import Toolbox
from megatron.bridge.training.state import Run
from megatron.bridge.training.step.losses import LossReport
from megatron.bridge.training.step.refilled_batches import RefilledBatches
from megatron.bridge.utils import distributed
from megatron.bridge.utils.console import print_rank_0
from megatron.bridge.utils.distributed import broadcast_object
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.user_functions import NamedFunction

ROW_MULTIPLE = 8  # of the rows that the engine computes together


class Rollouts(Callback):
    """Generates completions before the steps that need new ones, and gives each step its batches.

    A checkpoint has the position in the prompts, and the completions that later steps train on.

    Args:
        settings: The settings of the run.
        rewards: The reward functions, which the first rank calls.
        toolbox: The functions that completions may call; the first rank calls them.
        forward_step: The forward step of the run.
    """

    def __init__(
        self,
        settings: GRPOConfig,
        rewards: list[NamedFunction],
        toolbox: Toolbox,
        forward_step: PolicyStep,
    ) -> None:
        self._settings = settings
        self._rewards = rewards
        self._toolbox = toolbox
        self._forward_step = forward_step
        self._server = None if settings.server is None else RolloutServer(settings.server)
        self._step_contexts = ExitStack()  # around the passes of a step
        self.reference: list[MegatronModule] | None = None
        """The chunks of a second model; None where there is none."""
        self.critic: Critic | None = None
        """The critic of ``grpo.advantage_estimator=gae``."""
        self._value_losses: dict[str, Tensor] = {}  # of the critic's last step
        self._prompts: PromptStream | None = None
        self._drawn = 0  # prompts that were drawn before the run was built
        self._generation: Generation | None = None
        self._steps = 0  # steps that have used the generation
        self._batches: list[RefilledBatches] = []
        self._samples: CompletionSamples | None = None
        self._saved: dict[str, Any] | None = None

    @property
    def _steps_of_generation(self) -> int:
        return self._settings.steps_per_generation * self._settings.num_iterations

    def state_dict(self) -> dict[str, Any]:
        """The position in the prompts; of the first rank also the completions that are still needed."""
        drawn = self._drawn if self._prompts is None else self._prompts.drawn
        state: dict[str, Any] = {"drawn": drawn, "steps": self._steps, "generation": None}
        if self._generation is not None and distributed.rank() == 0:
            state["generation"] = pack_generation(self._generation)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._saved = state  # applied in on_train_start, when all ranks have theirs
        self._drawn = state["drawn"]
        self._generation = None

    def on_train_start(self, context: Run) -> None:
        """Connect the prompts, and continue with the completions of a checkpoint."""
        assert context.data.train is not None, "a rule asks for prompts"
        dataset: EpochRows = context.data.train.dataset  # type: ignore[attr-defined]
        self._prompts = PromptStream(dataset, context.config.rng.seed, self._drawn)
        self._batches = [RefilledBatches() for _ in context.model]
        context.train_batches = list(self._batches)
        self._samples = on_first_rank(lambda: CompletionSamples.of(context))
        context.evaluation = self._evaluate
        settings = self._settings
        if settings.exact_rollout or settings.router_replay:
            self._forward_step.replay = RolloutReplay(
                context.model,
                engine_config(context, settings),
                is_exact=settings.exact_rollout,
                replays_experts=settings.router_replay,
            )
        if self.critic is not None:
            self.critic.join(context)
        self._restore(context)

    def _restore(self, run: Run) -> None:
        saved = self._saved or {"steps": 0, "generation": None}
        self._saved = None
        packed = broadcast_object(saved["generation"])
        self._steps = saved["steps"]
        self._generation = None if packed is None else unpack_generation(packed)
        if self._generation is None:
            return
        problem = self._problem_of(self._generation, run)
        if problem is not None:
            print_rank_0(f"note: {problem}: they are generated again")
            self._generation = None
            self._steps = 0

    def _problem_of(self, generation: Generation, run: Run) -> str | None:
        """Why the completions of a checkpoint are none that this run could train on, or None."""
        rollouts = generation.rollouts
        needed = run.config.train.global_batch_size * self._settings.steps_per_generation
        if len(rollouts) != needed:
            return f"the checkpoint has {len(rollouts)} completions, and a generation of this run {needed}"
        if self._settings.router_replay and any(rollout.experts is None for rollout in rollouts):
            return "the completions of the checkpoint have no experts, which grpo.router_replay=True needs"
        has_values = rollouts[0].values is not None
        if has_values != (self.critic is not None):
            return (
                f"the completions of the checkpoint have {'' if has_values else 'no '}values of a critic, "
                f"and grpo.advantage_estimator={self._settings.advantage_estimator}"
            )
        return None

    def on_train_step_start(self, context: Run) -> None:
        if self._generation is None:
            self._generation = self._generate(context)
            self._steps = 0
        step = self._steps_rollouts(context)[self._steps % self._settings.steps_per_generation]
        microbatches = microbatches_of(step, _shape_of(context, self._settings), self._settings)
        for batches in self._batches:
            batches.refill(microbatches)
        if self.critic is not None:
            self._value_losses = self.critic.train(microbatches, step.mean_tokens)
        self._forward_step.mismatch.clear()
        replay = self._forward_step.replay
        if replay is not None:
            if replay.is_exact:  # its first pass does not wait for weights that are being gathered
                self._step_contexts.enter_context(gathered_params(context.model))
            self._step_contexts.enter_context(replay)

    def on_grads_ready(self, context: Run) -> None:
        """Add the means of the generation to the losses of the step, which are then logged."""
        assert self._generation is not None, "the step has begun"
        self._step_contexts.close()
        if self._steps == 0:  # later steps have other weights than the engine had
            self._measure_mismatch(self._generation)
        for report in context.reports:
            for name, value in self._generation.metrics.items():
                report[name] = torch.tensor([value, 1.0], dtype=torch.float64).to(
                    torch.cuda.current_device()
                )
            for name, mean in self._value_losses.items():
                report[name] = torch.stack((mean.double(), torch.ones_like(mean.double())))

    def _measure_mismatch(self, generation: Generation) -> None:
        """Compare the log-probabilities of the first step of a generation with those of the engine."""
        values = self._forward_step.mismatch.reduce()
        if values is None:
            return
        mean, highest = values
        generation.metrics["sampler mismatch"] = mean
        generation.metrics["sampler mismatch max"] = highest
        server = self._settings.server
        if server is not None and mean > server.max_mismatch:
            raise UserError(
                f"grpo.server.base_url={server.base_url}: its log-probabilities differ from those of training by "
                f"{mean:.3g} on average, more than grpo.server.max_mismatch={server.max_mismatch:g}: it did not load "
                "all weights, or computes another model"
            )
        if self._settings.exact_rollout and highest > 0:
            raise UserError(
                "grpo.exact_rollout=True, but log-probabilities of training and of the engine differ by up to "
                f"{highest:.3g}: results of the engine depend on the batch for this model or device, "
                "set grpo.exact_rollout=False"
            )

    def on_train_step_end(self, context: Run) -> None:
        self._steps += 1
        if self._steps >= self._steps_of_generation:
            self._generation = None
            self._steps = 0

    def close(self, context: Run) -> None:
        self._step_contexts.close()
        if self._samples is not None:
            self._samples.close()

    def _evaluate(self, run: Run) -> LossReport:
        """Rewards of held-out prompts."""
        assert run.data.valid is not None, "an evaluation has validation data"
        dataset: EpochRows = run.data.valid.dataset  # type: ignore[attr-defined]
        prompts = PromptStream(dataset, run.config.rng.seed)
        names = [reward.name for reward in self._rewards]
        metrics = evaluate_prompts(
            run, self._settings, prompts, self._call_rewards, names, self._toolbox, self._server
        )
        device = torch.cuda.current_device()
        return {
            name: torch.tensor(value, dtype=torch.float64).to(device)
            for name, value in metrics.items()
        }

    def _call_rewards(self, completions: Sequence[ScoredCompletion]) -> Tensor:
        return on_first_rank(lambda: call_rewards(self._rewards, completions))

    def _generate(self, run: Run) -> Generation:
        assert self._prompts is not None, "on_train_start comes first"
        names = [reward.name for reward in self._rewards]
        generation = generate_rollouts(
            run,
            self._settings,
            self._prompts,
            self._call_rewards,
            names,
            self._toolbox,
            self._server,
        )
        random = np.random.default_rng((run.config.rng.seed, self._prompts.drawn))
        order = random.permutation(len(generation.rollouts)).tolist()
        generation.rollouts = [generation.rollouts[index] for index in order]
        self._generation = generation
        self._score(run)
        if self.critic is not None:
            self._estimate_advantages(run, self.critic)
        samples = self._samples
        if samples is not None:
            on_first_rank(lambda: samples.write(run.progress.step + 1, generation))
        return generation

    def _steps_rollouts(self, run: Run) -> list[StepRollouts]:
        """The completions of each step that shares the generation."""
        assert self._generation is not None, "there is a generation"
        rollouts = self._generation.rollouts
        size = run.config.train.global_batch_size
        steps = range(0, len(rollouts), size)
        mean = sum(rollout.trained_tokens for rollout in rollouts) / len(steps)
        return [StepRollouts(rollouts[start : start + size], mean) for start in steps]

    def _score(self, run: Run) -> None:
        """Compute what a loss compares the trained model with, before the weights change."""
        settings = self._settings
        has_reference = settings.beta > 0
        if not settings.needs_old_log_probs and not has_reference:
            return
        for step in self._steps_rollouts(run):
            batches = microbatches_of(step, _shape_of(run, settings), settings)
            tokens = step.starts[-1]
            if settings.needs_old_log_probs and settings.exact_rollout:
                for rollout in step.rollouts:
                    rollout.old_log_probs = rollout.sampler_log_probs
            elif settings.needs_old_log_probs:
                replay = self._forward_step.replay
                old = score_completions(run, batches, tokens, replay=replay)
                _store(step, "old_log_probs", old)
            if has_reference:
                scores = score_completions(
                    run,
                    batches,
                    tokens,
                    self.reference,
                    without_adapters=self.reference is None,
                    replay=self._reference_replay(run),
                )
                _store(step, "reference_log_probs", scores)

    def _estimate_advantages(self, run: Run, critic: Critic) -> None:
        """Compare the rewards of tokens with what the critic predicts."""
        assert self._generation is not None, "there is a generation"
        for step in self._steps_rollouts(run):
            batches = microbatches_of(step, _shape_of(run, self._settings), self._settings)
            values = critic.predict_values(batches, step.starts[-1])
            _store(step, "values", values)
        self._generation.metrics |= set_advantages(self._generation.rollouts, self._settings)

    def _reference_replay(self, run: Run) -> RolloutReplay | None:
        """The engine's numbers for the reference, too: equal weights then have a divergence of exactly 0."""
        if not self._settings.exact_rollout:
            return None
        chunks = run.model if self.reference is None else self.reference
        engine = engine_config(run, self._settings)
        return RolloutReplay(chunks, engine, is_exact=True, replays_experts=False)


def _store(step: StepRollouts, name: str, scores: Tensor) -> None:
    """Give each completion of a step its part of ``scores`` [tokens of all completions]."""
    starts = step.starts
    for rollout, start, end in zip(step.rollouts, starts[:-1], starts[1:], strict=True):
        setattr(rollout, name, scores[start:end].clone())


def _shape_of(run: Run, settings: GRPOConfig) -> BatchShape:
    dataset: Any = run.config.dataset
    multiple: int = dataset.sequence_multiple
    if settings.exact_rollout and run.config.model.sequence_parallel:
        multiple = math.lcm(multiple, ROW_MULTIPLE)
    return BatchShape(
        micro_batch_size=run.config.train.micro_batch_size,
        multiple=multiple,
        padding=run.tokenizer.eod,
        rank=parallel_state.get_data_parallel_rank(),
        ranks=parallel_state.get_data_parallel_world_size(),
    )


_OF_TOKENS = (
    *("sampler_log_probs", "old_log_probs", "reference_log_probs"),
    *("token_advantages", "values", "returns"),
)


def pack_generation(generation: Generation) -> dict[str, Any]:
    """A generation as a few flat tensors, for a checkpoint."""
    rollouts = generation.rollouts
    packed: dict[str, Any] = {
        "prompt_lengths": _integers(len(rollout.prompt_tokens) for rollout in rollouts),
        "lengths": _integers(len(rollout.tokens) for rollout in rollouts),
        "prompts": _integers(token for rollout in rollouts for token in rollout.prompt_tokens),
        "tokens": _integers(token for rollout in rollouts for token in rollout.tokens),
        # fp64 keeps Python's numbers
        "advantages": torch.tensor(
            [rollout.advantage for rollout in rollouts], dtype=torch.float64, device="cpu"
        ),
        "is_trained": _integers(rollout.is_trained for rollout in rollouts),
        "metrics": generation.metrics,
    }
    for name in _OF_TOKENS:
        parts = [getattr(rollout, name) for rollout in rollouts]
        packed[name] = None if parts[0] is None else torch.cat(parts)
    experts = [rollout.experts for rollout in rollouts if rollout.experts is not None]
    packed["experts"] = torch.cat(experts) if experts else None
    masks = [written_tokens(rollout) for rollout in rollouts]
    packed["is_written"] = torch.cat(masks)
    return packed


def unpack_generation(packed: dict[str, Any]) -> Generation:
    """The generation of ``pack_generation``."""
    lengths = packed["lengths"].tolist()
    prompts = packed["prompts"].split(packed["prompt_lengths"].tolist())
    tokens = packed["tokens"].split(lengths)
    rollouts = [
        Rollout(prompt.tolist(), part.tolist(), advantage, bool(is_trained), torch.empty(0))
        for prompt, part, advantage, is_trained in zip(
            prompts,
            tokens,
            packed["advantages"].tolist(),
            packed["is_trained"].tolist(),
            strict=True,
        )
    ]
    for name in _OF_TOKENS:
        numbers = packed.get(name)  # checkpoints before critics have no values
        if numbers is None:
            continue
        for rollout, part in zip(rollouts, numbers.split(lengths), strict=True):
            setattr(rollout, name, part.clone())
    masks = packed.get("is_written")  # checkpoints before tools have none
    if masks is not None and not masks.all():
        for rollout, part in zip(rollouts, masks.split(lengths), strict=True):
            rollout.is_written = part.clone()
    experts = packed.get("experts")
    if experts is not None:
        computed = [len(rollout.prompt_tokens) + len(rollout.tokens) - 1 for rollout in rollouts]
        for rollout, part in zip(rollouts, experts.split(computed), strict=True):
            rollout.experts = part.clone()
    return Generation(rollouts, packed["metrics"])


def _integers(values: Any) -> Tensor:
    return torch.tensor([int(value) for value in values], dtype=torch.int64, device="cpu")
