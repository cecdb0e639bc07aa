# SPDX-License-Identifier: Apache-2.0
"""Convert records to tokenized samples.

The modules in the order of the steps: ``sources`` reads records (``jsonl`` parses a line), ``formats`` turns a record
into a conversation, a pair of texts or a text (``media_parts`` finds images), ``chat_template`` renders
conversations, and ``encoding`` expands placeholders of images, tokenizes, masks and truncates. ``preparation`` runs
all steps once and stores the ``samples``.
"""
