"""Hugging Face's Trainer with evenstep's steps, against the real library and tiny random models."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from evenstep.devices import Device
from evenstep.errors import ContractError, InputError, NonFiniteLossError
from grouping import grouped
from marks import slow
from reference import assert_same_bits


@pytest.fixture(autouse=True, scope="module")
def _libraries():
    """They are imported where their tests run: it takes seconds, and slows down all others."""
    global transformers, integration, EvenTrainer
    transformers = pytest.importorskip("transformers", reason="pip install evenstep[transformers]")
    pytest.importorskip("accelerate", reason="pip install evenstep[transformers]")
    from evenstep.integrations import transformers as integration
    from evenstep.integrations.transformers import EvenTrainer


WORDS, LENGTH, EXAMPLES = 23, 9, 28
BERT = {
    "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 16, "num_labels": 3,
}  # fmt: skip
GPT2 = {
    "vocab_size": WORDS, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA = {
    "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 48, "max_position_embeddings": 16,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS = {
    "classes": ("BertForSequenceClassification", "BertConfig", BERT),
    "hidden words": ("BertForMaskedLM", "BertConfig", BERT),
    "answers": ("BertForQuestionAnswering", "BertConfig", {**BERT, "num_labels": 2}),
    "next word": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "next word, counted": ("LlamaForCausalLM", "LlamaConfig", LLAMA),  # without the first
}
THREE = ["cpu:0", "cpu:1", "cpu:2"]


def make_model(task, dropout=0.1):
    torch.manual_seed(0)
    name, config, sizes = MODELS[task]
    model = getattr(transformers, name)(getattr(transformers, config)(**sizes))
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = dropout
    return model


def sentences(task):
    """Padded sentences; their labels are a class, or words of which some don't count."""
    draw = torch.Generator().manual_seed(1)
    rows = []
    for number in range(EXAMPLES):
        words = torch.randint(3, WORDS, (LENGTH,), generator=draw)
        mask = torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (1,), generator=draw)
        labels = words.where(mask, -100)
        if task == "classes":
            labels = int(words.sum() % 3)
        elif task == "hidden words":  # in every third sentence
            labels[2:] = -100
            labels[:] = labels if number % 3 == 0 else -100
        row = {"input_ids": words * mask, "attention_mask": mask.long(), "labels": labels}
        if task == "answers":  # every third one lies behind the sentence, and doesn't count
            start = int(words[0]) % LENGTH if number % 3 else LENGTH + number
            del row["labels"]
            row |= {"start_positions": start, "end_positions": start + (start < LENGTH - 1)}
        rows.append(row)
    return rows


def settings(folder, **changed):
    chosen = {
        "per_device_train_batch_size": 8,
        "num_train_epochs": 2,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    quiet = {"report_to": [], "disable_tqdm": True, "log_level": "error"}
    return transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, **quiet, **{**chosen, **changed}
    )


def in_parts(folder, parts, **changed):
    """Return settings for batches of 8, in `parts` micro-batches."""
    return settings(
        folder,
        per_device_train_batch_size=8 // parts,
        gradient_accumulation_steps=parts,
        **changed,
    )


def trained(kind, args, task="classes", *, model=None, resume=None, **options):
    given = {"train_dataset": sentences(task), **options}
    trainer = kind(model=make_model(task) if model is None else model, args=args, **given)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def curve(trainer):
    """Return the loss and the norm of the gradients of each update."""
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return torch.tensor([(log["loss"], log["grad_norm"]) for log in logs])


def assert_same_curve(folder, args, task, kind=None, plain=None, **options):
    """Train with evenstep and with transformers alone, without dropout, and compare the logs."""
    model = options.pop("make_model", lambda: make_model(task, dropout=0.0))
    even = options.pop("even", {})
    ours = curve(trained(kind or EvenTrainer, args, task, model=model(), **even, **options))
    theirs = curve(trained(plain or transformers.Trainer, args, task, model=model(), **options))
    assert len(ours) >= 3
    torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "parts"),
    [
        (task, parts)
        for task in MODELS
        for parts in (1, 4)
        if parts == 1 or task not in ("hidden words", "answers")
    ],  # or a micro-batch has no label
)
def test_one_result_on_any_devices(tmp_path, task, parts):
    one, two, three = (
        trained(EvenTrainer, in_parts(tmp_path, parts), task, devices=THREE[:count])
        for count in (1, 2, 3)
    )
    assert_same_bits(two.model.state_dict(), one.model.state_dict())
    assert_same_bits(three.model.state_dict(), one.model.state_dict())
    assert torch.equal(curve(one), curve(three))


def test_one_result_on_two_devices(tmp_path):
    args = settings(tmp_path, max_steps=2)
    one, two = (trained(EvenTrainer, args, devices=THREE[:count]) for count in (1, 2))
    assert_same_bits(two.model.state_dict(), one.model.state_dict())


ONE_EPOCH = {"num_train_epochs": 1, "optim": "sgd"}


@pytest.mark.slow
@pytest.mark.parametrize("task", ["classes", "next word", "next word, counted"])
@pytest.mark.parametrize("parts", [1, 4])
def test_the_curve_is_that_of_transformers(tmp_path, task, parts):
    assert_same_curve(tmp_path, in_parts(tmp_path, parts, **ONE_EPOCH, max_grad_norm=1.0), task)


@pytest.mark.slow
def test_a_mean_over_shifted_labels(tmp_path):
    """Models such as Qwen-VL say that they take no `num_items_in_batch`."""

    def make_llama():
        model = make_model("next word, counted")
        model.accepts_loss_kwargs = False
        return model

    args = settings(tmp_path, **ONE_EPOCH)
    assert_same_curve(tmp_path, args, "next word", make_model=make_llama)


@pytest.mark.parametrize(
    ("task", "shards"),
    [slow("answers", 8), slow("answers", 1), slow("answers", 3), slow("hidden words", 8)],
)
def test_shards_without_a_label_that_counts(tmp_path, task, shards):
    """BERT's loss is a mean over the words or answers that count, which many shards lack."""
    assert_same_curve(tmp_path, settings(tmp_path, **ONE_EPOCH), task, even={"shards": shards})


def test_answers_of_which_only_a_half_counts(tmp_path):
    """A mean over starts and one over ends have two counts, which no shard's loss shows."""
    rows = sentences("answers")
    rows[1]["end_positions"] = LENGTH
    args = settings(tmp_path, **ONE_EPOCH)
    with pytest.raises(InputError, match="start.*end.*shards=1"):
        trained(EvenTrainer, args, "answers", train_dataset=rows)
    assert_same_curve(tmp_path, args, "answers", even={"shards": 1}, train_dataset=rows)


@pytest.mark.slow
def test_a_micro_batch_without_a_label_that_counts(tmp_path):
    """Its loss is not a number: transformers alone would train on."""
    with pytest.raises(NonFiniteLossError):
        trained(EvenTrainer, in_parts(tmp_path, 4), "hidden words")


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2])
def test_label_smoothing(tmp_path, parts):
    args = in_parts(tmp_path, parts, num_train_epochs=1, optim="sgd", label_smoothing_factor=0.1)
    assert_same_curve(tmp_path, args, "next word")


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2])
def test_a_loss_function_of_the_users_own(tmp_path, parts):
    def of_next_words(outputs, labels, num_items_in_batch=None):
        scores = outputs["logits"][:, :-1].flatten(0, 1)
        return F.cross_entropy(scores, labels[:, 1:].flatten(), reduction="sum") / (
            num_items_in_batch
        )

    args = in_parts(tmp_path, parts, **ONE_EPOCH)
    assert_same_curve(tmp_path, args, "next word", compute_loss_func=of_next_words)


class Sentences(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(sentences("next word"))


CLASS_WEIGHT = torch.tensor([1.0, 2.0, 3.0])


def weighted(kind):
    """Return a class as transformers' documentation shows it, with weights of classes."""

    class Weighted(kind):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss_fct = nn.CrossEntropyLoss(weight=CLASS_WEIGHT)
            logits = outputs.logits.view(-1, self.model.config.num_labels)
            loss = loss_fct(logits, labels.view(-1))
            return (loss, outputs) if return_outputs else loss

    return Weighted


@pytest.mark.slow
def test_class_weights_in_compute_loss(tmp_path):
    class Counted(weighted(EvenTrainer)):
        def loss_count(self, inputs):
            return CLASS_WEIGHT[inputs["labels"]].sum()

    kinds = {"kind": Counted, "plain": weighted(transformers.Trainer)}
    assert_same_curve(tmp_path, settings(tmp_path), "classes", **kinds)
    one, two = (trained(Counted, settings(tmp_path), devices=devices) for devices in (1, 2))
    assert_same_bits(two.model.state_dict(), one.model.state_dict())


def test_class_weights_that_are_not_counted_are_refused(tmp_path):
    with pytest.raises(ContractError, match="does not add up") as refused:
        trained(weighted(EvenTrainer), settings(tmp_path), shards=2)
    assert "define loss_count(self, inputs)" in "".join(refused.value.__notes__)


@pytest.mark.slow
def test_micro_batches_left_at_the_end_of_a_stream(tmp_path):
    """28 sentences make 14 micro-batches of 2; transformers keeps the gradients of the last 2."""
    args = in_parts(tmp_path, 4, max_steps=6, optim="sgd")
    assert_same_curve(tmp_path, args, "next word", train_dataset=Sentences())


@pytest.mark.slow
def test_losses_that_transformers_adds_without_dividing(tmp_path, caplog):
    """BERT takes num_items_in_batch and does not divide by it."""

    class Mean(EvenTrainer):
        loss_is_scaled_for_ga = False

    class PlainMean(transformers.Trainer):
        loss_is_scaled_for_ga = False

    args = in_parts(tmp_path, 4, **ONE_EPOCH)
    assert_same_curve(tmp_path, args, "classes", kind=Mean, plain=PlainMean)
    assert "num_items_in_batch" not in caplog.text
    trained(EvenTrainer, in_parts(tmp_path, 4, max_steps=1))
    assert "the loss of BertForSequenceClassification is not wholly divided by" in caplog.text


class WithPenalty(nn.Module):
    """A loss of which a part is not divided by the number of items."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)

    def forward(self, input_ids, attention_mask, labels, num_items_in_batch=None, **kwargs):
        logits = self.head(self.embed(input_ids))
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        items = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return {"loss": total / items + 0.1 * logits.square().mean(), "logits": logits}


@pytest.mark.slow
def test_a_loss_that_is_divided_in_part(tmp_path):
    args = settings(tmp_path, **ONE_EPOCH)
    with pytest.raises(InputError, match="only a part of the loss of WithPenalty"):
        trained(EvenTrainer, args, "next word", model=WithPenalty())
    parts = in_parts(tmp_path, 2, **ONE_EPOCH)
    assert_same_curve(tmp_path, parts, "next word", make_model=WithPenalty)
    whole = {"make_model": WithPenalty, "even": {"shards": 1}}
    assert_same_curve(tmp_path, args, "next word", **whole)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 4])
def test_resumed_in_the_middle_on_other_devices(tmp_path, parts):
    class Stages(transformers.TrainerCallback):
        def __init__(self):
            self.seen = []

        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            self.seen.append(all(one.grad is not None for one in model.parameters()))

        def on_evaluate(self, args, state, control, metrics=None, **kwargs):
            self.seen.append(round(metrics["eval_loss"], 3) > 0)

    saving = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 2}
    evaluated = sentences("next word")[:5]
    whole = trained(EvenTrainer, in_parts(tmp_path / "whole", parts), "next word", devices="cpu:0")
    stages = Stages()
    saved = trained(
        EvenTrainer,
        in_parts(tmp_path / "saved", parts, **saving),
        "next word",
        eval_dataset=evaluated,
        callbacks=[stages],
        devices="cpu:0",
    )
    assert_same_bits(saved.model.state_dict(), whole.model.state_dict())
    assert len(stages.seen) == 8 + 4
    assert all(stages.seen)
    resumed = trained(
        EvenTrainer,
        in_parts(tmp_path / "resumed", parts),
        "next word",
        model=make_model("next word"),
        resume=str(tmp_path / "saved" / "checkpoint-3"),
        devices=THREE[:2],
    )
    assert resumed.state.global_step == 8
    assert_same_bits(resumed.model.state_dict(), whole.model.state_dict())
    assert_same_bits(
        resumed.optimizer.state_dict()["state"][0], whole.optimizer.state_dict()["state"][0]
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("parts", [1, 4])
def test_low_rank_adapters(tmp_path, parts):
    peft = pytest.importorskip("peft", reason="pip install peft")

    def adapted():
        config = peft.LoraConfig(
            r=2, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True
        )
        return peft.get_peft_model(make_model("next word"), config)

    one, two, three = (
        trained(
            EvenTrainer,
            in_parts(tmp_path, parts),
            "next word",
            model=adapted(),
            devices=THREE[:count],
        )
        for count in (1, 2, 3)
    )
    assert_same_bits(two.model.state_dict(), one.model.state_dict())
    assert_same_bits(three.model.state_dict(), one.model.state_dict())
    learned = [name for name, one in one.model.named_parameters() if one.requires_grad]
    assert learned
    assert all("lora" in name for name in learned)


@pytest.mark.parametrize(
    ("changed", "options", "line"),
    [
        ({"bf16": True}, {}, "precision"),
        ({"auto_find_batch_size": True}, {}, "auto_find_batch_size"),
        ({"gradient_accumulation_steps": 4}, {"shards": 8}, "leave shards out"),
        ({}, {"clip_norm": 1.0}, "clip_norm=1.0: use TrainingArguments"),
        ({"optim": "lomo"}, {}, "lomo"),
    ],
    ids=["bf16", "batch size", "shards", "options", "lomo"],
)
def test_what_does_not_fit_is_refused(tmp_path, changed, options, line):
    with pytest.raises(InputError, match=line):
        EvenTrainer(
            **grouped(model=make_model("classes"), args=settings(tmp_path, **changed), **options)
        )


def test_devices_of_another_kind_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(integration, "find_devices", lambda *args, **named: (Device("cuda", 0),))
    with pytest.raises(InputError, match="is cuda:0, but that of its training arguments is cpu"):
        EvenTrainer(model=make_model("classes"), args=settings(tmp_path))


@pytest.mark.slow
def test_a_line_says_what_is_missing():
    program = (
        "import sys; sys.modules['transformers'] = None; import evenstep.integrations.transformers"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "ImportError: evenstep.integrations.transformers needs transformers" in done.stderr


def test_a_checkpoint_of_another_experiment_is_refused(tmp_path):
    short = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trained(EvenTrainer, settings(tmp_path / "a", **short), shards=4, devices="cpu:0")
    saved = str(tmp_path / "a" / "checkpoint-1")
    longer = settings(tmp_path / "b", max_steps=2)
    with pytest.raises(
        InputError, match=r"checkpoint-1 was trained with shards=4, but EvenTrainer has shards=2: "
    ):
        trained(EvenTrainer, longer, resume=saved, shards=2, devices="cpu:0")
    resumed = trained(EvenTrainer, longer, resume=saved, shards=4, devices="cpu:0")
    assert resumed.state.global_step == 2
    noted = tmp_path / "a" / "checkpoint-1" / "evenstep.json"
    noted.write_text(noted.read_text()[:20])
    with pytest.raises(InputError, match=r"evenstep\.json is damaged: remove it"):
        trained(EvenTrainer, longer, resume=saved, shards=4, devices="cpu:0")


def test_a_checkpoint_of_transformers_is_gone_on_with_and_a_line_says_so(tmp_path, caplog):
    short = settings(tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    trained(transformers.Trainer, short)
    trained(EvenTrainer, settings(tmp_path, max_steps=2), resume=True, devices="cpu:0")
    assert f"{tmp_path}/checkpoint-1 was not saved by EvenTrainer" in caplog.text
