# SPDX-License-Identifier: Apache-2.0
"""From records to tokenized samples.

In the order of the work: ``sources`` reads records (``jsonl`` parses a line), ``formats`` turns one into a
conversation, a pair of texts or a text (``media_parts`` finds images), ``chat_template`` renders conversations,
``encoding`` expands placeholders of images, tokenizes, masks and shortens, and ``preparation`` does all of it once and
keeps the ``samples``.
"""
