# SPDX-License-Identifier: Apache-2.0
"""What a student learns from its teacher."""

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class DistillConfig:
    """What a student learns from its teacher, beside or instead of the next token.

    The loss of a token is ``ce_weight * CE + kl_weight * temperature**2 * KL(teacher || student) + hidden_weight *
    hidden``; tokens are averaged as in any other run. The weights need not add up to 1.

    Attributes:
        teacher: Hugging Face directory or hub id, or a Megatron checkpoint.
        trust_remote_code: Run the teacher's own code to read its config.
        ce_weight: Weight of the cross entropy of the data, ``lm loss``.
        kl_weight: Weight of the divergence from the teacher's next-token distribution, ``kl loss`` (logged in nats
            at the temperature, without the factor).
        temperature: Divides the logits of both. The factor ``temperature**2`` keeps the size of the gradients.
        top_k: Learn the teacher's likeliest tokens one by one and all others as one; None learns each.
        hidden_weight: Weight of the distance of hidden states, ``hidden loss``: the mean square of the difference
            over the width and over the pairs of ``hidden_layers``.
        hidden_layers: Layer of the student -> layer of the teacher whose output, before any final norm, it shall
            have. Layers count from 1. Where the widths differ, a linear map from the student's to the teacher's is
            trained with the student.
        cache: Folder with the teacher's ``top_k`` logits of the training data, as ``distill.precompute`` wrote it:
            no teacher runs then.
    """

    teacher: str | None = None
    trust_remote_code: bool = False
    ce_weight: float = 0.5
    kl_weight: float = 0.5
    temperature: float = 1.0
    top_k: int | None = None
    hidden_weight: float = 0.0
    hidden_layers: dict[int, int] = field(default_factory=dict[int, int])
    cache: str | None = None
