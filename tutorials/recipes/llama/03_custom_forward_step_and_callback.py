# SPDX-License-Identifier: Apache-2.0
"""A loss of your own, and a callback that ends the run when it has learnt enough.

python tutorials/recipes/llama/03_custom_forward_step_and_callback.py

Tokens that the model already knows count less than those that it does not (a focal loss). The data is made up, so
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
    """Megatron sums over all microbatches and ranks, and divides once: return a sum, a count, and what to report.

    Each entry of the report is a pair of a sum and a count, too, so that the mean that is printed is right on any
    number of GPUs.
    """
    known = torch.exp(-token_losses.detach())  # the probability that the model gave to the right token
    total, tokens, report = masked_loss(loss_mask, (1 - known) ** 2 * token_losses)
    _, _, plain = masked_loss(loss_mask, token_losses)
    return total, tokens, {"focal loss": report["lm loss"], "lm loss": plain["lm loss"]}


def forward_step(data_iterator, model):
    """What megatron.bridge.training.gpt_step.forward_step does, with another loss.

    It is called for each microbatch on each stage of the pipeline. Only on the last one is the output a loss for
    each token, and only there is the second result called.
    """
    batch = next_batch(data_iterator)
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return output, partial(focal_loss, batch["loss_mask"])


# ---- the callback ---------------------------------------------------------------------------------------------


class StopWhenLearnt(Callback):
    """Ends the run after some steps in a row with a low loss."""

    def __init__(self, target, patience):
        self.target, self.patience, self.streak = target, patience, 0

    def on_train_step_end(self, context):
        """All ranks see the same losses, so all decide the same: nobody waits for one who has left."""
        low = context.loss_dict["lm loss"] < self.target
        self.streak = self.streak + 1 if low else 0
        if self.streak == self.patience:
            context.stop_reason = f"the loss was below {self.target} {self.patience} times"

    def on_train_end(self, context):
        print(f"ended after {context.progress.step} of {context.config.train.train_iters} steps")

    # What these two exchange is saved with every checkpoint: a run that is killed and started again still knows
    # it.
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
config.tokenizer.vocab_size = (
    128  # without data_paths a recipe makes numbers up, and needs no tokenizer but a size
)
config.logger.log_interval = 25

pretrain(config, forward_step, callbacks=[StopWhenLearnt(target=1.5, patience=3)])
