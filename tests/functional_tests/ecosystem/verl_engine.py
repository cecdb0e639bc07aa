# SPDX-License-Identifier: Apache-2.0
"""Runs verl's own Megatron engine on CPUs, as its training worker does, and writes what it computed as JSON.

``torchrun -m tests.functional_tests.ecosystem.verl_engine FOLDER RESULT [tp=N] [pp=N] [lora]``, with verl on the path.
Only what verl assumes of a platform is set here: that a device tells free memory, and that there is one to be seeded.
"""

import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

STEPS_BEFORE_SAVE, STEPS = 2, 4
RATE = 1e-3


def rows_of(seed, count=4, vocabulary=96):
    """Texts of 5 to 14 tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, vocabulary, (5 + 3 * index,), generator=generator)
        for index in range(count)
    ]


def batch_of(rows):
    from verl.utils import tensordict_utils

    def nested(parts):
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    return tensordict_utils.get_tensordict(
        {
            "input_ids": nested(rows),
            "position_ids": nested([torch.arange(len(row)) for row in rows]),
            "loss_mask": nested([(torch.arange(len(row)) >= 2).long() for row in rows]),
        },
        non_tensor_dict={
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": 2,
            "temperature": 1.0,
            "use_remove_padding": True,
            "global_batch_size": len(rows),
        },
    )


def build(model, tp, pp, lora):
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    adapters = {"rank": 4, "alpha": 8, "type": "lora"} if lora else {}
    engine = MegatronEngineWithLMHead(
        HFModelConfig(path=str(model), use_remove_padding=True, lora=adapters),
        McoreEngineConfig(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            sequence_parallel=tp > 1,
            dtype="bfloat16",
        ),
        McoreOptimizerConfig(
            lr=RATE,
            lr_decay_style="constant",  # verl does not restore a schedule
            lr_warmup_steps=0,
            total_training_steps=STEPS,
            weight_decay=0.0,
        ),
        CheckpointConfig(),
    )
    engine.initialize()
    model_parallel_cuda_manual_seed(engine.engine_config.seed)
    return engine


def train(engine, batch, steps):
    from verl.workers.utils.losses import sft_loss

    losses = []
    for _ in range(steps):
        with engine.train_mode():
            output = engine.train_batch(batch.clone(), partial(sft_loss, None))
            engine.lr_scheduler_step()
        if engine.is_mp_src_rank_with_outputs():
            losses.append(sum(output["loss"]))
    return losses


def main(folder, result, *options):
    import megatron.bridge  # noqa: F401 - verl imports it later

    torch.cuda.mem_get_info = lambda *_: (1 << 30, 2 << 30)
    sizes = {"tp": 1, "pp": 1} | {
        name: int(size) for name, _, size in (option.partition("=") for option in options) if size
    }
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    engine = build(Path(folder) / "model", sizes["tp"], sizes["pp"], "lora" in options)
    batch = batch_of(rows_of(0))
    losses = train(engine, batch, STEPS_BEFORE_SAVE)
    engine.save_checkpoint(str(result) + ".checkpoint", global_step=STEPS_BEFORE_SAVE)
    losses += train(engine, batch, STEPS - STEPS_BEFORE_SAVE)
    with engine.eval_mode():
        output = engine.infer_batch(batch.clone())
    exported = {
        name: weight.detach().clone().cpu() for name, weight in engine.get_per_tensor_param()[0]
    }
    adapter = {}
    if "lora" in options:
        parameters, _ = engine.get_per_tensor_param(base_sync_done=True)
        adapter = {name: weight.detach().clone().cpu() for name, weight in parameters}
    engine.load_checkpoint(str(result) + ".checkpoint", del_local_after_load=False)
    repeated = train(engine, batch, STEPS - STEPS_BEFORE_SAVE)
    if engine.is_mp_src_rank_with_outputs():
        log_probs = output["model_output"]["log_probs"].values().tolist()
        values = {"losses": losses, "repeated": repeated, "log_probs": log_probs}
        Path(result).write_text(json.dumps(values))
    if dist.get_rank() == 0:
        torch.save({"weights": exported, "adapter": adapter}, str(result) + ".pt")
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
