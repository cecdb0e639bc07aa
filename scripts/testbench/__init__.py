# SPDX-License-Identifier: Apache-2.0
"""The testbench: single operators of a real model, timed and measured beside what the predictor says of them.

A ``TestOp`` says which operator of a model it runs, prepares its input, and gives the theory; the ``Launcher`` runs
it for each case. ``register`` adds an operator of one's own.
"""

import megatron.bridge  # noqa: F401  # before megatron.core, which needs it on a CPU
from scripts.testbench.bench import Bench
from scripts.testbench.cases import Case
from scripts.testbench.launcher import Launcher
from scripts.testbench.test_op import OPS, Call, TestOp, TestWithHiddenInputs, register

__all__ = ["OPS", "Bench", "Call", "Case", "Launcher", "TestOp", "TestWithHiddenInputs", "register"]
