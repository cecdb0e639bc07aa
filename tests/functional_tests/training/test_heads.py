# SPDX-License-Identifier: Apache-2.0
"""Training of models with a head against plain loops over transformers' classes, and any layout."""

import json

import pytest
import tokenizers
import torch
import torch.nn.functional as F
import transformers

from megatron.bridge import AutoBridge
from megatron.bridge.cli.main import main
from megatron.bridge.data.config import (
    ClassificationDatasetConfig,
    EmbeddingDatasetConfig,
    PackedSequenceSpecs,
    RerankDatasetConfig,
    RewardDatasetConfig,
    TokenClassificationDatasetConfig,
)
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.config import (
    CheckpointConfig,
    OptimizerConfig,
    SchedulerConfig,
    TokenizerConfig,
    ValidationConfig,
)
from megatron.bridge.training.finetune import finetune
from megatron.bridge.training.head_step import forward_step
from tests.toy_heads import as_transformers, expected, ids_without_padding, make
from tests.toy_models import tokens
from tests.toy_run import SEQUENCE, VOCABULARY, toy_config
from tests.workers import forget_model_parallel, leave

STEPS, RATE, EPSILON, CLASSES = 3, 2e-4, 1e-6, 3
LENGTHS = [(5, 9), (11, 4), (7, 2), (6, 8)]
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}
LAYOUTS = {
    "sp2": {**TP2, "sequence_parallel": True},
    "tp2": TP2,
    "pp2": PP2,
    "cp2": {"context_parallel_size": 2},
    # two data-parallel ranks with half of the texts each
    "gathered": {"gather_negatives": True},
}
KINDS = {
    "classes": ("LlamaForSequenceClassification", CLASSES, "classification loss"),
    "words": ("LlamaForTokenClassification", CLASSES, "classification loss"),
    "rewards": ("LlamaForSequenceClassification", 1, "reward loss"),
    "mean": ("LlamaModel", None, "contrastive loss"),
    "last_token": ("LlamaModel", None, "contrastive loss"),
    "negatives": ("LlamaModel", None, "contrastive loss"),
    "relevance": ("LlamaForSequenceClassification", 1, "relevance loss"),
    "ranking": ("LlamaForSequenceClassification", 1, "ranking loss"),
}
NEGATIVES, DIMS, WEIGHTS = 2, [32, 8], [1.0, 0.5]
SETTINGS = {
    "mean": {"pooling": "mean"},
    "negatives": {"matryoshka_dims": DIMS, "matryoshka_weights": WEIGHTS},
}
"""Settings of the model of a kind."""
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": SEQUENCE,
    "rope_theta": 10000.0,
}


def texts():
    """Two texts of token ids for each record."""
    generator = torch.Generator().manual_seed(0)
    return [
        [
            torch.randint(1, VOCABULARY - 1, (length,), generator=generator).tolist()
            for length in lengths
        ]
        for lengths in LENGTHS
    ]


def as_text(ids):
    return " ".join(map(str, ids)) + " "


def record(kind, number, first, second):
    if kind == "classes":
        return {"text": as_text(first), "label": number % CLASSES}
    if kind == "words":
        return {"tokens": [*map(str, first)], "ner_tags": [token % CLASSES for token in first]}
    if kind == "rewards":  # the first two tokens of the first text are the prompt of both
        answers = {"chosen": as_text(first[2:]), "rejected": as_text(second)}
        return {"prompt": as_text(first[:2]), **answers}
    if kind == "relevance":
        return {"query": as_text(first), "document": as_text(second), "label": number / 3}
    pair = {"query": as_text(first), "positive": as_text(second)}
    if kind in ("negatives", "ranking"):
        pair["negatives"] = [as_text(ids) for ids in negatives_of(number)]
    return pair


def negatives_of(number):
    """Two texts that do not fit a record: parts of those of others."""
    return [texts()[(number + step) % len(LENGTHS)][1][:3] for step in (1, 2)]


def pair_of(kind, first, second):
    return (first, [*first[:2], *second]) if kind == "rewards" else (first, second)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Models and data of each kind."""
    root = tmp_path_factory.mktemp("heads")
    for kind, (name, labels, _) in KINDS.items():
        (root / kind).mkdir()
        torch.manual_seed(0)
        own = {} if labels is None else {"num_labels": labels}
        config = transformers.LlamaConfig(**SIZES, **own, pad_token_id=0, initializer_range=0.15)
        getattr(transformers, name)(config).save_pretrained(root / kind / "model")
        rows = [record(kind, number, *pair) for number, pair in enumerate(texts())]
        (root / kind / "training.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_tokenizer(root / "words" / "model")
    return root


def save_tokenizer(folder, **special):
    """A tokenizer that knows which token is of which word; a word is the number of its token."""
    numbers = {str(token): token for token in range(1, VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"end": 0, **numbers}, unk_token="end")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="end", **special
    ).save_pretrained(folder)


def dataset(kind, folder, packed):
    shared = {"dataset_root": str(folder), "seq_length": SEQUENCE}
    if kind == "classes":
        specs = PackedSequenceSpecs(packed_sequence_size=SEQUENCE) if packed else None
        return ClassificationDatasetConfig(**shared, packed_sequence_specs=specs)
    if kind == "words":
        return TokenClassificationDatasetConfig(**shared)
    if kind == "relevance":
        return RerankDatasetConfig(**shared)
    # four texts, of which the longest has 11 tokens, or three of up to 14
    longer = shared | {"seq_length": 2 * SEQUENCE, "negatives": NEGATIVES}
    if kind == "ranking":
        return RerankDatasetConfig(**longer)
    if kind == "negatives":
        return EmbeddingDatasetConfig(**longer)
    return (RewardDatasetConfig if kind == "rewards" else EmbeddingDatasetConfig)(**shared)


class Losses(Callback):
    def __init__(self):
        self.steps = []

    def on_train_step_end(self, context):
        self.steps.append({name: loss.item() for name, loss in context.loss_dict.items()})


def run(root, kind, layout=None, micro=None, packed=False, save=None, steps=STEPS):
    """The losses of each step."""
    folder = root / kind
    declared = AutoBridge.from_hf_pretrained(folder / "model").to_megatron_provider(
        load_weights=False
    )
    names = ("head", "num_labels", "share_embeddings_and_output_weights")
    head = {name: getattr(declared, name) for name in names}
    head |= SETTINGS.get(kind, {})
    data = dataset(kind, folder, packed)
    tokenizer = TokenizerConfig(
        tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder / "model")
    )
    config = toy_config(
        **({"tokenizer": tokenizer} if kind == "words" else {}),
        model={
            **head,
            "layernorm_epsilon": 1e-6,
            "seq_length": data.seq_length,
            **(layout or {}),
        },
        train={
            "train_iters": steps,
            "global_batch_size": len(LENGTHS),
            "micro_batch_size": micro or 4,
        },
        dataset=data,
        optimizer=OptimizerConfig(lr=RATE, weight_decay=0.0, clip_grad=0.0, adam_eps=EPSILON),
        scheduler=SchedulerConfig(lr_decay_style="constant", lr_decay_iters=STEPS),
        validation=ValidationConfig(eval_iters=0),
        checkpoint=CheckpointConfig(pretrained_checkpoint=str(folder / "model"), save=save),
    )
    losses = Losses()
    try:
        finetune(config, forward_step, [losses])
    finally:
        forget_model_parallel()
    return losses.steps


def alone(*arguments, **options):
    torch.set_num_threads(1)
    found = run(*arguments, **options)
    leave()
    return found


def score(model, ids):
    return model(torch.tensor([ids])).logits[0]


def vector(model, kind, ids):
    states = model(torch.tensor([ids])).last_hidden_state[0]
    return states.mean(0) if kind == "mean" else states[-1]


def ranking_losses(queries, candidates):
    """The loss of MultipleNegativesRankingLoss of sentence-transformers, with its factor 20."""
    similarities = F.normalize(queries, dim=-1) @ F.normalize(candidates, dim=-1).T
    return F.cross_entropy(20 * similarities, torch.arange(len(queries)))


def naive_loss(model, kind):
    """The mean over all records, each alone through transformers' model."""
    if kind == "classes":
        scores = torch.stack([score(model, first) for first, _ in texts()])
        return F.cross_entropy(scores, torch.arange(len(LENGTHS)) % CLASSES)
    if kind == "words":
        scores = torch.cat([score(model, first) for first, _ in texts()])
        return F.cross_entropy(
            scores, torch.tensor([token % CLASSES for first, _ in texts() for token in first])
        )
    if kind == "relevance":
        scores = torch.cat([score(model, first + second) for first, second in texts()])
        return F.binary_cross_entropy_with_logits(scores, torch.arange(len(LENGTHS)) / 3)
    if kind == "ranking":
        rows = [
            torch.cat([score(model, first + ids) for ids in (second, *negatives_of(number))])
            for number, (first, second) in enumerate(texts())
        ]
        return -torch.stack(rows).log_softmax(-1)[:, 0].mean()
    pairs = [pair_of(kind, *pair) for pair in texts()]
    if kind == "rewards":
        margins = torch.stack(
            [score(model, chosen) - score(model, rejected) for chosen, rejected in pairs]
        )
        return -margins.sigmoid().log().mean()
    queries, positives = (
        torch.stack([vector(model, kind, pair[side]) for pair in pairs]) for side in (0, 1)
    )
    if kind != "negatives":
        return ranking_losses(queries, positives)
    hard = [
        vector(model, kind, ids) for number in range(len(pairs)) for ids in negatives_of(number)
    ]
    candidates = torch.cat((positives, torch.stack(hard)))
    return sum(
        weight * ranking_losses(queries[:, :size], candidates[:, :size])
        for size, weight in zip(DIMS, WEIGHTS, strict=True)
    )


def naive_losses(root, kind):
    model = getattr(transformers, KINDS[kind][0]).from_pretrained(root / kind / "model")
    optimizer = torch.optim.Adam(model.parameters(), RATE, (0.9, 0.999), EPSILON)
    found = []
    for _ in range(STEPS):
        loss = naive_loss(model, kind)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_a_plain_loop(places, kind):
    found = [step[KINDS[kind][2]] for step in alone(places, kind)]
    assert found == pytest.approx(naive_losses(places, kind), rel=2e-5)
    assert len(set(found)) == STEPS


def test_packed_texts_have_the_same_losses(places):
    padded, packed = alone(places, "classes"), alone(places, "classes", micro=1, packed=True)
    # two texts share a row, so a step takes other numbers of texts; the first losses are of all of them
    assert packed[0]["classification loss"] == pytest.approx(
        padded[0]["classification loss"], rel=1e-5
    )


SPLIT = {
    "classes": ("tp2", "pp2", "cp2"),
    "words": ("sp2", "cp2"),
    "rewards": ("pp2", "cp2"),
    "mean": ("sp2", "cp2"),
    "negatives": ("tp2", "cp2", "gathered"),
    "relevance": ("pp2", "cp2"),
    "ranking": ("sp2", "cp2"),
}


def all_layouts(root):
    return {
        (kind, name): run(root, kind, LAYOUTS[name], micro=2 if name == "gathered" else None)
        for kind, names in SPLIT.items()
        for name in names
    }


def test_two_processes(places, two_workers):
    wanted = {kind: alone(places, kind) for kind in SPLIT}
    for rank in two_workers.run(all_layouts, places):
        for (kind, name), steps in rank.items():
            for found, step in zip(steps, wanted[kind], strict=True):
                assert found == pytest.approx(step, rel=1e-5, abs=2e-6), (kind, name)


@pytest.mark.parametrize("kind", ["classes", "words", "mean"])
def test_a_resumed_run_is_the_same_and_its_export_loads(places, kind, tmp_path):
    straight = alone(places, kind, save=str(tmp_path / "straight"))
    alone(places, kind, save=str(tmp_path / "parts"), steps=2)
    assert alone(places, kind, save=str(tmp_path / "parts")) == straight[2:]
    bridge = AutoBridge.from_hf_pretrained(places / kind / "model")
    bridge.export_ckpt(tmp_path / "parts", tmp_path / "out", show_progress=False)
    model_class = getattr(transformers, KINDS[kind][0])
    _, info = model_class.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())


def convert(directory, output, name, layout, wanted):
    """The worst output of this rank against transformers', after which the model is exported."""
    bridge = AutoBridge.from_hf_pretrained(directory)
    provider = bridge.to_megatron_provider()
    for key, value in layout.items():
        setattr(provider, key, value)
    model = provider.provide_distributed_model(wrap_with_ddp=False)
    bridge.save_hf_pretrained(model, output, show_progress=False)
    if layout.get("pipeline_model_parallel_size"):
        return 0.0  # the losses of a run under pp2 are compared above
    with torch.no_grad():
        found = model[0](
            input_ids=ids_without_padding(), position_ids=tokens()[1], attention_mask=None
        )
    return ((as_transformers(found, wanted) - wanted).abs().max() / wanted.std()).item()


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("Qwen2ForSequenceClassification", LAYOUTS["sp2"]),
        ("Qwen2ForSequenceClassification", PP2),
        ("Qwen3ForTokenClassification", TP2),
        ("Qwen3Model", LAYOUTS["sp2"]),
        ("Qwen3MoeForSequenceClassification", {"expert_model_parallel_size": 2}),
    ],
)
def test_conversion_on_two_processes(two_workers, tmp_path, name, layout):
    wanted = expected(make(name, tmp_path / "hf"), ids_without_padding())
    assert (
        max(two_workers.run(convert, tmp_path / "hf", tmp_path / "out", name, layout, wanted))
        <= 1e-4
    )
    for file in (tmp_path / "hf").iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes(), file.name


def test_a_reranker_from_a_language_model_scores_batches_in_transformers(places, tmp_path):
    """The config of the export names the padding token, without which transformers scores one pair at a time."""
    base = tmp_path / "base"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=False)
    transformers.LlamaForCausalLM(config).save_pretrained(base)
    save_tokenizer(base, pad_token="end")
    settings = toy_config(
        model={"head": "sequence_classification", "num_labels": 1, "layernorm_epsilon": 1e-6},
        train={"train_iters": 2, "global_batch_size": len(LENGTHS), "micro_batch_size": 2},
        dataset=dataset("relevance", places / "relevance", False),
        tokenizer=TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(base)),
        validation=ValidationConfig(eval_iters=0),
        checkpoint=CheckpointConfig(pretrained_checkpoint=str(base), save=str(tmp_path / "run")),
    )
    try:
        finetune(settings, forward_step)
    finally:
        forget_model_parallel()
    leave()
    words = ["export", "--hf-model", str(base), "--megatron-path", str(tmp_path / "run")]
    assert main([*words, "--hf-path", str(tmp_path / "out")]) == 0
    leave()
    model, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(info.values())
    assert model.config.num_labels == 1
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    pairs = [(as_text(first), as_text(second)) for first, second in texts()]
    batch = tokenizer(pairs, padding=True, return_tensors="pt")
    with torch.no_grad():
        together = model(**batch).logits
        alone_scores = [model(**tokenizer(*pair, return_tensors="pt")).logits for pair in pairs]
    assert torch.allclose(together, torch.cat(alone_scores), atol=1e-5)


def test_adapters_and_a_new_head_on_a_language_model_are_loaded_by_peft(places, tmp_path):
    """The base has no such head: what is exported is the head that was trained."""
    peft = pytest.importorskip("peft")
    base = tmp_path / "base"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, pad_token_id=0, tie_word_embeddings=False)
    transformers.LlamaForCausalLM(config).save_pretrained(base)
    head = {"head": "sequence_classification", "num_labels": CLASSES}
    settings = toy_config(
        model={**head, "layernorm_epsilon": 1e-6},
        train={"train_iters": 2, "global_batch_size": len(LENGTHS), "micro_batch_size": 4},
        dataset=dataset("classes", places / "classes", False),
        optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.0),
        validation=ValidationConfig(eval_iters=0),
        checkpoint=CheckpointConfig(pretrained_checkpoint=str(base), save=str(tmp_path / "run")),
        peft=LoRA(dim=4, modules_to_save=["output_layer"]),
    )
    try:
        trained = finetune(settings, forward_step)
        trained.model[0].eval()
        ids = ids_without_padding()[:, :SEQUENCE].clamp(max=VOCABULARY - 1)
        positions = torch.arange(ids.size(1)).expand_as(ids)
        with torch.no_grad():
            found = trained.model[0](ids, positions, None)[:, -1]
    finally:
        forget_model_parallel()
    leave()
    folder = tmp_path / "adapter"
    words = ["adapter", "export", "--adapter", str(tmp_path / "run"), "--hf-path", str(folder)]
    assert main(words) == 0
    loaded = peft.AutoPeftModelForSequenceClassification.from_pretrained(
        folder, num_labels=CLASSES
    ).eval()
    with torch.no_grad():
        wanted = loaded(input_ids=ids).logits
    assert (found - wanted).abs().max() <= 1e-4 * wanted.std()
    leave()
