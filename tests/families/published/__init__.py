# SPDX-License-Identifier: Apache-2.0
"""``config.json`` of published models, as they are on the hub: ``<owner>--<model>.json``.

That of ``ibm-research/moe-7b-1b-active-shared-experts`` is put together from two public texts that read it, one with
its sizes, one with its heads and multipliers. ``rope_theta``, ``max_position_embeddings``, ``rms_norm_eps``,
``initializer_range``, ``attention_dropout``, ``router_aux_loss_coef``, the ids of special tokens and the type of its
numbers are assumed to be those of Granite 3.0 with experts.
"""
