# SPDX-License-Identifier: Apache-2.0
"""QK clipping after each update (``model.qk_clip``)."""

from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.optim.qk_clip import clip_attention_scores
from megatron.bridge.training.state import Run


class QKClip(Callback):
    """Scales down query and key weights of heads with large scores, as a part of the update."""

    def on_train_step_end(self, context: Run) -> None:
        assert context.last_step is not None, "a step has ended"
        clip_attention_scores(context.model, is_updated=not context.last_step.skipped)
