"""A Llama of 5 million random weights with a tokenizer of its own: python tiny_model.py FOLDER."""

import sys
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB = 4096
SPECIAL = ["<pad>", "<s>", "</s>"]
FILES = 40
POSITIONS = 2048


def tokenizer():
    """Byte-level BPE, trained on files of the standard library."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:FILES]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train([str(source) for source in sources], trainer)
    pad, begin, end = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=pad, bos_token=begin, eos_token=end, model_max_length=POSITIONS
    )


def model():
    """Weights as they are drawn: what it says is noise, how it is served is not."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=POSITIONS,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
        dtype="float32",
    )
    return LlamaForCausalLM(config)


if __name__ == "__main__":
    folder = sys.argv[1]
    tokenizer().save_pretrained(folder)
    model().save_pretrained(folder)
