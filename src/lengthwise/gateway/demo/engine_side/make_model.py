"""Make a Llama with random weights and a tokenizer, in the engine's environment: python make_model.py FOLDER [SIZE]."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import Any

# mypy: ignore-errors


VOCAB, POSITIONS = 8192, 2048
SPECIAL = ("<pad>", "<s>", "</s>")
SIZES = {  # hidden, intermediate, layers, heads, KV heads of 64: millions of parameters
    "tiny": (256, 688, 4, 4, 2),  # 5
    "small": (512, 1376, 8, 8, 4),  # 27
    "medium": (768, 2048, 12, 12, 6),  # 84
    "large": (1024, 2816, 20, 16, 8),  # 244
}


def tokenizer() -> Any:
    """Return a byte-level BPE tokenizer that is trained on files of the standard library."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:40]
    bpe.train([str(source) for source in sources], trainer)
    pad, bos, eos = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=pad, bos_token=bos, eos_token=eos, model_max_length=POSITIONS
    )


def model(size: str) -> Any:
    """Return a Llama with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    hidden, intermediate, layers, heads, kv_heads = SIZES[size]
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=64, max_position_embeddings=POSITIONS,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=True, dtype="float32",
    )  # fmt: skip
    return LlamaForCausalLM(config)


if __name__ == "__main__":
    model(sys.argv[2] if len(sys.argv) > 2 else "tiny").save_pretrained(sys.argv[1])
    tokenizer().save_pretrained(sys.argv[1])
