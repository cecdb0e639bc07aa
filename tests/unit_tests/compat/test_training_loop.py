# SPDX-License-Identifier: Apache-2.0
"""A program sets up model, optimizer and data, and calls ``train`` or ``train_step``: the losses are a run's."""

import json

import pytest
import torch
from megatron.core import parallel_state

from megatron.bridge.data.loaders import (
    build_train_valid_test_data_loaders,
    get_train_valid_test_num_samples,
    setup_data_iterators,
)
from megatron.bridge.data.tokenizer import build_tokenizer
from megatron.bridge.data.utils import get_dataset_provider
from megatron.bridge.models.model_provider import get_model
from megatron.bridge.training.gpt_step import forward_step, get_batch, masked_loss
from megatron.bridge.training.initialize import initialize_megatron
from megatron.bridge.training.optim import setup_optimizer
from megatron.bridge.training.setup import _update_model_config_funcs
from megatron.bridge.training.state import GlobalState
from megatron.bridge.training.train import train, train_step
from megatron.bridge.training.utils.pg_utils import get_pg_collection
from megatron.bridge.utils.errors import UserError
from tests.toy_run import initialize_by_name, run_toy, toy_config

STEPS = 3


@pytest.fixture(scope="module")
def expected():
    """The losses of the same run by ``pretrain``."""
    return run_toy({"train": {"train_iters": STEPS}}).losses


def set_up():
    """What scripts do before their loop."""
    state = GlobalState()
    state.cfg = toy_config(train={"train_iters": STEPS})
    dataset, state.cfg.dataset = state.cfg.dataset, None
    state.cfg.validate()  # without a dataset, it fills in what the blocks leave open
    state.cfg.dataset = dataset
    initialize_megatron(cfg=state.cfg)
    model = get_model(state.cfg.model, state.cfg.ddp, bf16=False, fp16=False)
    initialize_by_name(model)
    optimizer, scheduler = setup_optimizer(state.cfg.optimizer, state.cfg.scheduler, model)
    optimizer.reload_model_params()
    _update_model_config_funcs(model, state.cfg.model, state.cfg.ddp, optimizer)
    return state, model, optimizer, scheduler


def provide_datasets(sizes, config):
    tokenizer = build_tokenizer(toy_config().tokenizer)
    return get_dataset_provider(config)(sizes, config, tokenizer=tokenizer)


def iterators(state, model):
    group = parallel_state.get_data_parallel_group()
    return setup_data_iterators(state.cfg, state.train_state, len(model), provide_datasets, group)


def own_step(data_iterator, model):
    """A forward step of a script, around ``get_batch``."""
    batch = get_batch(data_iterator, None, False, pg_collection=get_pg_collection([model]))
    tokens, labels, loss_mask, attention_mask, position_ids, packed = batch
    assert packed is None
    output = model(tokens, position_ids, attention_mask, labels=labels)
    return output, lambda losses: masked_loss(loss_mask, losses)


@pytest.mark.parametrize("step", [forward_step, own_step])
def test_step_by_step(expected, step):
    state, model, optimizer, scheduler = set_up()
    batches = iterators(state, model)[0]
    losses = []
    for _ in range(STEPS):
        outcome = train_step(step, batches, model, optimizer, scheduler, state, None, None, None)
        loss_dict, skipped, should_save, should_exit, exit_code, grad_norm, zeros = outcome
        assert (skipped, should_save, should_exit, exit_code, zeros) == (
            0,
            False,
            False,
            None,
            None,
        )
        assert grad_norm > 0
        losses.append(loss_dict["lm loss"].item())
    assert losses == pytest.approx(expected, rel=1e-6)


def test_whole_loop(expected, tmp_path):
    state, model, optimizer, scheduler = set_up()
    state.cfg.checkpoint.save = state.cfg.logger.log_dir = str(tmp_path)
    train_data, valid_data, _ = iterators(state, model)
    progress = train(
        forward_step,
        model,
        optimizer,
        scheduler,
        train_data,
        valid_data,
        state,
        checkpoint_manager=None,
        pg_collection=None,
    )
    assert progress is state.train_state
    assert (progress.step, progress.consumed_train_samples) == (STEPS, 8 * STEPS)
    assert (tmp_path / f"iter_{STEPS:07d}").is_dir()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [row["lm loss"] for row in rows if row["kind"] == "train"]
    # of the steps since the last line
    assert losses == [pytest.approx(sum(expected) / STEPS, rel=1e-6)]


def test_what_train_cannot_do_is_refused():
    state, model, optimizer, scheduler = set_up()
    given = (forward_step, model, optimizer, scheduler, iter([]))
    with pytest.raises(UserError, match=r"non_loss_data_func.*callbacks"):
        train(*given, None, state, non_loss_data_func=print)
    with pytest.raises(UserError, match=r"valid_data_iterator=list_iterator.*setup_data_iterators"):
        train(*given, iter([]), state)


def test_loaders_yield_the_batches_of_a_run():
    state, model, *_ = set_up()
    assert get_train_valid_test_num_samples(state.cfg) == (8 * STEPS, 8, 8)
    group = parallel_state.get_data_parallel_group()
    state.train_state.consumed_train_samples = 8
    train_loader, valid_loader, test_loader = build_train_valid_test_data_loaders(
        state.cfg, state.train_state, provide_datasets, group
    )
    batches = list(train_loader)
    assert len(batches) == (STEPS - 1) * 4
    assert batches[0]["tokens"].shape == (2, 32)
    state.train_state.consumed_train_samples = 0
    all_batches = list(iterators(state, model)[0])
    assert torch.equal(batches[0]["tokens"], all_batches[4]["tokens"])
    assert len(list(valid_loader)) == len(list(test_loader)) == 4
    assert state.train_state.do_train
    assert state.train_state.do_valid
