"""A Llama of random weights with a tokenizer of its own: python make_model.py FOLDER SIZE."""

import argparse
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB = 8192
SPECIAL = ("<pad>", "<s>", "</s>")
FILES = 40
POSITIONS = 2048
SIZES = {  # hidden, intermediate, layers, heads, KV heads of 64: millions of parameters
    "tiny": (256, 688, 4, 4, 2),  # 5
    "small": (512, 1376, 8, 8, 4),  # 27
    "medium": (768, 2048, 12, 12, 6),  # 84
    "large": (1024, 2816, 20, 16, 8),  # 244
}


def tokenizer():
    """Byte-level BPE, trained on files of the standard library."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:FILES]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train([str(source) for source in sources], trainer)
    pad, begin, end = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=pad, bos_token=begin, eos_token=end, model_max_length=POSITIONS
    )


def model(size):
    """Weights as they are drawn: what it says is noise, how it is served is not."""
    torch.manual_seed(0)
    hidden, intermediate, layers, heads, kv_heads = SIZES[size]
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("size", choices=SIZES)
    given = parser.parse_args()
    tokenizer().save_pretrained(given.folder)
    model(given.size).save_pretrained(given.folder)
