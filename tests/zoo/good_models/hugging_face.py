"""Tiny models of Hugging Face's transformers with random weights."""

import pytest
import torch
import torch.nn.functional as F

from good_models.recipe import ADAMW, Recipe, images, labelled_tokens

WORDS = 23


def pretrained(name, config, **sizes):
    """Return what makes the model `name` of transformers from a config with these sizes."""

    def make_model():
        transformers = pytest.importorskip("transformers")
        return getattr(transformers, name)(getattr(transformers, config)(**sizes)).train()

    return make_model


def cross_entropy(logits, labels):
    """Return the sum over the labels that are not -100, and their number."""
    total = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")
    return total, (labels != -100).sum()


def sentences(n, length=9):
    """Padded words, and a mask of those that are not padding."""
    mask = torch.arange(length) < torch.randint(length // 2, length + 1, (n, 1))
    return {
        "input_ids": torch.randint(3, WORDS, (n, length)).where(mask, 0),
        "attention_mask": mask.long(),
    }


def some_hidden(n):
    batch = sentences(n)
    is_hidden = batch["attention_mask"].bool() & (torch.rand(batch["input_ids"].shape) < 0.4)
    labels = batch["input_ids"].where(is_hidden, -100)
    return ({**batch, "input_ids": batch["input_ids"].masked_fill(is_hidden, 1), "labels": labels},)


def hidden_words(model, batch):
    labels = batch.pop("labels")
    return cross_entropy(model(**batch).logits, labels)


def next_word(model, batch):
    labels = batch["input_ids"].where(batch["attention_mask"].bool(), -100)
    return cross_entropy(model(**batch).logits[:, :-1], labels[:, 1:])


def pairs_of_sentences(n):
    target = sentences(n, 7)
    labels = target["input_ids"].where(target["attention_mask"].bool(), -100)
    return ({**sentences(n), "labels": labels},)


def translation(model, batch):
    return cross_entropy(model(**batch).logits, batch["labels"])


def transcription(model, features, labels):
    return cross_entropy(model(input_features=features, labels=labels).logits, labels)


def spoken(n):
    return torch.randn(n, 8, 32), torch.randint(3, WORDS, (n, 6))


def classification(model, words, labels):
    return cross_entropy(model(input_ids=words).logits, labels)


def image_classification(model, X, labels):
    return model(pixel_values=X, labels=labels).loss * len(X), len(X)


def hidden_patches(model, X, labels):
    return model(pixel_values=X).loss * len(X), len(X)


def sounds(n):
    return torch.randn(n, 400), torch.randint(1, 7, (n, 2))


def ctc(model, sound, labels):
    scores = model(input_values=sound).logits.log_softmax(-1)
    steps = torch.full((len(scores),), scores.shape[1])
    lengths = torch.full((len(scores),), labels.shape[1])
    total = F.ctc_loss(scores.transpose(0, 1), labels, steps, lengths, reduction="sum")
    return total, lengths.sum()


def sentence_batch(n):
    return (sentences(n),)


ENCODER = {
    "vocab_size": WORDS, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 12, "max_position_embeddings": 16,
}  # fmt: skip
DECODER = {**ENCODER, "num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2}
PATCHES = {
    "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12,
    "image_size": 8, "patch_size": 2, "num_channels": 3,
}  # fmt: skip
SEQ2SEQ = {
    "vocab_size": WORDS, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 12,
    "decoder_ffn_dim": 12, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1,
}  # fmt: skip

HUGGING_FACE = {
    "BERT": Recipe(
        pretrained("BertForMaskedLM", "BertConfig", **ENCODER), some_hidden,
        objective=hidden_words, make_optimizer=ADAMW),
    "RoBERTa": Recipe(
        pretrained("RobertaForSequenceClassification", "RobertaConfig", **ENCODER, num_labels=5),
        labelled_tokens(), objective=classification, make_optimizer=ADAMW),
    "DistilBERT": Recipe(
        pretrained("DistilBertForSequenceClassification", "DistilBertConfig", vocab_size=WORDS,
                   dim=8, n_layers=2, n_heads=2, hidden_dim=12, num_labels=5),
        labelled_tokens(), objective=classification, make_optimizer=ADAMW),
    "DeBERTa": Recipe(
        pretrained("DebertaV2ForMaskedLM", "DebertaV2Config", **ENCODER, relative_attention=True,
                   pos_att_type=["p2c", "c2p"]),
        some_hidden, objective=hidden_words, make_optimizer=ADAMW),
    "GPT-2": Recipe(
        pretrained("GPT2LMHeadModel", "GPT2Config", vocab_size=WORDS, n_embd=8, n_layer=2,
                   n_head=2, n_positions=16, bos_token_id=1, eos_token_id=2),
        sentence_batch, objective=next_word, make_optimizer=ADAMW),
    "Llama": Recipe(
        pretrained("LlamaForCausalLM", "LlamaConfig", **DECODER), sentence_batch,
        objective=next_word, make_optimizer=ADAMW),
    "Qwen2": Recipe(
        pretrained("Qwen2ForCausalLM", "Qwen2Config", **DECODER, tie_word_embeddings=True),
        sentence_batch, objective=next_word, make_optimizer=ADAMW),
    "Gemma 2": Recipe(
        pretrained("Gemma2ForCausalLM", "Gemma2Config", **DECODER, head_dim=4, sliding_window=4),
        sentence_batch, objective=next_word, make_optimizer=ADAMW),
    "Mixtral": Recipe(
        pretrained("MixtralForCausalLM", "MixtralConfig", **DECODER, num_local_experts=4),
        sentence_batch, objective=next_word, make_optimizer=ADAMW),
    "Mamba": Recipe(
        pretrained("MambaForCausalLM", "MambaConfig", vocab_size=WORDS, hidden_size=8,
                   num_hidden_layers=2, state_size=4, use_mambapy=False),
        sentence_batch, objective=next_word, make_optimizer=ADAMW),
    "T5": Recipe(
        pretrained("T5ForConditionalGeneration", "T5Config", vocab_size=WORDS, d_model=8, d_kv=4,
                   d_ff=12, num_layers=2, num_heads=2, decoder_start_token_id=0),
        pairs_of_sentences, objective=translation, make_optimizer=ADAMW),
    "BART": Recipe(
        pretrained("BartForConditionalGeneration", "BartConfig", **SEQ2SEQ,
                   max_position_embeddings=16, forced_eos_token_id=2, encoder_layerdrop=0.3),
        pairs_of_sentences, objective=translation, make_optimizer=ADAMW),
    "Whisper": Recipe(
        pretrained("WhisperForConditionalGeneration", "WhisperConfig", **SEQ2SEQ, num_mel_bins=8,
                   max_source_positions=16, max_target_positions=16, apply_spec_augment=False),
        spoken, objective=transcription, make_optimizer=ADAMW),
    "Wav2Vec2": Recipe(
        pretrained("Wav2Vec2ForCTC", "Wav2Vec2Config", vocab_size=7, hidden_size=8,
                   num_hidden_layers=2, num_attention_heads=2, intermediate_size=12,
                   conv_dim=[4, 4], conv_kernel=[10, 3], conv_stride=[5, 2],
                   num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
                   apply_spec_augment=False),
        sounds, objective=ctc, make_optimizer=ADAMW),
    "ViT": Recipe(
        pretrained("ViTForImageClassification", "ViTConfig", **PATCHES, num_labels=5), images(3),
        objective=image_classification, make_optimizer=ADAMW),
    "ViT-MAE": Recipe(
        pretrained("ViTMAEForPreTraining", "ViTMAEConfig", **PATCHES, decoder_hidden_size=8,
                   decoder_num_hidden_layers=1, decoder_num_attention_heads=2,
                   decoder_intermediate_size=12),
        images(3), objective=hidden_patches, make_optimizer=ADAMW),
    "ConvNeXt": Recipe(
        pretrained("ConvNextForImageClassification", "ConvNextConfig", patch_size=2,
                   num_channels=3, num_stages=2, hidden_sizes=[4, 8], depths=[1, 1],
                   drop_path_rate=0.2, num_labels=5),
        images(3), objective=image_classification, make_optimizer=ADAMW),
}  # fmt: skip
