# SPDX-License-Identifier: Apache-2.0
"""The usual forward step, slow enough that a run of few steps can be interrupted."""

import time

from megatron.bridge.training.gpt_step import forward_step as usual

SECONDS = 0.15


def forward_step(data_iterator, model):
    time.sleep(SECONDS)
    return usual(data_iterator, model)
