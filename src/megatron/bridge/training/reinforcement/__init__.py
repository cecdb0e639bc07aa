# SPDX-License-Identifier: Apache-2.0
"""Training on rewards of the model's own completions.

* ``rewards``: the functions that score completions; ``advantages``: from rewards to advantages.
* ``rollouts``: completions of prompts by the package's engine, on the weights that are trained.
* ``batches``: rows of a step; ``scoring``: log-probabilities of completions before a step.
* ``step``: the forward step; ``losses``: the losses of tokens.
* ``callback``: what happens before each step, and what a checkpoint keeps of it.
* ``samples``: completions for people, as JSON lines, as an HTML page, and in TensorBoard.
"""
