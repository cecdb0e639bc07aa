# SPDX-License-Identifier: Apache-2.0
"""Every format of quantized weights: its numbers, one at a time, as the format's description gives them."""

import json

import pytest
import torch
from safetensors.torch import save_file

from megatron.bridge.models.hf_pretrained.quantization_configs import without_quantization
from megatron.bridge.models.hf_pretrained.quantized_checkpoint import open_checkpoint
from megatron.bridge.utils.errors import UserError
from tests.quantize import E2M1

ROWS = 24
COLUMNS = 64
AWQ_POSITIONS = [0, 4, 1, 5, 2, 6, 3, 7]
PARTS = [
    (slice(None), slice(None)),
    (slice(5, 17), slice(None)),
    (slice(None), slice(16, 48)),
    (slice(1, 22, 3), slice(3, 61, 2)),
    (slice(4, 4), slice(None)),
]


def random_codes(*shape, bits, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << bits, shape, generator=generator)


def random_scales(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    return (torch.rand(shape, generator=generator) * 0.1 + 0.01).to(dtype)


def int32_words(codes, bits):
    """Words of 32 bits; the first of the codes along the last dimension is in the lowest bits."""
    in_word = 32 // bits
    rows = []
    for line in codes.tolist():
        words = []
        for start in range(0, len(line), in_word):
            word = sum(code << (bits * i) for i, code in enumerate(line[start : start + in_word]))
            words.append(word - (1 << 32) if word >= 1 << 31 else word)
        rows.append(words)
    return torch.tensor(rows, dtype=torch.int32)


def bytes_of_halves(codes, high_first=False):
    low, high = codes[..., ::2], codes[..., 1::2]
    if high_first:
        low, high = high, low
    return (low | high << 4).to(torch.uint8)


def matrix(number):
    return torch.tensor([[number(row, col) for col in range(COLUMNS)] for row in range(ROWS)])


def ct_group(targets=("Linear",), **weights):
    return {"targets": list(targets), "weights": weights}


def ct_config(format_name, *groups, **more):
    named = {f"group_{i}": group for i, group in enumerate(groups)}
    return {
        "quant_method": "compressed-tensors",
        "format": format_name,
        "config_groups": named,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        **more,
    }


def int8_by_row():
    codes = random_codes(ROWS, COLUMNS, bits=8).to(torch.uint8).view(torch.int8)
    scales = random_scales(ROWS, 1, dtype=torch.bfloat16)
    values = matrix(lambda r, c: codes[r, c].item() * scales[r, 0].item())
    group = ct_group(num_bits=8, type="int", strategy="channel", symmetric=True, dynamic=False)
    return ct_config("int-quantized", group), {"m.weight": codes, "m.weight_scale": scales}, values


def int8_with_zeros():
    config, tensors, _ = int8_by_row()
    zeros = random_codes(ROWS, 1, bits=8, seed=3).to(torch.uint8).view(torch.int8)
    codes, scales = tensors["m.weight"], tensors["m.weight_scale"]
    values = matrix(lambda r, c: (codes[r, c].item() - zeros[r, 0].item()) * scales[r, 0].item())
    return config, {**tensors, "m.weight_zero_point": zeros}, values


def int4_in_words(bits=4, groups=4, with_zeros=False, with_index=False):
    codes = random_codes(ROWS, COLUMNS, bits=bits)
    scales = random_scales(ROWS, groups, dtype=torch.bfloat16)
    tensors = {
        "m.weight_packed": int32_words(codes, bits),
        "m.weight_scale": scales,
        "m.weight_shape": torch.tensor([ROWS, COLUMNS]),
    }
    zeros = torch.full((ROWS, groups), 1 << (bits - 1))
    if with_zeros:
        zeros = random_codes(ROWS, groups, bits=bits, seed=3)
        tensors["m.weight_zero_point"] = int32_words(zeros.t(), bits).t().contiguous()
    group_of = [col * groups // COLUMNS for col in range(COLUMNS)]
    if with_index:
        shuffled = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(1)).tolist()
        group_of = [group_of[col] for col in shuffled]
        tensors["m.weight_g_idx"] = torch.tensor(group_of, dtype=torch.int32)

    def number(row, col):
        group = group_of[col]
        return (codes[row, col] - zeros[row, group]).item() * scales[row, group].item()

    group = ct_group(num_bits=bits, type="int", strategy="group", group_size=COLUMNS // groups)
    return ct_config("pack-quantized", group), tensors, matrix(number)


def fp8_by_tensor(scale_name="m.weight_scale", method="compressed-tensors"):
    codes = random_codes(ROWS, COLUMNS, bits=8)
    codes[codes % 128 == 127] = 0  # NaN
    weight = codes.to(torch.uint8).view(torch.float8_e4m3fn)
    scales = random_scales(1)
    values = matrix(lambda r, c: weight[r, c].float().item() * scales[0].item())
    group = ct_group(num_bits=8, type="float", strategy="tensor")
    config = ct_config("float-quantized", group)
    tensors = {"m.weight": weight, scale_name: scales, "m.input_scale": torch.ones(1)}
    if method == "modelopt":
        config = {"quant_method": method, "quant_algo": "FP8", "ignore": ["lm_head"]}
        tensors |= {scale_name: scales.reshape(()), "attn.k_proj.k_scale": torch.ones(())}
    return config, tensors, values


def fp8_by_block():
    _, tensors, _ = fp8_by_tensor()
    weight, scales = tensors["m.weight"], random_scales(3, 5)
    values = matrix(lambda r, c: weight[r, c].float().item() * scales[r // 10, c // 14].item())
    group = ct_group(num_bits=8, type="float", strategy="block", block_structure=[10, 14])
    tensors = {"m.weight": weight, "m.weight_scale": scales}
    return ct_config("float-quantized", group), tensors, values


def mxfp8():
    _, tensors, _ = fp8_by_tensor()
    weight = tensors["m.weight"]
    exponents = random_codes(ROWS, COLUMNS // 32, bits=4, seed=5) + 118
    values = matrix(
        lambda r, c: weight[r, c].float().item() * 2.0 ** (exponents[r, c // 32].item() - 127)
    )
    group = ct_group(num_bits=8, type="float", strategy="group", group_size=32)
    tensors = {"m.weight": weight, "m.weight_scale": exponents.to(torch.uint8)}
    return ct_config("mxfp8-quantized", group), tensors, values


def mxfp4():
    codes = random_codes(ROWS, COLUMNS, bits=4)
    exponents = random_codes(ROWS, COLUMNS // 32, bits=4, seed=5) + 118
    values = matrix(lambda r, c: E2M1[codes[r, c]] * 2.0 ** (exponents[r, c // 32].item() - 127))
    group = ct_group(num_bits=4, type="float", strategy="group", group_size=32)
    tensors = {
        "m.weight_packed": bytes_of_halves(codes),
        "m.weight_scale": exponents.to(torch.uint8),
    }
    return ct_config("mxfp4-pack-quantized", group), tensors, values


def nvfp4(method="compressed-tensors"):
    codes = random_codes(ROWS, COLUMNS, bits=4)
    scales = (random_scales(ROWS, COLUMNS // 16) * 1000).to(torch.float8_e4m3fn)
    second = torch.tensor([0.037])

    def number(row, col):
        # the two scales become one float32 first
        scale = scales[row, col // 16].float()
        scale = scale * second if method == "modelopt" else scale / second
        return E2M1[codes[row, col]] * scale.item()

    if method == "modelopt":
        config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
        tensors = {
            "m.weight": bytes_of_halves(codes),
            "m.weight_scale": scales,
            "m.weight_scale_2": second.reshape(()),
            "m.input_scale": torch.ones(()),
        }
    else:
        group = ct_group(num_bits=4, type="float", strategy="tensor_group", group_size=16)
        config = ct_config("nvfp4-pack-quantized", group)
        tensors = {
            "m.weight_packed": bytes_of_halves(codes),
            "m.weight_scale": scales,
            "m.weight_global_scale": second,
            "m.input_global_scale": torch.ones(1),
        }
    return config, tensors, matrix(number)


def gptq(bits=4, with_index=False, version="gptq"):
    groups = 4
    codes = random_codes(COLUMNS, ROWS, bits=bits)  # [in, out]
    zeros = random_codes(groups, ROWS, bits=bits, seed=3)
    scales = random_scales(groups, ROWS, dtype=torch.float16)
    group_of = [row * groups // COLUMNS for row in range(COLUMNS)]
    tensors = {
        "m.qweight": int32_words(codes.t(), bits).t().contiguous(),
        "m.qzeros": int32_words(zeros, bits),
        "m.scales": scales,
    }
    if with_index:
        shuffled = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(1)).tolist()
        group_of = [group_of[row] for row in shuffled]
        tensors["m.g_idx"] = torch.tensor(group_of, dtype=torch.int32)
    more = 1 if version == "gptq" else 0

    def number(row, col):
        group = group_of[col]
        return (codes[col, row] - zeros[group, row] - more).item() * scales[group, row].item()

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": 16,
        "desc_act": with_index,
        "checkpoint_format": version,
    }
    return config, tensors, matrix(number)


def awq():
    groups = 4
    codes = random_codes(COLUMNS, ROWS, bits=4)
    zeros = random_codes(groups, ROWS, bits=4, seed=3)
    scales = random_scales(groups, ROWS, dtype=torch.float16)

    def words(numbers):
        in_order = numbers.clone()
        for column in range(ROWS):
            in_order[:, column // 8 * 8 + AWQ_POSITIONS[column % 8]] = numbers[:, column]
        return int32_words(in_order, 4)

    def number(row, col):
        group = col * groups // COLUMNS
        return (codes[col, row] - zeros[group, row]).item() * scales[group, row].item()

    tensors = {"m.qweight": words(codes), "m.qzeros": words(zeros), "m.scales": scales}
    config = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}
    return config, {**tensors, "m.bias": torch.ones(3)}, matrix(number)


def bnb_4bit(nested=False, block=64):
    codes = random_codes(ROWS * COLUMNS, bits=4)
    table = torch.linspace(-1, 1, 16)
    count = -(-ROWS * COLUMNS // block)
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": [ROWS, COLUMNS]}
    tensors = {
        "m.weight": bytes_of_halves(codes[None], high_first=True).reshape(-1, 1),
        "m.weight.quant_map": table,
    }
    scales = random_scales(count)
    if nested:
        small = random_codes(count, bits=8, seed=3)
        table_of_scales = torch.linspace(-1, 1, 256)
        nested_scales = random_scales(-(-count // 8))
        state |= {"nested_blocksize": 8, "nested_offset": 1.25, "nested_dtype": "float32"}
        tensors |= {
            "m.weight.absmax": small.to(torch.uint8),
            "m.weight.nested_absmax": nested_scales,
            "m.weight.nested_quant_map": table_of_scales,
        }
        scales = torch.tensor(
            [
                (table_of_scales[small[i]] * nested_scales[i // 8] + 1.25).item()
                for i in range(count)
            ]
        )
    else:
        tensors["m.weight.absmax"] = scales
    text = json.dumps(state).encode()
    tensors["m.weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)

    def number(row, col):
        place = row * COLUMNS + col
        return table[codes[place]].item() * scales[place // block].item()

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    return config, tensors, matrix(number)


def bnb_int8():
    codes = random_codes(ROWS, COLUMNS, bits=8).to(torch.uint8).view(torch.int8)
    scales = random_scales(ROWS)

    def number(row, col):
        product = torch.tensor(codes[row, col].item() * scales[row].item())
        return (product * torch.tensor(7.874015718698502e-3)).item()

    tensors = {"m.weight": codes, "m.SCB": scales, "m.weight_format": torch.zeros(()).byte()}
    return {"quant_method": "bitsandbytes", "load_in_8bit": True}, tensors, matrix(number)


FORMATS = {
    "int8 by row": int8_by_row,
    "int8 with zeros": int8_with_zeros,
    "int4 in words": int4_in_words,
    "int4 in words, zeros": lambda: int4_in_words(with_zeros=True),
    "int4 in words, order of activations": lambda: int4_in_words(with_index=True),
    "int4 in words, by row": lambda: int4_in_words(groups=1, with_zeros=True),
    "int8 in words": lambda: int4_in_words(bits=8),
    "fp8 by tensor": fp8_by_tensor,
    "fp8 by block": fp8_by_block,
    "fp8 of ModelOpt": lambda: fp8_by_tensor(method="modelopt"),
    "mxfp8": mxfp8,
    "mxfp4": mxfp4,
    "nvfp4": nvfp4,
    "nvfp4 of ModelOpt": lambda: nvfp4("modelopt"),
    "gptq": gptq,
    "gptq of 8 bits": lambda: gptq(bits=8),
    "gptq of 2 bits": lambda: gptq(bits=2),
    "gptq, order of activations": lambda: gptq(with_index=True),
    "gptq v2": lambda: gptq(version="gptq_v2"),
    "awq": awq,
    "bitsandbytes of 4 bits": bnb_4bit,
    "bitsandbytes of 4 bits, nested": lambda: bnb_4bit(nested=True),
    "bitsandbytes of 4 bits, blocks across rows": lambda: bnb_4bit(block=80),
    "bitsandbytes of 8 bits": bnb_int8,
}


def opened(directory, config, tensors, dtype=torch.float32):
    """Open tensors whose values and scales lie in different shards."""
    shards = ({}, {})
    for position, (name, tensor) in enumerate(tensors.items()):
        shards[position % 2][name] = tensor.contiguous()
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, directory / file)
    weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return open_checkpoint(directory, {"quantization_config": config}, dtype)


@pytest.mark.parametrize("make", FORMATS.values(), ids=FORMATS)
def test_numbers_of_a_format(tmp_path, make):
    config, tensors, values = make()
    checkpoint = opened(tmp_path, config, {**tensors, "norm.weight": torch.ones(2)})
    plain = {"m.weight", "norm.weight"} | ({"m.bias"} & tensors.keys())
    assert set(checkpoint) == plain
    assert checkpoint.entries["m.weight"].shape == (ROWS, COLUMNS)
    expected = values.float()
    assert torch.equal(checkpoint["m.weight"], expected)
    for index in PARTS:
        target = torch.empty(expected[index].shape)
        checkpoint.copy("m.weight", index, target)
        assert torch.equal(target, expected[index]), index


@pytest.mark.parametrize("make", FORMATS.values(), ids=FORMATS)
def test_a_format_without_its_scales(tmp_path, make):
    config, tensors, _ = make()
    name = next(
        name for name in tensors if name.endswith(("weight_scale", "scales", "absmax", "SCB"))
    )
    del tensors[name]
    with pytest.raises(UserError, match=r"m\.\w*weight\w* is \w+, but its scale m\..* is missing"):
        opened(tmp_path, config, tensors).entries  # noqa: B018


@pytest.mark.parametrize("make", FORMATS.values(), ids=FORMATS)
def test_scales_of_a_wrong_shape(tmp_path, make):
    config, tensors, _ = make()
    name = next(
        name for name in tensors if name.endswith(("weight_scale", "scales", "absmax", "SCB"))
    )
    tensors[name] = torch.zeros(5, 3, dtype=tensors[name].dtype)
    with pytest.raises(UserError, match=rf"{name}.*\(in model-0000\d-of-00002.safetensors\)"):
        opened(tmp_path, config, tensors).entries  # noqa: B018


@pytest.mark.parametrize("make", [int8_by_row, fp8_by_block, int4_in_words, gptq, awq, bnb_4bit])
def test_scales_that_are_nan(tmp_path, make):
    config, tensors, _ = make()
    name = next(name for name in tensors if name.endswith(("weight_scale", "scales", "absmax")))
    tensors[name].view(-1)[1] = float("nan")
    with pytest.raises(UserError, match=rf"tensor {name} in model-.*safetensors has a scale.*NaN"):
        opened(tmp_path, config, tensors)["m.weight"]


@pytest.mark.parametrize("make", FORMATS.values(), ids=FORMATS)
def test_values_that_were_trained_get_the_nearest_codes(tmp_path, make):
    """The numbers of a format are found again, and others are within a step of its grid."""
    config, tensors, values = make()
    checkpoint = opened(tmp_path, config, tensors)
    packed = checkpoint.packed["m.weight"]
    full_tensor = values.float()
    if "bitsandbytes" in config["quant_method"] and "load_in_4bit" in config:
        with pytest.raises(UserError, match=r"m\.weight is stored in 4 bits of bitsandbytes"):
            packed.encode(full_tensor, stored=checkpoint.stored)
        return
    assert packed.has_nearest_codes(checkpoint.stored, full_tensor)
    assert not packed.has_nearest_codes(checkpoint.stored, full_tensor.flip(0))
    torch.manual_seed(0)
    trained = torch.randn(ROWS, COLUMNS)
    parts = packed.encode(trained, stored=checkpoint.stored)
    assert all(parts[name].dtype == tensors[name].dtype for name in parts)
    assert all(parts[name].shape == tensors[name].shape for name in parts)
    read = torch.empty(ROWS, COLUMNS)
    packed.fill({**tensors, **parts}, (), read)
    bits = 2 if config.get("bits") == 2 else 4
    assert (read - trained).norm() <= {2: 0.6, 4: 0.2}[bits] * trained.norm()
    assert packed.has_nearest_codes({**tensors, **parts}, trained)


@pytest.mark.parametrize("make", [gptq, int4_in_words])
@pytest.mark.parametrize("group", [-1, 4])
def test_groups_without_a_scale(tmp_path, make, group):
    config, tensors, _ = make(with_index=True)
    name = next(name for name in tensors if name.endswith("g_idx"))
    tensors[name][3] = group
    with pytest.raises(UserError, match=rf"{name} in model-.* has groups outside 0 to 3"):
        opened(tmp_path, config, tensors)["m.weight"]


def test_two_methods_in_one_checkpoint(tmp_path):
    config, tensors, _ = int4_in_words()
    _, others, _ = gptq()
    others = {name.replace("m.", "other."): tensor for name, tensor in others.items()}
    message = r"other\.qweight in model-.*safetensors is int32.*not of a format.*one method"
    with pytest.raises(UserError, match=message):
        opened(tmp_path, config, {**tensors, **others}).entries  # noqa: B018


def test_groups_of_a_mixed_config(tmp_path):
    """Modules of two groups, by expression and by class, and one that is ignored."""
    _, experts, values = int4_in_words()
    _, attention, attention_values = fp8_by_block()
    config = ct_config(
        "mixed-precision",
        ct_group(num_bits=8, type="float", strategy="block", block_structure="10x14"),
        ct_group(["re:.*experts.*"], num_bits=4, type="int", strategy="group", group_size=16),
        ignore=["lm_head", "re:.*gate$"],
    )
    tensors = {
        **{name.replace("m.", "layers.0.experts.3."): value for name, value in experts.items()},
        **{name.replace("m.", "layers.0.attention."): value for name, value in attention.items()},
        "layers.0.gate.weight": torch.ones(4, 64),
    }
    checkpoint = opened(tmp_path, config, tensors)
    assert torch.equal(checkpoint["layers.0.experts.3.weight"], values)
    assert torch.equal(checkpoint["layers.0.attention.weight"], attention_values)
    assert torch.equal(checkpoint["layers.0.gate.weight"], torch.ones(4, 64))


def test_a_file_of_modelopt_instead_of_the_config(tmp_path):
    config, tensors, values = nvfp4("modelopt")
    details = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    content = {"producer": {"name": "modelopt"}, "quantization": details}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(content))
    opened(tmp_path, config, tensors)
    checkpoint = open_checkpoint(tmp_path, {}, torch.float32)
    assert torch.equal(checkpoint["m.weight"], values)


def test_the_config_of_a_text_model(tmp_path):
    config, tensors, values = int4_in_words()
    opened(tmp_path, config, tensors)
    nested = {"text_config": {"quantization_config": config, "hidden_size": 8}, "vision_config": {}}
    assert torch.equal(open_checkpoint(tmp_path, nested, torch.float32)["m.weight"], values)
    assert without_quantization(nested) == {
        "text_config": {"hidden_size": 8},
        "vision_config": {},
    }


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (["fp8"], r"quantization_config=\['fp8'\] is not a table"),
        (
            {"quant_method": "fp8", "weight_block_size": 128},
            "weight_block_size=128 is not supported",
        ),
        ({"quant_method": "gptq", "bits": 3}, "bits=3"),
        ({"quant_method": "awq", "version": "gemv"}, "version='gemv'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "quant_algo='W4A16_AWQ'"),
        (ct_config("marlin-24"), "format='marlin-24'"),
        (ct_config("dense", transform_config={"R1": {}}), "transform_config"),
        (ct_config("pack-quantized", ct_group(num_bits=3)), "group_0.weights.num_bits=3"),
        (ct_config("pack-quantized", ct_group(num_bitz=4)), "num_bitz=4.*did you mean num_bits"),
        (ct_config("pack-quantized", ct_group("Linear")), r"group_0.targets=\["),
        (ct_config("pack-quantized", "Linear"), "config_groups.group_0='Linear' is not a table"),
    ],
)
def test_configs_that_are_refused(config, message):
    if message.startswith("group_0.targets"):
        config["config_groups"]["group_0"]["targets"] = [1]
    with pytest.raises(UserError, match=message):
        without_quantization({"quantization_config": config})
