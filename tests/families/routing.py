# SPDX-License-Identifier: Apache-2.0
"""The experts that transformers' own models choose, and those that the engine returns."""

import numpy as np
import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron.bridge.backends.moe.router_replay import ExpertReplay, routers_of
from megatron.bridge.checkpoint.model_io import unwrap
from megatron.bridge.inference.engine import Engine
from megatron.bridge.inference.requests import Sampling
from tests.families import decoding, harness


@torch.no_grad()
def hf_experts(case, tokens):
    """Experts [len(tokens), MoE layers, topk] of a forward pass of transformers, in ascending order."""
    path = case.checkpoint if case.values is None else case.directory / "plain"
    kind = harness.model_class(case.row.model)
    model = kind.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    chosen = []

    def keep(module, args, kwargs):
        tensors = [value for value in (*args, *kwargs.values()) if torch.is_tensor(value)]
        indices = [tensor for tensor in tensors if tensor.dtype == torch.int64]
        assert len(indices) == 1
        chosen.append(indices[0].view(len(tokens), -1).sort(-1).values)

    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            module.register_forward_pre_hook(keep, with_kwargs=True)
    model(input_ids=torch.tensor([tokens]), use_cache=False)
    return torch.stack(chosen, 1).numpy()


def generated(case, layout, prompts, sampling, **changes):
    """The completions of the engine, on every rank."""
    with Engine(decoding.decoder(case, layout), decoding.engine_config(case, **changes)) as engine:
        jobs = [job for prompt in prompts for job in engine.submit(prompt, sampling)]
        list(engine.run())
    return [job.completion for job in jobs]


def prompts_with_a_common_beginning(vocabulary):
    draw = np.random.default_rng(5)
    shared = draw.integers(vocabulary, size=17).tolist()
    return [shared + draw.integers(vocabulary, size=count).tolist() for count in (1, 9, 4)]


SAMPLING = Sampling(max_new_tokens=9, temperature=1.0, seed=3, routed_experts=True)


def difference(case, layout, **changes):
    """What differs between the experts of the engine under ``layout`` and those of transformers; '' if nothing."""
    prompts = prompts_with_a_common_beginning(case.row.config["vocab_size"])
    for completion in generated(case, layout, prompts, SAMPLING, chunk=8, rows=16, **changes):
        tokens = completion.prompt_tokens + completion.tokens
        experts = completion.routed_experts
        expected = hf_experts(case, tokens[:-1])
        if experts.dtype != np.uint8 or experts.shape != expected.shape:
            return f"{experts.dtype} {experts.shape}, not {expected.shape}"
        if not np.array_equal(np.sort(experts, axis=-1), expected):
            return f"{completion.prompt_tokens}: {np.argwhere(np.sort(experts, -1) != expected)}"
    return ""


def random_experts(case, rows=2, seed=0):
    """Experts [rows, sequence, MoE layers, topk] that no router chose; those of each last token are left open."""
    config = case.row.config
    draw = torch.Generator().manual_seed(seed)
    layers = config["num_hidden_layers"] - len(config.get("mlp_only_layers", ()))
    shape = rows, case.batch[0].shape[1], layers, config["num_experts"]
    experts = torch.rand(shape, generator=draw).argsort(-1)[..., : config["num_experts_per_tok"]]
    experts[:, -1] = -1
    return experts


def train_with_experts(case, layout, experts, **settings):
    """Loss, gradients of the routers and chosen experts of one step, whose microbatches have the given experts.

    Returns, of this rank: the losses of the microbatches, a dict of router gradients by layer, and for each layer the
    experts [rows, sequence, topk] in ascending order (without those of the last token).
    """
    bridge = harness.AutoBridge.from_hf_pretrained(case.checkpoint)
    provider = bridge.to_megatron_provider()
    settings = {**harness.LAYOUTS[layout], **settings}
    for name, value in harness.settings(provider, settings, case.row.provider).items():
        setattr(provider, name, value)
    model = provider.provide_distributed_model(wrap_with_ddp=True)
    ids, labels = case.batch
    config = unwrap(model[0]).config
    config.finalize_model_grads_func = finalize_model_grads
    config.moe_aux_loss_coeff = 0.0
    positions = torch.arange(ids.shape[1])[None]
    chosen, losses = {}, []
    routers = [router for chunk in model for router in routers_of(chunk)]
    for router in routers:
        router.register_forward_hook(
            lambda module, _, output: chosen.setdefault(module.layer_number, []).append(output[1])
        )

    def step(rows, chunk):
        row = next(rows)
        with replay.microbatch(experts[row : row + 1]):
            output = chunk(ids[row][None], positions, None, labels=labels[row][None])

        def loss(values):
            losses.append(values.detach().mean().item())
            return values.mean(), {}

        return output, loss

    with ExpertReplay(model) as replay:
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(range(len(experts))) for _ in model],
            model=model,
            num_microbatches=len(experts),
            seq_length=ids.shape[1],
            micro_batch_size=1,
            forward_only=False,
        )
    assert all(router.router_replay is None for router in routers)
    gradients = {router.layer_number: router.weight.main_grad.clone() for router in routers}
    maps = {
        layer: [routing_map.nonzero()[:, 1].view(len(routing_map), -1) for routing_map in calls]
        for layer, calls in chosen.items()
    }
    return losses, gradients, maps
