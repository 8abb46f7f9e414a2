"""A tokenizer of made-up words, for trainers that want one."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def save_tokenizer(folder: Path, words: int) -> None:
    """Write the files of a tokenizer with that many tokens into the folder of a model, as `hf_models` makes it."""
    table = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **{f"w{number}": number for number in range(4, words)}}
    tokenizer = Tokenizer(models.WordLevel(table, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
