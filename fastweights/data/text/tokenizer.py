"""Tokenizers: any of Hugging Face's from a file or folder, or a byte-level BPE trained on the corpus."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...checks import check_flag, check_positive, check_size, check_text, check_unicode, describe_value
from ...untrusted import AsksForCode, check_folder, one_line, read_json_object
from .tokenizer_file import check_tokenizer_file

__all__ = ["END_OF_TEXT", "TextTokenizer", "fingerprint", "load_tokenizer", "vocabulary_size"]

END_OF_TEXT = "<|endoftext|>"
PADDING_SIDE = "left"  # transformers' generate() continues a prompt after its last column
SMALLEST_VOCABULARY = 257  # the bytes and the end of text
LARGEST_VOCABULARY = 2**20  # of a tokenizer that is trained; those in use have up to a quarter of it
MOST_PROCESSES = 1024
LONGEST_RUN = 4096
# What a tokenizer may consist of; config.json names its class in some repositories.
HUB_FILES = (
    *("tokenizer*", "config.json", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model"),
    *("chat_template*", "additional_chat_templates/*"),
)
LONG_RUN = re.compile(rf"\S{{{LONGEST_RUN}}}|\s{{{LONGEST_RUN}}}")


@dataclass(frozen=True, kw_only=True)
class TextTokenizer:
    """Which tokenizer a run uses.

    Attributes:
        path: a folder with a Hugging Face tokenizer, or a tokenizer.json.
        name: in place of path a repository of the Hugging Face hub, of which only the files of the tokenizer are fetched. Without
            path and name one is trained on the corpus.
        revision: branch, tag or commit of that repository; None for its main branch.
        vocab_size: of a tokenizer that is trained, at least 257.
        sample_megabytes: how much train text, in million characters, it is trained on.
        trust_remote_code: whether to run code that the folder at `path` holds or names (`auto_map`). Such a folder is refused
            otherwise. Set it only for code that you have read.
        processes: how many processes tokenize a corpus that is not streamed. One uses all cores with most tokenizers; several
            are faster with very many cores, and with a tokenizer that is written in Python.

    Raises:
        ValueError: a value that does not fit.
        TypeError: a value of a wrong kind.
    """

    path: str | None = None
    # The tokenizer that is trained does not depend on fields without repr.
    name: str | None = field(default=None, repr=False)
    revision: str | None = field(default=None, repr=False)
    vocab_size: int = 8192
    sample_megabytes: float = 10.0
    trust_remote_code: bool = field(default=False, repr=False)
    processes: int = field(default=1, repr=False)

    def __post_init__(self) -> None:
        if self.path is not None:
            check_text("tokenizer path", self.path)
        for key in ("name", "revision"):
            if getattr(self, key) is not None:
                check_text(f"tokenizer {key}", getattr(self, key), empty=False)
        if self.name is not None and self.path is not None:
            raise ValueError(f"tokenizer name must be None where path is given, got {self.name!r}; choose one of them")
        if self.revision is not None and self.name is None:
            raise ValueError(
                f"tokenizer revision must be None without a name, whose it is, got {describe_value(self.revision)}"
            )
        if check_size("tokenizer vocab_size", self.vocab_size, high=LARGEST_VOCABULARY) < SMALLEST_VOCABULARY:
            raise ValueError(
                f"tokenizer vocab_size must be at least {SMALLEST_VOCABULARY}, the bytes and {END_OF_TEXT}, got {self.vocab_size}"
            )
        check_positive("sample_megabytes", self.sample_megabytes)
        check_flag("tokenizer trust_remote_code", self.trust_remote_code)
        check_size("tokenizer processes", self.processes, high=MOST_PROCESSES)

    @property
    def exists(self) -> bool:
        """Whether it is one that exists, and none to be trained."""
        return self.path is not None or self.name is not None

    def record(self) -> dict[str, Any]:
        """What a run folder keeps of it: a name where there is one. The hash of the tokenizer says the rest."""
        kept = {"path": self.path, "vocab_size": self.vocab_size, "sample_megabytes": self.sample_megabytes}
        return kept if self.name is None else {**kept, "name": self.name}

    def load(self) -> Any:
        """The tokenizer at `path` or of `name`.

        Raises:
            ValueError: there is none, or it cannot be read.
        """
        from transformers import PreTrainedTokenizerFast

        if not self.exists:
            raise ValueError("tokenizer path must be given to load one, got None; train() makes one from texts")
        path = Path(self.path) if self.path is not None else self._fetch()
        if not path.exists():
            raise ValueError(
                f"tokenizer path {path} does not exist; pass a tokenizer.json or the folder of a tokenizer"
            )
        if path.name == "tokenizer.json" and path.with_name("tokenizer_config.json").is_file():
            path = path.parent  # which says what the special tokens are
        try:
            if path.is_dir():
                return load_tokenizer(path, trust_remote_code=self.trust_remote_code)
            check_tokenizer_file(read_json_object(path))
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path), padding_side=PADDING_SIDE)
        except AsksForCode as error:
            raise ValueError(
                f"{error}; or set trust_remote_code = true in [tokenizer], if you have read and trust that code"
            ) from None
        except Exception as error:  # transformers and the tokenizers library raise errors of many kinds here
            raise ValueError(f"tokenizer path {path} holds no Hugging Face tokenizer: {one_line(error)}") from None
        if END_OF_TEXT in tokenizer.get_vocab():
            tokenizer.eos_token = tokenizer.pad_token = END_OF_TEXT
        return tokenizer

    def _fetch(self) -> Path:
        """The folder of the cache of the hub with the files of the tokenizer."""
        from huggingface_hub import snapshot_download

        code = ["*.py"] if self.trust_remote_code else []
        try:
            return Path(snapshot_download(str(self.name), revision=self.revision, allow_patterns=[*HUB_FILES, *code]))
        except Exception as error:  # for a wrong name, a missing network and no right to read it
            raise ValueError(
                f"tokenizer name {self.name!r} (revision {self.revision!r}) cannot be fetched: {one_line(error)}; check the name "
                "and the network, or set path to a folder"
            ) from None

    def train(self, texts: Iterable[str]) -> Any:
        """A byte-level BPE, the same for the same texts. It encodes every string, and decoding returns the same string. It pads
        on the left, as generate() expects it.

        Raises:
            ValueError: no text, or one that UTF-8 cannot write.
            TypeError: texts that are no strings.
        """
        if isinstance(texts, str) or not isinstance(texts, Iterable):
            raise TypeError(f"texts must be several strings, got {describe_value(texts)}; pass a list of them")
        texts = (check_unicode("texts", text) for text in texts)
        first = next(texts, None)
        if first is None:
            raise ValueError("texts must hold at least one text to train a tokenizer on, got none")
        texts = itertools.chain([first], texts)
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import PreTrainedTokenizerFast

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(_first(texts, self.sample_megabytes * 1e6), trainer)
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            eos_token=END_OF_TEXT,
            pad_token=END_OF_TEXT,
            padding_side=PADDING_SIDE,
            clean_up_tokenization_spaces=False,
        )


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer in a folder. A folder that asks for code to be run is refused, unless `trust_remote_code` says to run it.

    Raises:
        ValueError: the folder asks for code, or cannot be read safely (see `check_folder` and `check_tokenizer_file`); or it
            names no tokenizer class.
        Exception: of any kind, where transformers cannot load the tokenizer.
    """
    from transformers import AutoTokenizer

    check_folder(folder, trust_remote_code=trust_remote_code)
    if (folder / "tokenizer.json").is_file():
        check_tokenizer_file(read_json_object(folder / "tokenizer.json"))
    for name in ("tokenizer_config.json", "config.json"):
        if (folder / name).is_file():
            _check_class(folder / name, read_json_object(folder / name).get("tokenizer_class"))
    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trust_remote_code)
    if not tokenizer.get_vocab():
        raise ValueError("it has no tokens")
    if not (folder / "tokenizer.json").is_file() and getattr(tokenizer, "backend_tokenizer", None) is not None:
        check_tokenizer_file(json.loads(tokenizer.backend_tokenizer.to_str()))  # made of files of another format
    return tokenizer


def _check_class(path: Path, name: object) -> None:
    """ValueError unless `name`, which a file gives as tokenizer_class, is a tokenizer or unknown to transformers.

    transformers takes any class of its own there. Some of these load code in turn, and ask whether to run it.
    """
    import transformers

    if name is not None and not isinstance(name, str):
        raise ValueError(f"{path} must name a class as tokenizer_class, got {describe_value(name)}")
    found = getattr(transformers, name or "", None)
    missing_package = isinstance(
        found, transformers.utils.DummyObject
    )  # transformers' stand-in, which says what to install
    if found is None or missing_package:
        return
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedTokenizerBase)):
        raise ValueError(f"{path} must name a tokenizer as tokenizer_class, got {name!r}")


def _first(texts: Iterable[str], characters: float) -> Iterator[str]:
    """The first texts, up to `characters`. Very long runs come in pieces: the time to learn a run grows with its square."""
    for text in texts:
        length = LONGEST_RUN if LONG_RUN.search(text) else len(text)
        yield from (text[start : start + length] for start in range(0, len(text), length or 1))
        characters -= len(text)
        if characters <= 0:
            return


def vocabulary_size(tokenizer: Any) -> int:
    """How many embeddings a model needs: more than there are tokens where the ids have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def fingerprint(tokenizer: Any) -> str:
    """A hash that changes whenever the tokens of a text may change."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(f"{content} {tokenizer.eos_token_id}".encode()).hexdigest()
