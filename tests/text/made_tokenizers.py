"""Tokenizers that are small enough to know every id of, and shorthands for texts and ids."""

from __future__ import annotations

import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from glu_probe.text.documents import Document
from glu_probe.text.texts import read_texts

WORDS = [f"w{i}" for i in range(40)]


def word_tokenizer(*, template: str | None = None, eos: bool = True) -> PreTrainedTokenizerFast:
    """One token a word: <unk> 0, <s> 1, </s> 2, <g> 3, w0 4, w1 5, ...; `template` is what goes around a text."""
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", "<g>", *WORDS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if template:
        special = [(word, vocabulary[word]) for word in ("<s>", "</s>", "<g>")]
        inner.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    ends = {"eos_token": "</s>"} if eos else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", unk_token="<unk>", additional_special_tokens=["<g>"],
        model_max_length=8, **ends,
    )  # fmt: skip


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of 300 tokens, no special ones."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    inner.train_from_iterator([read_texts()[0].text[:4000]], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner)


PLAIN, WITH_BOS = word_tokenizer(), word_tokenizer(template="<s> $A")


def text_of(*numbers: int) -> str:
    return " ".join(f"w{n}" for n in numbers)


def docs(*texts: str) -> list[Document]:
    return read_texts(list(texts))


def ids_of(tokens) -> list[list[int]]:
    return [ids.tolist() for ids in tokens.sequences]


def gguf_with_tokenizer(path):
    """A GGUF file with a byte-level BPE vocabulary and one tensor."""
    import gguf
    import numpy as np

    inner = json.loads(byte_tokenizer().backend_tokenizer.to_str())["model"]
    tokens = [*inner["vocab"], "<bos>", "<eos>"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * (len(tokens) - 2) + [gguf.TokenType.CONTROL] * 2)
    writer.add_token_merges([" ".join(pair) for pair in inner["merges"]])
    writer.add_bos_token_id(len(tokens) - 2)
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_add_bos_token(True)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
