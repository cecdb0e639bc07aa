# SPDX-License-Identifier: Apache-2.0
"""Your own loss, and a callback that stops the run when the loss is low.

python tutorials/recipes/llama/03_custom_forward_step_and_callback.py

The loss is a focal loss: tokens that the model already predicts well count less. The run trains on mock data, so
there is nothing to prepare.
"""

from functools import partial

import torch

from megatron.bridge.recipes.llama import llama32_1b_pretrain_config
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.gpt_step import masked_loss, next_batch
from megatron.bridge.training.pretrain import pretrain

# ---- the loss -------------------------------------------------------------------------------------------------


def focal_loss(loss_mask, token_losses):
    """Return a sum, a count, and the metrics to report.

    Megatron adds up sums and counts over all microbatches and ranks and divides once. Each metric is a pair of a
    sum and a count, too, so that its mean is right on any number of processes.
    """
    known = torch.exp(-token_losses.detach())  # the probability of the correct token
    total, tokens, report = masked_loss(loss_mask, (1 - known) ** 2 * token_losses)
    _, _, plain = masked_loss(loss_mask, token_losses)
    return total, tokens, {"focal loss": report["lm loss"], "lm loss": plain["lm loss"]}


def forward_step(data_iterator, model):
    """The same as megatron.bridge.training.gpt_step.forward_step, with another loss.

    Megatron calls it for each microbatch on each pipeline stage. Only on the last stage is the output a loss per
    token, and only there is the returned function called.
    """
    batch = next_batch(data_iterator)
    output = model(
        batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]
    )
    return output, partial(focal_loss, batch["loss_mask"])


# ---- the callback ---------------------------------------------------------------------------------------------


class StopWhenLossIsLow(Callback):
    """Stops the run after several consecutive steps with a low loss."""

    def __init__(self, target, patience):
        self.target, self.patience, self.streak = target, patience, 0

    def on_train_step_end(self, context):
        """All ranks see the same loss, so they all stop at the same step."""
        low = context.loss_dict["lm loss"] < self.target
        self.streak = self.streak + 1 if low else 0
        if self.streak == self.patience:
            context.stop_reason = f"the loss was below {self.target} {self.patience} times"

    def on_train_end(self, context):
        print(f"ended after {context.progress.step} of {context.config.train.train_iters} steps")

    # Checkpoints contain this state, so a resumed run continues to count.
    def state_dict(self):
        return {"streak": self.streak}

    def load_state_dict(self, state):
        self.streak = state["streak"]


# ---- the run --------------------------------------------------------------------------------------------------

config = llama32_1b_pretrain_config(
    seq_length=64,
    train_iters=200,
    global_batch_size=8,
    micro_batch_size=8,
    lr=1e-2,
    eval_iters=0,
    precision="fp32",
)
config.model.num_layers = 2
config.model.hidden_size = 64
config.model.ffn_hidden_size = 128
config.model.num_attention_heads = 4
config.model.num_query_groups = 2
config.model.kv_channels = 16
config.model.vocab_size = 128
config.tokenizer.vocab_size = 128  # mock data needs no tokenizer, only a vocabulary size
config.logger.log_interval = 25

pretrain(config, forward_step, callbacks=[StopWhenLossIsLow(target=1.5, patience=3)])
