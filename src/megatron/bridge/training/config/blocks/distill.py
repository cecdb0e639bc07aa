# SPDX-License-Identifier: Apache-2.0
"""What a student learns from its teacher."""

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class DistillConfig:
    """What a student learns from its teacher, in addition to the next token or instead of it.

    The loss of a token is ``ce_weight * CE + kl_weight * temperature**2 * KL(teacher || student) + hidden_weight *
    hidden``. Tokens are averaged as in any other run. The weights need not add up to 1.
    """

    teacher: str | None = None
    """Hugging Face directory or hub id, or a Megatron checkpoint."""
    trust_remote_code: bool = False
    """Run the teacher's own Python code to read its config."""
    ce_weight: float = 0.5
    """Weight of the cross entropy with the data, logged as ``lm loss``."""
    kl_weight: float = 0.5
    """Weight of the KL divergence from the teacher, logged as ``kl loss`` (in nats, without ``temperature**2``).
    """
    temperature: float = 1.0
    """Divides the logits of student and teacher. ``temperature**2`` keeps the scale of the gradients."""
    top_k: int | None = None
    """Learn the teacher's ``top_k`` most likely tokens one by one and all others as one. None uses all tokens."""
    hidden_weight: float = 0.0
    """Weight of ``hidden loss``: the mean squared difference of hidden states, over the width and over the pairs
    in ``hidden_layers``.
    """
    hidden_layers: dict[int, int] = field(default_factory=dict[int, int])
    """Layer of the student -> layer of the teacher to match. Outputs are compared before the final norm, and
    layers count from 1. If the widths differ, a linear map from student to teacher is trained with the student.
    """
    cache: str | None = None
    """Folder with the teacher's ``top_k`` logits of the training data, as ``--mode cache-teacher`` writes it. With
    a cache, no teacher runs.
    """
