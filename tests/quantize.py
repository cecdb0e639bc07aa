# SPDX-License-Identifier: Apache-2.0
"""Quantised tensors made one number at a time, and what they stand for, as independent references."""

import json

import torch
from safetensors.torch import load_file, save_file

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def to_fp8(weight, block):
    """(float8 matrix, scales by block) of a matrix; ``block`` None is one scale."""
    height, width = block or weight.shape
    grid = [-(-size // length) for size, length in zip(weight.shape, (height, width), strict=True)]
    scale, packed = torch.empty(grid), torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for row in range(grid[0]):
        for column in range(grid[1]):
            here = (
                slice(row * height, (row + 1) * height),
                slice(column * width, (column + 1) * width),
            )
            scale[row, column] = weight[here].abs().max().float() / 448.0 + 1e-6
            packed[here] = (weight[here].float() / scale[row, column]).to(torch.float8_e4m3fn)
    return packed, scale if block else scale.reshape(())


def from_fp8(packed, scale, block):
    """The numbers of a float8 matrix, one by one."""
    height, width = block or packed.shape
    grid = (
        scale.float().reshape(-(-packed.shape[0] // height), -(-packed.shape[1] // width)).tolist()
    )
    # Python's floats are wide enough for the exact product, which is rounded once, to float32
    return torch.tensor(
        [
            [number * grid[row // height][column // width] for column, number in enumerate(line)]
            for row, line in enumerate(packed.float().tolist())
        ]
    )


def random_mxfp4(experts, rows, columns, generator=None):
    """Random (blocks, scales) of ``experts`` matrices [rows, columns]; rows divide by 32."""
    shape = (experts, columns, rows // 32)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(121, 125, shape, dtype=torch.uint8, generator=generator)


def from_mxfp4(blocks, scales):
    """The numbers of MXFP4 matrices [experts, rows, columns], one by one."""
    experts, columns, groups, _ = blocks.shape
    bytes_, exponents = blocks.tolist(), scales.tolist()

    def number(expert, row, column):
        byte = bytes_[expert][column][row // 32][row % 32 // 2]
        return E2M1[byte >> 4 if row % 2 else byte & 15] * 2.0 ** (
            exponents[expert][column][row // 32] - 127
        )

    return torch.tensor(
        [
            [
                [number(expert, row, column) for column in range(columns)]
                for row in range(32 * groups)
            ]
            for expert in range(experts)
        ]
    )


def rewrite(directory, change, quantization=None):
    """Change the tensors of a saved model in place, file by file, and declare how they are quantised.

    Args:
        directory: holds safetensors files, and their index if they are several.
        change: called with (name, tensor), gives the tensors to store for it by name.
        quantization: ``quantization_config``; None leaves ``config.json`` as it is.
    """
    where = {}
    for path in directory.glob("*.safetensors"):
        stored = {}
        for name, tensor in load_file(path).items():
            stored |= change(name, tensor)
        save_file(stored, path, metadata={"format": "pt"})
        where |= dict.fromkeys(stored, path.name)
    index = directory / "model.safetensors.index.json"
    if index.exists():
        index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    if quantization is not None:
        config = json.loads((directory / "config.json").read_text())
        config["quantization_config"] = quantization
        (directory / "config.json").write_text(json.dumps(config))


def fp8_config(block, **more):
    """A ``quantization_config`` as DeepSeek and Qwen publish it."""
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": block,
        **more,
    }


def store_in_fp8(
    directory,
    block=(16, 16),
    scale_dtype=torch.float32,
    skip=("embed", "norm", "lm_head", "mlp.gate.", "router"),
    **config,
):
    """Rewrite a saved model with all matrices in float8 but those with a part of ``skip`` in their name.

    Returns:
        All tensors that it stands for now, by name.
    """
    values = {}

    def change(name, tensor):
        values[name] = tensor
        if tensor.ndim != 2 or any(part in name for part in skip):
            return {name: tensor}
        packed, scale = to_fp8(tensor, block)
        scale = scale.to(scale_dtype)
        values[name] = from_fp8(packed, scale, block).to(tensor.dtype)
        return {name: packed, f"{name}_scale_inv": scale}

    rewrite(directory, change, fp8_config(block and list(block), **config))
    return values


def store_in_mxfp4(directory, names=("gate_up_proj", "down_proj")):
    """Rewrite a saved model with its stacked experts [experts, rows, columns] in MXFP4, random bits and all.

    Returns:
        All tensors that it stands for now, by name.
    """
    generator = torch.Generator().manual_seed(0)
    values = {}

    def change(name, tensor):
        values[name] = tensor
        if not name.endswith(names):
            return {name: tensor}
        blocks, scales = random_mxfp4(*tensor.shape, generator=generator)
        values[name] = from_mxfp4(blocks, scales).to(tensor.dtype)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}

    rewrite(directory, change, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return values
