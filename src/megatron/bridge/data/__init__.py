# SPDX-License-Identifier: Apache-2.0
"""Datasets, tokenizers, and iterators over microbatches.

* ``tokenizer``: the tokenizer of a run.
* ``pretraining``: the tool that makes indexed datasets from text, and the GPT datasets that read them.
* ``records``: from a record (a conversation, a prompt with its completion, a text) to tokens and a loss mask.
* ``media``: images of records: placeholders before tokenizing, pixels when a batch is made.
* ``finetuning``: datasets of records; packing and padding samples into rows.
* ``prompts``: prompts without answers, for reinforcement learning.
* ``vlm_datasets``: datasets of conversations with images.
* ``energon``: WebDatasets.
* ``loaders``, ``samplers``, ``streams``: which rank draws which samples, in which order.
* ``preview``: what a run will train on, shown before its first step.
* ``config``: every dataset config, to import from. Each is defined next to its builder in a module called
  ``*_config``. These modules import no torch, so loading a recipe is quick.
* ``builders``, ``datasets``: public names of other modules.
"""
