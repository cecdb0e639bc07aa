# SPDX-License-Identifier: Apache-2.0
"""Code that runs in each step makes tensors on the device of their neighbors, and reads no number on the host.

Both cost nothing on a CPU. On a GPU a tensor without ``device=`` is an error or a copy, and a read waits until the
queue is empty. What does so all the same is listed here, with the reason.
"""

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[3] / "src/megatron/bridge"
HOT = (
    *(
        "backends/attention",
        "backends/kernels",
        "backends/moe",
        "backends/recurrent",
        "backends/specs",
    ),
    *("models/features", "models/vision", "training/step", "training/optim", "peft"),
    *("training/loop.py", "training/gpt_step.py", "training/vlm_step.py", "training/head_step.py"),
    "training/dpo.py",
)
MAKES = {
    "tensor",
    "zeros",
    "ones",
    "empty",
    "full",
    "arange",
    "rand",
    "randn",
    "randint",
    "linspace",
    "eye",
}
READS = {"item", "tolist", "cpu", "numpy"}

ALLOWED = {
    "backends/attention/block_mask.py host_values .tolist()": "once for a tensor that was not read before",
    "backends/moe/grouped_experts.py _group_offsets torch.tensor": "of counts on the host; copied without waiting",
    "backends/moe/grouped_experts.py _initialize torch.empty": "first values, before training",
    "backends/recurrent/gated_delta_net.py init_conv_weight torch.empty": "first values",
    "backends/recurrent/kimi_delta.py prepare torch.linspace": "first values",
    "backends/recurrent/mamba.py _initialize torch.empty": "first values",
    "backends/recurrent/mamba1.py prepare torch.arange": "first values",
    "backends/recurrent/tensor_parallel_mixer.py make_parameters torch.ones": "first values",
    "models/features/activations.py __init__ torch.full": "first values",
    "models/features/alibi.py alibi_slopes torch.arange": "when a model is built",
    "models/features/alibi.py alibi_slopes torch.tensor": "when a model is built",
    "models/features/multipliers.py _scale_embeddings torch.tensor": "a number of no dimension goes along as one",
    "models/features/per_layer_inputs.py __init__ .item()": "when the model is built",
    "models/features/per_layer_inputs.py __init__ torch.tensor": "the same",
    "models/features/rope.py _ntk_alpha torch.arange": "when the model is built",
    "models/vision/tower.py _dummy_patches torch.ones": "an image in the place of none, for ranks without images",
    "models/vision/tower.py _dummy_patches torch.tensor": "the same",
    "models/vision/tower.py _dummy_places torch.arange": "the same",
    "models/vision/tower.py _dummy_places torch.ones": "the same",
    "models/vision/tower.py _dummy_tiles torch.tensor": "the same",
    "models/vision/tower.py _dummy_image torch.ones": "the same",
    "models/vision/tower.py _dummy_image torch.tensor": "the same",
    "models/vision/tower.py _dummy_sound torch.ones": "sound in the place of none, once",
    "models/vision/tower.py _dummy_sound torch.zeros": "the same",
    "models/vision/tower.py _encode_qwen2_audio .cpu()": "the batch's masks of sound are on the host",
    "models/vision/tower.py _encode_qwen2_audio .tolist()": "of lengths on the host",
    "models/vision/tower.py _encode_qwen2_audio torch.arange": "a mask that is made on the host, then moved",
    "models/vision/tower.py _encode_qwen2_audio torch.zeros": "the same",
    "training/step/embedding_noise.py sample_lengths .tolist()": "bounds of samples, on the host",
    "models/vision/media.py select torch.tensor": "indices from the host, moved to their tensor",
    "models/vision/sharing.py _exchanged_sizes .tolist()": "sizes of images that ranks share; docs/gpu.md names it",
    "models/vision/sharing.py _exchanged_sizes torch.tensor": "indices on the host",
    "models/vision/sharing.py _exchanged_sizes torch.zeros": "on the host, then moved",
    "models/vision/tower.py _send_to_device .tolist()": "of bounds on the host, before they are moved",
    "models/vision/tower.py _with_sizes .cpu()": "the batch's grids are on the host",
    "peft/low_rank.py _draw_factor torch.empty": "first values",
    "peft/fused_parts.py _split_rows torch.arange": "once per layer",
    "peft/principal.py _approximate_svd torch.randn": "first values",
    "peft/vera.py draw_projections torch.empty": "first values",
    "training/vlm_step.py _sight .tolist()": "of bounds on the host",
    "training/vlm_step.py _places .tolist()": "of the batch on the host, before it is moved",
    "training/step/trained_tokens.py bounds_on_host .numpy()": "of the batch on the host",
    "training/gpt_step.py on_device .tolist()": "of the batch on the host, before it is moved",
    "training/optim/optimizer.py update_count .item()": "when a checkpoint is saved",
}


def calls(path):
    """(name of the function, what it calls) of each suspect call of a file."""
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef):
            continue
        for call in ast.walk(function):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                continue
            name, owner = call.func.attr, call.func.value
            if name in READS and not call.args:
                yield function.name, f".{name}()"
            given = {keyword.arg for keyword in call.keywords}
            if (
                name in MAKES
                and isinstance(owner, ast.Name)
                and owner.id == "torch"
                and "device" not in given
            ):
                yield function.name, f"torch.{name}"


def suspects():
    paths = [SOURCE / place for place in HOT]
    files = [
        path for place in paths for path in (place.rglob("*.py") if place.is_dir() else [place])
    ]
    return {
        f"{path.relative_to(SOURCE)} {function} {call}"
        for path in files
        for function, call in calls(path)
    }


def test_every_suspect_has_its_reason():
    found = suspects()
    assert sorted(found - ALLOWED.keys()) == []
    assert sorted(ALLOWED.keys() - found) == [], "these are gone"
