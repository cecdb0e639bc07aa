# SPDX-License-Identifier: Apache-2.0
"""What a model learns from rewards of its own completions."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from megatron.bridge.utils.config.ranges import (
    ABOVE_ZERO,
    AT_LEAST_ONE,
    AT_LEAST_ZERO,
    FRACTION,
    Range,
)

PolicyLossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]
SamplingLevel = Literal["token", "sequence"]
RewardScale = Literal["group", "batch", "none"]
AdvantageEstimator = Literal["group", "rloo", "gae"]
KLEstimator = Literal["k1", "k2", "k3"]
CorrectionMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]

CLIPPED_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""Losses that clip the ratio of probabilities to the interval of ``epsilon`` and ``epsilon_high``."""


JUDGE_QUESTION = """Rate how well the answer solves the task, from 0 (useless) to 10 (perfect).

Task:
{prompt}

Answer:
{completion}

Reply with the number alone."""


@dataclass(kw_only=True)
class JudgeConfig:
    """A language model behind an OpenAI-compatible server that scores completions.

    A reward is the last number of the judge's reply divided by ``highest_score``. A completion whose
    reply has no number between 0 and ``highest_score`` gets no reward of the judge.
    """

    base_url: str | None = None
    """Address of the server, such as ``http://localhost:8000/v1``."""
    model: str | None = None
    """Name of the model on the server."""
    question: str = JUDGE_QUESTION
    """What the judge is asked. ``{prompt}``, ``{completion}`` and the other keys of a record in
    braces are replaced."""
    highest_score: Annotated[float, ABOVE_ZERO] = 10.0
    """The score that is a reward of 1."""
    max_tokens: Annotated[int, AT_LEAST_ONE] = 512
    """Maximum number of tokens of a reply."""
    concurrency: Annotated[int, AT_LEAST_ONE] = 16
    """Questions that wait for a reply at the same time."""
    timeout_seconds: Annotated[float, ABOVE_ZERO] = 120.0
    """Seconds to wait for a reply."""
    retries: Annotated[int, AT_LEAST_ZERO] = 4
    """How often a request that failed is repeated, with growing pauses."""
    api_key_variable: str = "OPENAI_API_KEY"
    """Environment variable with the key of the server, if it needs one."""


@dataclass(kw_only=True)
class RolloutServerConfig:
    """A server of vLLM or SGLang that writes the completions.

    Before each generation the run writes its weights, with merged adapters, to ``weights_dir``, and
    the server reads them there.
    """

    base_url: str | None = None
    """Address of the server, such as ``http://localhost:8000``."""
    engine: Literal["vllm", "sglang"] = "vllm"
    """What the server is. vLLM must have been started with ``VLLM_SERVER_DEV_MODE=1``, so that it
    takes requests for new weights."""
    weights_dir: str | None = None
    """Folder that the run and the server see under this path, best in memory, such as
    ``/dev/shm/weights``."""
    model: str | None = None
    """Name of the model on the server; None takes its first one."""
    max_mismatch: Annotated[float, ABOVE_ZERO] = 0.2
    """Mean absolute difference between the log-probabilities of the server and of training at which
    the run stops, because the server has other weights."""
    concurrency: Annotated[int, AT_LEAST_ONE] = 64
    """Prompts that wait for their completions at the same time."""
    timeout_seconds: Annotated[float, ABOVE_ZERO] = 1800.0
    """Seconds to wait for a reply."""
    api_key_variable: str = "OPENAI_API_KEY"
    """Environment variable with the key of the server, if it needs one."""


@dataclass(kw_only=True)
class CriticConfig:
    """A second model that predicts the reward of a completion at each of its tokens (PPO).

    It is a sequence classifier with one output for each token, has the parallel sizes of the run,
    and is trained in every step. With its values ``V``, the rewards ``r`` of tokens, of which only
    the last token of a completion has the reward of the completion, and
    ``d_t = r_t + gamma V_{t+1} - V_t``, the advantage of a token is ``A_t = d_t + gamma lam A_{t+1}``
    (https://arxiv.org/abs/1506.02438), and the return that the critic learns is ``A_t + V_t``.
    Advantages are then scaled to mean 0 and variance 1 over the tokens of a generation.
    """

    model: str | None = None
    """Hugging Face directory or hub id, or a Megatron checkpoint: a language model, which gets a new
    head, or a reward model. None starts from ``checkpoint.pretrained_checkpoint``."""
    trust_remote_code: bool = False
    """Run the model's own Python code to read its config."""
    lr: Annotated[float | None, ABOVE_ZERO] = None
    """Highest learning rate of the critic, with the schedule of the run. None is ``optimizer.lr``."""
    gamma: Annotated[float, FRACTION] = 1.0
    """How much a reward counts one token earlier."""
    lam: Annotated[float, FRACTION] = 0.95
    """0 trusts the values of the critic, 1 the rewards alone."""
    cliprange_value: Annotated[float, ABOVE_ZERO] = 0.2
    """Predictions further than this from those before the step have no gradient where that lowers
    the loss."""
    kl_in_reward: bool = False
    """Subtract ``grpo.beta`` times the KL estimate from the reward of each token, instead of adding it
    to the loss."""


@dataclass(kw_only=True)
class GRPOConfig:
    """Group relative policy optimization: the model learns from rewards of its own completions.

    A step draws prompts, generates ``num_generations`` completions of each with the current
    weights, and scores them. The advantage ``A`` of a completion compares its reward with those of
    the other completions of its prompt. With the ratio ``r = p / p_old`` of the probabilities of a
    token under the trained model and under the model that generated it, the loss of a token is

    * ``grpo``, ``bnpo``, ``dr_grpo``, ``dapo``, ``luspo``:
      ``-min(min(r, delta) A, clip(r, 1 - epsilon, 1 + epsilon_high) A)``,
    * ``cispo``: ``-min(r, epsilon_high) A log p``, without a gradient of the ratio,
    * ``sapo``: ``-4 / t sigmoid(t (r - 1)) A``,
    * ``vespo``: ``-phi A log p``, where phi is a Gamma weight of the ratio of the whole completion,

    plus ``beta`` times an estimate of the KL divergence from a reference. Losses of tokens are
    averaged over each completion and then over completions (``grpo``, ``sapo``), over the tokens of
    a microbatch (``bnpo``), over the tokens of the step (``dapo``, ``cispo``, ``vespo``), or they
    are divided by ``max_completion_length`` (``dr_grpo``) or by nothing (``luspo``) for each
    completion. Names and defaults are those of TRL 1.16 wherever TRL has them.
    """

    num_generations: Annotated[int, Range(least=1, most=128)] = 8
    """Completions of each prompt; 1 needs a critic."""
    num_generations_eval: Annotated[int | None, Range(least=1, most=128)] = None
    """Completions of each held-out prompt in an evaluation. None is ``num_generations``."""
    max_completion_length: Annotated[int, AT_LEAST_ONE] = 512
    """Maximum number of tokens to generate."""
    temperature: Annotated[float, ABOVE_ZERO] = 1.0
    """Divides the logits, in generation and in the loss."""
    top_p: Annotated[float, Range(above=0, most=1)] = 1.0
    """Sample from the most likely tokens with this total probability."""
    top_k: Annotated[int, AT_LEAST_ZERO] = 0
    """Sample from the k most likely tokens; 0 from all."""
    min_p: Annotated[float | None, FRACTION] = None
    """Sample from tokens at least this likely, relative to the most likely one."""
    repetition_penalty: Annotated[float, ABOVE_ZERO] = 1.0
    """Above 1, tokens of the text so far become less likely."""

    reward_funcs: list[str] = field(default_factory=list[str])
    """Functions that score completions, each as ``package.module:function`` or
    ``path/to/file.py:function``; in Python, ``grpo`` also takes functions. A function is called as
    ``function(prompts=, completions=, completion_ids=, **columns)`` with lists, and returns a number
    or None for each completion. An entry without a colon is a reward model of transformers (a
    sequence classifier with one output): a Hugging Face directory or hub id."""
    judge: JudgeConfig | None = None
    """A language model that scores completions, too; it comes after ``reward_funcs``."""
    reward_weights: list[float] | None = None
    """Weight of each function in the reward, which is a sum: of ``reward_funcs``, of the judge if
    there is one, and of the functions of a script. None weights all with 1."""
    tools: list[str] = field(default_factory=list[str])
    """Functions that the model may call in its completions, each as ``package.module:function`` or
    ``path/to/file.py:function``. Type hints and a Google-style docstring describe the arguments.
    Prompts must be messages, and the chat template must render tools."""
    max_tool_calling_iterations: Annotated[int | None, AT_LEAST_ONE] = None
    """How often a completion may call tools and go on. None is as often as
    ``max_completion_length`` allows, which counts the results of tools, too."""
    advantage_estimator: AdvantageEstimator = "group"
    """What a reward is compared with: the mean of its ``group``, with ``rloo`` the mean of the
    others in the group, or with ``gae`` what a critic predicts at each token (PPO)."""
    critic: CriticConfig | None = None
    """The critic of ``advantage_estimator=gae``. None uses the defaults of ``CriticConfig``."""
    scale_rewards: RewardScale = "group"
    """Divide advantages by the standard deviation of the rewards of a ``group``, of all completions
    of a generation (``batch``), or by nothing (``none``). For ``advantage_estimator=group``."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal, which teach nothing, by those of further
    prompts (https://arxiv.org/abs/2503.14476)."""
    dynamic_sampling_rounds: Annotated[int, AT_LEAST_ONE] = 4
    """How often groups are replaced in a step; those that are left then are kept."""
    mask_truncated_completions: bool = False
    """Leave completions that reach ``max_completion_length`` out of the loss."""

    loss_type: PolicyLossType = "dapo"
    """The loss of a token, and how the losses of tokens are averaged; see above."""
    importance_sampling_level: SamplingLevel = "token"
    """Whether the ratio is that of a token, or with ``sequence`` the geometric mean over its
    completion (GSPO, https://arxiv.org/abs/2507.18071)."""
    epsilon: Annotated[float, AT_LEAST_ZERO] = 0.2
    """Lower end of the interval that the ratio is clipped to, below 1."""
    epsilon_high: Annotated[float | None, AT_LEAST_ZERO] = None
    """Upper end, above 1. None uses ``epsilon``. For ``cispo`` it is the largest ratio itself."""
    delta: Annotated[float | None, ABOVE_ZERO] = None
    """Largest ratio where the advantage is negative, which clipping leaves unbounded. It should be
    above ``1 + epsilon_high``."""
    sapo_temperature_neg: Annotated[float, ABOVE_ZERO] = 1.05
    """``t`` of ``sapo`` for advantages of at most 0."""
    sapo_temperature_pos: Annotated[float, ABOVE_ZERO] = 1.0
    """``t`` of ``sapo`` for advantages above 0."""
    vespo_k_pos: float = 2.0
    """Exponent of the Gamma weight of ``vespo`` for advantages of at least 0."""
    vespo_lambda_pos: float = 3.0
    """Decay of the Gamma weight of ``vespo`` for advantages of at least 0."""
    vespo_k_neg: float = 3.0
    """Exponent of the Gamma weight of ``vespo`` for advantages below 0."""
    vespo_lambda_neg: float = 2.0
    """Decay of the Gamma weight of ``vespo`` for advantages below 0."""
    num_iterations: Annotated[int, AT_LEAST_ONE] = 1
    """How often a generation is trained on."""
    steps_per_generation: Annotated[int, AT_LEAST_ONE] = 1
    """Optimizer steps that share a generation, each with ``train.global_batch_size`` completions."""

    beta: Annotated[float, AT_LEAST_ZERO] = 0.0
    """Weight of the KL divergence from the reference. With 0, there is no reference."""
    kl_estimator: KLEstimator = "k3"
    """With ``d = log r - log p``, where r is the reference: ``k1`` is -d, ``k2`` is d**2 / 2, and
    ``k3`` is exp(d) - d - 1."""
    use_bias_correction_kl: bool = True
    """Multiply the KL estimate by the ratio, so that its gradient is unbiased."""
    reference: str | None = None
    """Hugging Face directory or hub id, or a Megatron checkpoint. None uses the model as it was at
    the start: with adapters, the trained model without them, which takes no memory; else a second
    copy of the weights of ``checkpoint.pretrained_checkpoint``."""
    trust_remote_code: bool = False
    """Run the reference's own Python code to read its config."""

    importance_sampling_correction: bool = False
    """Weight losses by the ratio of the probabilities in training and in generation, for rollouts of
    an engine that computes other numbers, such as a ``server``. This package's engine has the weights
    of the run."""
    importance_sampling_mode: CorrectionMode = "sequence_mask"
    """Whether that ratio is of a token or of a completion, and whether ratios beyond the limits are
    set to the limit (``truncate``) or to 0 (``mask``)."""
    importance_sampling_clip_max: Annotated[float | None, ABOVE_ZERO] = 3.0
    """Upper limit of that ratio; None is none."""
    importance_sampling_clip_min: Annotated[float | None, AT_LEAST_ZERO] = None
    """Lower limit of that ratio; None is none."""

    exact_rollout: bool = False
    """Compute the training pass with the numbers of the engine, bit for bit. Log-probabilities at
    generation are then those of the engine, without a pass of their own, and the ratio of the first
    step is exactly 1. Each microbatch takes one more forward pass. For CPUs."""
    router_replay: bool = False
    """For models with experts: choose the experts of each token that the engine chose when it
    generated (https://arxiv.org/abs/2510.11370). The reference chooses its own."""

    server: RolloutServerConfig | None = None
    """A server that writes the completions. None generates in the processes of the run."""
    kv_memory: Annotated[int, ABOVE_ZERO] = 4 << 30
    """Bytes for the caches of generation on each rank. They exist only while it generates."""
    max_requests: Annotated[int, AT_LEAST_ONE] = 128
    """Completions that a data-parallel rank generates at the same time."""
    log_completions: Annotated[int, AT_LEAST_ZERO] = 4
    """Completions of each generation to write into ``logger.log_dir``."""

    @property
    def highest_ratio(self) -> float:
        """``epsilon_high``, or ``epsilon`` where that is unset."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def needs_old_log_probs(self) -> bool:
        """Whether a step trains on completions of earlier weights, or corrects for another engine."""
        is_reused = self.num_iterations * self.steps_per_generation > 1
        return is_reused or self.importance_sampling_correction or self.has_kl_in_reward

    @property
    def active_critic(self) -> CriticConfig | None:
        """The settings of the critic; None for estimators without one."""
        if self.advantage_estimator != "gae":
            return None
        return self.critic or CriticConfig()

    @property
    def has_kl_in_reward(self) -> bool:
        """Whether the KL divergence lowers rewards instead of being part of the loss."""
        critic = self.active_critic
        return critic is not None and critic.kl_in_reward and self.beta > 0

    @property
    def knows_sampler_log_probs(self) -> bool:
        """Whether the engine's log-probabilities, which know no temperature, are those of the loss."""
        return self.temperature == 1.0
