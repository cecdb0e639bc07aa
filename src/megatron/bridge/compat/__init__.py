# SPDX-License-Identifier: Apache-2.0
"""What exists only so that programs with loops of their own run; docs/rl.md says which program needs what.

The code is here. Other programs import it under the paths of NVIDIA's Megatron Bridge, which
``compat.foreign_paths`` maps to modules of this folder. Nothing in the other folders imports this one; modules
there name it only in tables of names that are looked up when another program asks for them.
"""
