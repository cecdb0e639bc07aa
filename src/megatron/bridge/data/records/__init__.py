# SPDX-License-Identifier: Apache-2.0
"""From records to tokenized samples.

In the order of the work: ``sources`` reads records (``jsonl`` parses a line), ``formats`` turns one into a
conversation, a pair of texts or a text, ``chat_template`` renders conversations, ``encoding`` tokenizes and masks,
``truncation`` shortens, and ``preparation`` does all of it once and keeps the ``samples``.
"""
