"""Text for language models: files or a dataset, tokenizers, token shards on disk, rows packed for training."""

from .corpus import Document, TextCorpus, TextSource, pytorch_source
from .packing import PackedRows, pack_rows
from .preparation import PreparedText, prepare_text
from .shards import TokenShards
from .tokenizer import TextTokenizer

__all__ = [
    "Document",
    "PackedRows",
    "PreparedText",
    "TextCorpus",
    "TextSource",
    "TextTokenizer",
    "TokenShards",
    "pack_rows",
    "prepare_text",
    "pytorch_source",
]
