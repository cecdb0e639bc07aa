# SPDX-License-Identifier: Apache-2.0
"""Damaged checkpoints of every family: refused by name, or seen; undamaged ones pass."""

import copy
import shutil
from dataclasses import dataclass, field

import pytest
import torch

from megatron.bridge import AutoBridge
from megatron.bridge.testing.family import different_providers
from megatron.bridge.utils.errors import UserError
from tests.families import harness
from tests.families.mutations import Copy, mutations
from tests.families.own_models import model_class
from tests.families.rows import ROWS
from tests.unit_tests.project.tree import ROOT

# row -> how many of its mutations the fast run skips between two
FAST = {"llama_tied": 5, "qwen3_moe": 23, "deepseek_v3": 29}
LEAST = 15000
_KINDS = ("refused", "seen", "idle")


@dataclass
class Verdicts:
    """What became of the mutations of one row.

    Attributes:
        refused: how many were refused by name.
        seen: how many changed the logits, or a setting of the model for training only.
        idle: how many change nothing, in transformers neither.
        problems: a line for each mutation that passed, or was refused without a name, or means something else than
            in transformers; and for each false alarm.
    """

    refused: int = 0
    seen: int = 0
    idle: int = 0
    problems: list[str] = field(default_factory=list)


class Trial:
    """A row's bridged model, into which damaged copies of its checkpoint are loaded."""

    def __init__(self, case, directory):
        self.case, self.directory = case, directory
        self.bridge, self.model = harness.build(case, "one")
        plan = self.bridge.plan(self.model)
        self.spare = {*plan.ties, *plan.buffers}
        self.config = (case.checkpoint / "config.json").read_text()
        self.found = Verdicts()

    def run(self, only):
        """Try the mutations that ``only`` says, with an undamaged copy before and after."""
        self.check_undamaged()
        for index, mutation in enumerate(mutations(self.case)):
            if only(index):
                damaged = Copy(self.case.checkpoint, self.directory / "copy")
                self.judge(mutation, damaged)
                shutil.rmtree(damaged.directory)
        self.bridge.load_hf_weights(self.model)
        self.check_undamaged()
        return self.found

    def check_undamaged(self):
        self.found.problems += [f"false alarm: {line}" for line in self.changes(self.model)]

    def changes(self, model):
        """How the logits of a model differ from those of the undamaged one."""
        return different_logits(self.case.logits, logits(model, self.case.batch[0]))

    def judge(self, mutation, damaged):
        """Damage a copy and load it."""
        mutation.apply(damaged)
        problems = self.found.problems
        try:
            problems += [
                f"{mutation.name}: {problem}" for problem in self.load(mutation, damaged.directory)
            ]
        except UserError as error:
            self.found.refused += 1
            if not any(blame in str(error) for blame in mutation.blames):
                problems.append(f"{mutation.name}: refused without naming it: {error}")
        except Exception as error:  # a crash is no refusal
            problems.append(f"{mutation.name}: {type(error).__name__}: {error}")

    def load(self, mutation, directory):
        """Load what is damaged and yield a line if that goes unseen; errors are the caller's."""
        bridge = AutoBridge.from_hf_pretrained(directory)
        if (directory / "config.json").read_text() != self.config:
            yield from self.load_as_transformers_does(bridge)
            return
        bridge.load_hf_weights(self.model)
        if self.changes(self.model):
            self.found.seen += 1
        elif bridge.plan(self.model).unread:
            self.found.idle += 1  # transformers does not load the tensor either; a note says so
        elif mutation.name.removeprefix("drop ") in self.spare:
            self.found.idle += 1  # the same numbers are stored twice, or computed
        else:
            yield "nothing shows it"

    def load_as_transformers_does(self, bridge):
        """Another config must mean to the bridged model what it means to transformers."""
        provider = bridge.to_megatron_provider()
        for name, value in harness.settings(provider, {}, self.case.row.provider).items():
            setattr(provider, name, value)
        model = provider.provide_distributed_model(wrap_with_ddp=False)
        yield from different_logits(
            self.logits_of_transformers(bridge.hf_config), logits(model, self.case.batch[0])
        )
        undamaged = self.bridge.to_megatron_provider(load_weights=False)
        if self.changes(model) or different_providers(
            undamaged, bridge.to_megatron_provider(load_weights=False)
        ):
            self.found.seen += 1
        else:
            self.found.idle += 1

    @torch.no_grad()
    def logits_of_transformers(self, config):
        """Of the undamaged weights under another config."""
        plain = self.case.directory / "plain"
        config = copy.deepcopy(config)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        hf = model_class(self.case.row.model).from_pretrained(
            plain if plain.exists() else self.case.checkpoint,
            config=config,
            attn_implementation=self.case.row.attention,
            dtype=torch.float32,
        )
        return hf.eval()(input_ids=self.case.batch[0], use_cache=False).logits


@torch.no_grad()
def logits(model, ids):
    """[rows, sequence, vocabulary]."""
    positions = torch.arange(ids.shape[1])[None].expand_as(ids)
    return model[0].eval()(input_ids=ids, position_ids=positions, attention_mask=None)


def different_logits(expected, found):
    """A line if two logits differ in number or by more than they may."""
    if expected.shape != found.shape:
        return [f"{list(found.shape)} logits instead of {list(expected.shape)}"]
    return harness.different_logits(expected, found)


@pytest.fixture(scope="module")
def tried():
    """Row -> verdicts, of the rows that were tried."""
    return {}


@pytest.mark.parametrize("name", FAST)
def test_some_mutations(family_case, tmp_path, name):
    found = Trial(family_case(name), tmp_path).run(lambda index: index % FAST[name] == 0)
    assert not found.problems, "\n".join(found.problems)


def test_the_documentation_quotes_what_is_asserted():
    assert f"more than {LEAST:,} such mutations" in (ROOT / "docs" / "conversion.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_no_mutation_passes(family_case, tmp_path, tried, name):
    tried[name] = found = Trial(family_case(name), tmp_path).run(lambda _: True)
    assert not found.problems, "\n".join(found.problems)


@pytest.mark.slow
def test_count(tried, request):
    refused, seen, idle = (sum(getattr(found, kind) for found in tried.values()) for kind in _KINDS)
    undetected = sum(len(found.problems) for found in tried.values())
    summary = (
        f"{refused + seen} mutations of {len(tried)} models: {refused} refused, {seen} seen, "
        f"{undetected} problems; {idle} more that change nothing in transformers either"
    )
    plugins = request.config.pluginmanager
    with plugins.getplugin("capturemanager").global_and_fixture_disabled():
        plugins.getplugin("terminalreporter").write_line(f"\n{summary}")
    assert undetected == 0
    assert refused + seen >= LEAST or len(tried) < len(ROWS)
