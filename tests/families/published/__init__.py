# SPDX-License-Identifier: Apache-2.0
"""``config.json`` of published models, as they are on the hub: ``<owner>--<model>.json``.

That of ``ibm-research/moe-7b-1b-active-shared-experts`` is put together. Others state its sizes, its multipliers and
the ids of its tokenizer; ``rope_theta``, ``max_position_embeddings``, ``rms_norm_eps``, ``initializer_range``,
``attention_dropout`` and ``router_aux_loss_coef`` are assumed to be those of Granite 3.0 with experts.
"""
