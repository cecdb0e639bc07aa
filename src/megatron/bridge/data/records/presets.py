# SPDX-License-Identifier: Apache-2.0
"""Values of ``process_example_fn`` for formats whose keys are ambiguous, so that the user must name the format."""

from collections.abc import Mapping
from typing import Any

from megatron.bridge.utils.errors import UserError

ALPACA = ("instruction", "output", "input", "system", "history")


def alpaca_example(record: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an Alpaca record (``instruction``, ``output``; maybe ``input``, ``system``, ``history``) to messages."""
    if missing := [key for key in ALPACA[:2] if not isinstance(record.get(key), str)]:
        raise UserError(
            f"a record of Alpaca's format lacks the text {missing[0]} (keys: {', '.join(sorted(record))}): give "
            "dataset.process_example_fn a function for your own format"
        )
    question = "\n".join(text for key in ("instruction", "input") if (text := record.get(key)))
    messages = [{"role": "system", "content": record["system"]}] if record.get("system") else []
    for asked, answered in [*(record.get("history") or ()), (question, record["output"])]:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return {
        "messages": messages,
        **{key: value for key, value in record.items() if key not in ALPACA},
    }
