# SPDX-License-Identifier: Apache-2.0
"""What a model learns from a teacher, or from preferences."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from megatron.bridge.utils.config.ranges import ABOVE_ZERO, AT_LEAST_ONE, AT_LEAST_ZERO, Range


@dataclass(kw_only=True)
class DistillConfig:
    """What a student learns from its teacher, in addition to the next token or instead of it.

    The loss of a token is ``ce_weight * CE + kl_weight * temperature**2 * KL(teacher || student) + hidden_weight *
    hidden``; ``jsd_beta`` selects another divergence. Tokens are averaged as in any other run. The weights need not
    add up to 1.
    """

    teacher: str | None = None
    """Hugging Face directory or hub id, or a Megatron checkpoint."""
    trust_remote_code: bool = False
    """Run the teacher's own Python code to read its config."""
    ce_weight: Annotated[float, AT_LEAST_ZERO] = 0.5
    """Weight of the cross entropy with the data, logged as ``lm loss``."""
    kl_weight: Annotated[float, AT_LEAST_ZERO] = 0.5
    """Weight of the KL divergence from the teacher, logged as ``kl loss`` (in nats, without ``temperature**2``).
    """
    temperature: Annotated[float, ABOVE_ZERO] = 1.0
    """Divides the logits of student and teacher. ``temperature**2`` keeps the scale of the gradients."""
    top_k: int | None = None
    """Learn the teacher's ``top_k`` most likely tokens one by one and all others as one. None uses all tokens."""
    hidden_weight: Annotated[float, AT_LEAST_ZERO] = 0.0
    """Weight of ``hidden loss``: the mean squared difference of hidden states, over the width and over the pairs
    in ``hidden_layers``.
    """
    hidden_layers: dict[int, int] = field(default_factory=dict[int, int])
    """Layer of the student -> layer of the teacher to match. Outputs are compared before the final norm, and
    layers count from 1. If the widths differ, a linear map from student to teacher is trained with the student.
    """
    jsd_beta: Annotated[float, Range(least=0, most=1)] = 0.0
    """0 learns ``KL(teacher || student)``, 1 ``KL(student || teacher)``. In between it is the weight of the teacher in
    the mixture of the generalized Jensen-Shannon divergence (``beta`` of TRL's ``GKDConfig``).
    """
    on_policy_fraction: Annotated[float, Range(least=0, most=1)] = 0.0
    """Fraction of the steps in which the student learns on answers that it has written itself to the prompts of the
    data (``lmbda`` of TRL's ``GKDConfig``). The cross entropy of such a step is that of the student's own answers.
    """
    max_completion_length: Annotated[int, AT_LEAST_ONE] = 128
    """Tokens of such an answer, at most."""
    completion_temperature: Annotated[float, ABOVE_ZERO] = 1.0
    """Divides the logits when the student writes."""
    kv_memory: Annotated[int, ABOVE_ZERO] = 4 << 30
    """Bytes for the caches of generation on each rank. They exist only while the student writes."""
    max_requests: Annotated[int, AT_LEAST_ONE] = 128
    """Answers that a data-parallel rank writes at the same time."""
    cache: str | None = None
    """Folder with the teacher's ``top_k`` logits of the training data, as ``--mode cache-teacher`` writes it. With
    a cache, no teacher runs.
    """


PreferenceLossType = Literal["sigmoid", "ipo", "hinge", "kto", "cpo", "simpo", "orpo"]
REFERENCE_FREE = ("cpo", "simpo", "orpo")
"""Losses of pairs that need no reference."""


@dataclass(kw_only=True)
class DPOConfig:
    """Direct preference optimization: the model learns to prefer one of two answers, measured against a reference.

    With ``h = (log p(chosen) - log r(chosen)) - (log p(rejected) - log r(rejected))``, where p is the trained
    model and r the reference, the loss of a pair is

    * ``sigmoid``: ``-log sigmoid(beta h)`` (https://arxiv.org/abs/2305.18290),
    * ``ipo``: ``(h - 1 / (2 beta))**2``, with means over tokens in place of sums (https://arxiv.org/abs/2310.12036),
    * ``hinge``: ``max(0, 1 - beta h)`` (https://arxiv.org/abs/2305.10425).

    ``kto`` (https://arxiv.org/abs/2402.01306) needs no pairs: each answer is desirable or undesirable, and with
    ``h = log p - log r`` its loss is ``desirable_weight * (1 - sigmoid(beta (h - z0)))`` or
    ``undesirable_weight * (1 - sigmoid(beta (z0 - h)))``. ``z0``, an estimate of KL without gradient, is the mean
    of ``h`` over prompts with answers to other prompts, in one microbatch of all data-parallel ranks; at least 0.

    Three losses need no reference. With ``d = log p(chosen) - log p(rejected)``, the loss of a pair is

    * ``cpo``: ``-log sigmoid(beta d)`` (https://arxiv.org/abs/2401.08417),
    * ``simpo``: ``-log sigmoid(beta d - simpo_gamma)``, with means over tokens (https://arxiv.org/abs/2405.14734),
    * ``orpo``: ``-beta log sigmoid(d - log(1 - p(chosen)) + log(1 - p(rejected)))``, with geometric means over tokens
      as probabilities, plus the negative log-likelihood of the chosen answer with its prompt
      (https://arxiv.org/abs/2403.07691).

    Losses are averaged over pairs, or over answers; likelihoods of chosen texts over the tokens of a microbatch.
    """

    loss_type: PreferenceLossType = "sigmoid"
    """The loss of a pair, or ``kto``."""
    rpo_alpha: Annotated[float | None, AT_LEAST_ZERO] = None
    """Weight of the negative log-likelihood of chosen answers, which is added to the loss of pairs
    (https://arxiv.org/abs/2404.19733). None is 1 for ``cpo``, else 0."""
    simpo_gamma: Annotated[float, AT_LEAST_ZERO] = 0.5
    """Margin by which chosen answers should be more likely (``simpo`` only)."""
    beta: Annotated[float, ABOVE_ZERO] = 0.1
    """Strength of the pull toward the reference: the smaller, the further the model may move away."""
    label_smoothing: Annotated[float, Range(least=0, below=0.5)] = 0.0
    """Assumed probability that the two answers of a pair were swapped, below 0.5 (``sigmoid``, ``cpo`` and
    ``simpo`` only)."""
    desirable_weight: Annotated[float, ABOVE_ZERO] = 1.0
    """Weight of the losses of desirable answers (``kto`` only)."""
    undesirable_weight: Annotated[float, ABOVE_ZERO] = 1.0
    """Weight of the losses of undesirable answers (``kto`` only)."""
    reference: str | None = None
    """Hugging Face directory or hub id, or a Megatron checkpoint. None uses the model as it was at the start: with
    adapters, the trained model without them, which takes no memory; else a second copy of the weights of
    ``checkpoint.pretrained_checkpoint``."""
    trust_remote_code: bool = False
    """Run the reference's own Python code to read its config."""

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares the model with a reference."""
        return self.loss_type not in REFERENCE_FREE

    @property
    def likelihood_weight(self) -> float:
        """``rpo_alpha``, or its default."""
        default = 1.0 if self.loss_type == "cpo" else 0.0
        return default if self.rpo_alpha is None else self.rpo_alpha
