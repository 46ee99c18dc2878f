"""What a stranger may do to the folder of a model, and what every command that reads one must do: one line, and nothing else."""

from __future__ import annotations

import base64
import json
import math
import os
import pickle
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastweights.cli import main
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM

from ..evaluation.small import TEXT, save
from .hostile import NESTED, cut, limits, link, listing, pipe, set_keys, sparse, subfolder, tokens, write

EVIL = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n\n\nclass Evil:\n    pass\n"
COMMANDS: dict[str, list[str]] = {
    "generate": ["The", "--max-new-tokens", "3"],
    "evaluate": ["--on", "copy", "--lengths", "40", "--pairs", "2", "--symbols", "16", "--recall-examples", "1"],
    "convert": ["--to", "pgdn", "--output", "new"],
    "serve": [],
}
RUN_FILE = """
output = "new"
cache = "new-tokens"
[model]
path = "stranger"
[corpus]
paths = ["text.txt"]
"""


class RunsWhenLoaded:
    def __reduce__(self) -> Any:
        return exec, ("import pathlib; pathlib.Path('ran').touch()",)


def sparse_weights(folder: Path) -> None:
    """Weights of 137 GB, as the configuration says, in a file that takes no room."""
    set_keys("config.json", vocab_size=2**24, hidden_size=2**10, num_heads=8)(folder)
    with torch.device("meta"):
        shapes = {
            name: list(x.shape)
            for name, x in FastWeightsForCausalLM(FastWeightsConfig.from_pretrained(folder)).state_dict().items()
        }
    entries, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    written = json.dumps(entries).encode()
    header(len(written), written)(folder)
    assert end > 100e9
    os.truncate(folder / "model.safetensors", 8 + len(written) + end)


def weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    return harm


def index(target: str, **more: Any) -> Callable[[Path], None]:
    """Weights by an index that says they are in the file `target`."""

    def harm(folder: Path) -> None:
        names = list(load_file(folder / "model.safetensors"))
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        shutil.copy(folder / "model-00001-of-00001.safetensors", folder.parent / "outside.safetensors")
        content = {"metadata": {}, "weight_map": dict.fromkeys(names, target.format(folder=folder.parent)), **more}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))

    return harm


def pickled(name: str, write_pickle: Callable[[Any, Any], Any]) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        with (folder / name).open("wb") as file:
            write_pickle({"weight": RunsWhenLoaded()}, file)

    return harm


def header(length: int, content: bytes = b"{}") -> Callable[[Path], None]:
    return write("model.safetensors", struct.pack("<Q", length) + content)


def code(name: str, extra: Callable[[Path], None] | None = None, **values: Any) -> Callable[[Path], None]:
    """Settings that name code, and the code."""

    def harm(folder: Path) -> None:
        (folder / "evil.py").write_text(EVIL)
        set_keys(name, **values)(folder)
        if extra is not None:
            extra(folder)

    return harm


def steps(place: str, kind: str, list_name: str, *entries: dict[str, Any]) -> Callable[[Path], None]:
    """A tokenizer whose `place` is a sequence of these steps."""
    return tokens(lambda found: found.update({place: {"type": kind, list_name: list(entries)}}))


def deep(levels: int) -> str:
    return "[" * levels + "]" * levels


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


DOUBLE = replace({"String": "a"}, "aa")
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
# SentencePiece's table of characters: an index of no bytes, and one text.
LONG_MAP = base64.b64encode(bytes(4) + b"a" * 10_000 + b"\0").decode()
AROUND = {"id": "<|end|>", "ids": [0] * 1000, "tokens": ["<|end|>"] * 1000}
IMAGES = {"AutoImageProcessor": "evil.Evil"}
MODEL: dict[str, Callable[[Path], None]] = {
    "config cut": cut("config.json"),
    "config empty": write("config.json", ""),
    "config not UTF-8": write("config.json", b"\xff\xfe{\x00"),
    "config nested": write("config.json", NESTED),
    "config nested in a key": write("config.json", '{"model_type": "fastweights", "mixer": ' + NESTED),
    "config nested less": write("config.json", '{"model_type": "fastweights", "mixer": ' + "[" * 900 + "]" * 900 + "}"),
    "config a list": write("config.json", "[]"),
    "config huge": sparse("config.json"),
    "config a pipe": pipe("config.json"),
    "config a device": link("config.json", "/dev/zero"),
    "config a folder": subfolder("config.json"),
    "config links in a circle": link("config.json", "config.json"),
    "config links nowhere": link("config.json", "nowhere"),
    "config links to a secret": link("config.json", "/etc/passwd"),
    "another model": set_keys("config.json", model_type="gpt2"),
    "no model": set_keys("config.json", model_type=["fastweights"]),
    "a billion layers": set_keys("config.json", num_hidden_layers=10**9),
    "ten thousand layers": set_keys("config.json", num_hidden_layers=10**4),
    "ten thousand layers of which one has a weight": lambda folder: (
        set_keys("config.json", num_hidden_layers=10**4)(folder),
        weights(lambda found: found.update({"model.layers.9999.x": torch.zeros(1)}))(folder),
    ),
    "a billion heads": set_keys("config.json", num_heads=10**9),
    "a wide memory": set_keys("config.json", mixer={"name": "gdn", "head_dim": 10**9}),
    "a large vocabulary": set_keys("config.json", vocab_size=10**12),
    "a wide MLP": set_keys("config.json", intermediate_size=10**12),
    "negative layers": set_keys("config.json", num_hidden_layers=-1),
    "no heads": set_keys("config.json", num_heads=0),
    "a string for a number": set_keys("config.json", hidden_size="16"),
    "NaN": set_keys("config.json", norm_eps=float("nan")),
    "a number beyond floats": write("config.json", '{"model_type": "fastweights", "norm_eps": 1e999}'),
    "a number of many digits": write("config.json", '{"model_type": "fastweights", "hidden_size": ' + "9" * 5000 + "}"),
    "an unknown mixer": set_keys("config.json", mixer="\x1b[31mred\nlines"),
    "a dtype that is none": set_keys("config.json", dtype="pickle"),
    "labels": set_keys("config.json", id2label="x"),
    "another configuration file": set_keys("config.json", configuration_files=["config.4.0.0.json"]),
    "other weights": set_keys("config.json", transformers_weights="../outside.safetensors"),
    "code as the model": code("config.json", auto_map={"AutoModelForCausalLM": "evil.Evil", "AutoConfig": "evil.Evil"}),
    "code as attention": set_keys("config.json", attn_implementation="someone/kernels"),
    "a quantisation": set_keys("config.json", quantization_config={"quant_method": "gptq", "bits": 4}),
    "weights missing": lambda folder: (folder / "model.safetensors").unlink(),
    "weights cut": cut("model.safetensors"),
    "weights empty": write("model.safetensors", b""),
    "weights garbage": write("model.safetensors", bytes(range(256)) * 8),
    "weights a pipe": pipe("model.safetensors"),
    "weights a folder": subfolder("model.safetensors"),
    "weights link in a circle": link("model.safetensors", "model.safetensors"),
    "weights link nowhere": link("model.safetensors", "nowhere"),
    "a header longer than the file": header(10**6),
    "a header longer than memory": header(2**63 - 1),
    "a negative header": header(2**64 - 1),
    "a header of 20 MB": header(20 * 2**20, b"{" + b" " * (20 * 2**20 - 2) + b"}"),
    "weights of 137 GB that take no room": sparse_weights,
    "weights of a device": link("model.safetensors", "/dev/zero"),
    "an index that is a pipe": lambda folder: (
        (folder / "model.safetensors").unlink(),
        pipe("model.safetensors.index.json")(folder),
    ),
    "a billion labels": set_keys("config.json", num_labels=10**9),
    "a billion labels of a part": set_keys("config.json", text_config={"num_labels": 10**9}),
    "labels nested": write("config.json", f'{{"model_type": "fastweights", "id2label": {deep(500)}}}'),
    "a name of a megabyte": set_keys("config.json", mixer="x" * 10**6),
    "a key of a megabyte": set_keys("config.json", **{"x" * 10**6: 1, "mixer": "none"}),
    "a model type of a megabyte": set_keys("config.json", model_type="x" * 10**6),
    "a header nested": header(10**5, NESTED.encode()),
    "offsets outside": header(64, b'{"x": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}  '),
    "another shape": weights(lambda found: found.update({"lm_head.weight": torch.zeros(400, 15)})),
    "another shape of the embedding": weights(
        lambda found: found.update({"model.embed_tokens.weight": torch.zeros(9, 16)})
    ),
    "whole numbers": weights(lambda found: found.update({"lm_head.weight": torch.zeros(400, 16, dtype=torch.int64)})),
    "another name": weights(lambda found: found.update({"lm_heat.weight": found.pop("lm_head.weight")})),
    "a layer of 10^18": weights(lambda found: found.update({f"model.layers.{10**18}.x": torch.zeros(1)})),
    "extra tensors": weights(lambda found: found.update({"\x1b[2J\nextra": torch.zeros(1)})),
    "no tensors": weights(lambda found: found.clear()),
    "an index outside": index("../outside.safetensors"),
    "an index of an absolute path": index("{folder}/outside.safetensors"),
    "an index of a secret": index("../../../../../../../../etc/passwd"),
    "an index of a missing file": index("model-00002-of-00002.safetensors"),
    "an index of a pickle": index("pytorch_model.bin"),
    "an index of numbers": index("", weight_map={"lm_head.weight": 3}),
    "an index of nothing": index("", weight_map=[]),
    "an index without metadata": index("model-00001-of-00001.safetensors", metadata=None),
    "a pickle": pickled("pytorch_model.bin", torch.save),
    "a pickle named safetensors": pickled("model.safetensors", torch.save),
    "an old pickle named safetensors": pickled("model.safetensors", pickle.dump),
    "an adapter": set_keys("adapter_config.json", base_model_name_or_path="someone/else", peft_type="LORA"),
    "a distributed checkpoint": write("shard-00001-model-00001-of-00001.safetensors", b""),
    "generation settings cut": write("generation_config.json", "{"),
    "generation settings a pipe": pipe("generation_config.json"),
    "generation settings of a wrong kind": write("generation_config.json", '["eos_token_id"]'),
    "a hostile end of text": set_keys("generation_config.json", eos_token_id={"a": 1}),
}
TOKENIZER: dict[str, Callable[[Path], None]] = {
    "tokenizer code": code("tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]}),
    "tokenizer code of another place": code(
        "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "someone/else--evil.Evil"]}, tokenizer_class="Evil"
    ),
    "tokenizer code by a detour": code(
        "tokenizer_config.json",
        set_keys("preprocessor_config.json", auto_map=IMAGES),
        tokenizer_class="AutoImageProcessor",
    ),
    "no tokenizer class": set_keys("tokenizer_config.json", tokenizer_class="AutoModelForCausalLM"),
    "a tokenizer of tokenizers": set_keys("tokenizer_config.json", tokenizer_class="RagTokenizer"),
    "itself as tokenizer class": set_keys("tokenizer_config.json", tokenizer_class="AutoTokenizer"),
    "a number as tokenizer class": set_keys("tokenizer_config.json", tokenizer_class=3),
    "tokenizer cut": cut("tokenizer.json"),
    "tokenizer empty": write("tokenizer.json", "{}"),
    "tokenizer nested": write("tokenizer.json", NESTED),
    "tokenizer a pipe": pipe("tokenizer.json"),
    "tokenizer a folder": subfolder("tokenizer.json"),
    "tokenizer huge": sparse("tokenizer.json"),
    "tokenizer a device": link("tokenizer.json", "/dev/zero"),
    "tokenizer settings nested": write("tokenizer_config.json", '{"a": ' + deep(500) + "}"),
    "special tokens a pipe": pipe("special_tokens_map.json"),
    "34 doubling normalisers": steps("normalizer", "Sequence", "normalizers", *[DOUBLE] * 34),
    "doubling normalisers inside each other": steps(
        "normalizer", "Sequence", "normalizers", *[{"type": "Sequence", "normalizers": [DOUBLE] * 2}] * 17
    ),
    "a normaliser that writes a megabyte": steps(
        "normalizer", "Sequence", "normalizers", replace({"String": "a"}, "a" * 10**6)
    ),
    "normalisers that write between characters": steps(
        "normalizer", "Sequence", "normalizers", *[replace({"Regex": "x*"}, "a")] * 34
    ),
    "34 beginnings": steps("normalizer", "Sequence", "normalizers", *[{"type": "Prepend", "prepend": "aa"}] * 34),
    "a table that writes ten thousand characters": steps(
        "normalizer", "Sequence", "normalizers", {"type": "Precompiled", "precompiled_charsmap": LONG_MAP}
    ),
    "34 byte levels": steps("pre_tokenizer", "Sequence", "pretokenizers", *[BYTES] * 34),
    "34 doublings on the way back": steps("decoder", "Sequence", "decoders", *[DOUBLE] * 34),
    "ten thousand steps": steps("normalizer", "Sequence", "normalizers", *[{"type": "Lowercase"}] * 10**4),
    "a million tokens around a text": tokens(
        lambda found: found.update(
            post_processor={
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<|end|>", "type_id": 0}}] * 1000,
                "pair": [],
                "special_tokens": {"<|end|>": AROUND},
            }
        )
    ),
    "a token of a megabyte": tokens(lambda found: found["model"]["vocab"].update({"a" * 10**6: 399})),
    "a billion extra tokens": set_keys("tokenizer_config.json", tokenizer_class="T5Tokenizer", extra_ids=10**9),
    "tokenizer settings garbage": write("tokenizer_config.json", b"\x00" * 100),
    "tokenizer settings a list": write("tokenizer_config.json", "[1]"),
    "tokenizer settings a pipe": pipe("tokenizer_config.json"),
    "other tokenizer files": set_keys("tokenizer_config.json", fast_tokenizer_files=["../../tokenizer.json"]),
    "added tokens of a wrong kind": set_keys("tokenizer_config.json", added_tokens_decoder={"0": 3}),
    "a template that is a pipe": pipe("chat_template.jinja"),
    "more tokens than the model": tokens(lambda found: found["model"]["vocab"].update({"more": 400})),
    "an enormous token": tokens(lambda found: found["model"]["vocab"].update({"more": 2**32 - 1})),
    "a negative token": tokens(lambda found: found["model"]["vocab"].update({"more": -1})),
    "no tokens": lambda folder: (
        tokens(lambda found: (found["model"].update(vocab={}, merges=[]), found.update(added_tokens=[])))(folder),
        write("tokenizer_config.json", "{}")(folder),
    ),
    "merges of unknown tokens": tokens(lambda found: found["model"].update(merges=[["?!?", "!?!"]])),
    "an unknown kind of tokenizer": tokens(lambda found: found["model"].update(type="Evil")),
    "a regular expression that is none": tokens(
        lambda found: found.update(
            pre_tokenizer={"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated", "invert": False}
        )
    ),
}
RUN: dict[str, Callable[[Path], None]] = {
    "run.json cut": write("run.json", "{"),
    "run.json nested": write("run.json", NESTED),
    "run.json a pipe": pipe("run.json"),
    "run.json a device": link("run.json", "/dev/zero"),
    "run.json a folder": subfolder("run.json"),
    "run.json of a device": write("run.json", '{"corpus": {"paths": ["/dev/zero"]}, "model": {}}'),
    "run.json of a megabyte": lambda folder: write(
        "run.json", json.dumps({"corpus": {"paths": ["x" * 10**6]}, "model": {}})
    )(folder),
    "run.json of a pipe": lambda folder: (
        os.mkfifo(folder / "text.txt"),
        write("run.json", json.dumps({"corpus": {"paths": [str(folder / "text.txt")]}, "model": {}}))(folder),
    ),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("whole") / "model")


@pytest.fixture
def place(whole, tmp_path, monkeypatch) -> Path:
    """The current folder, with the stranger's folder and a text."""
    shutil.copytree(whole, tmp_path / "stranger")
    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def within_limits() -> Iterator[None]:
    with limits():
        yield


# What every command meets in the fast set. One command meets all.
FEW = ("config cut", "weights cut", "code as the model", "tokenizer cut", "tokenizer code", "run.json cut")
DEAR = ("ten thousand layers", "ten thousand layers of which one has a weight")  # a second each


def cases(commands: str, *groups: dict[str, Any], every: str = "") -> list[Any]:
    """every: the command that meets all of these in the fast set."""
    return [
        pytest.param(
            command,
            harm,
            marks=() if (command == every and name not in DEAR) or name in FEW else pytest.mark.slow,
            id=f"{command}-{name}",
        )
        for group in groups
        for name, harm in group.items()
        for command in commands.split()
    ]


def check_one_line(
    place: Path, capfd: pytest.CaptureFixture[str], command: str, harm: Callable[[Path], None], options: Sequence[str]
) -> None:
    """The command ends with one line that says which file it is; nothing is run and nothing written."""
    harm(place / "stranger")
    options = ["stranger", *options]
    if command == "train":
        (place / "run.toml").write_text(RUN_FILE)
        options = ["run.toml"]
    elif command == "evaluate" and harm not in RUN.values():
        options += ["--text", "text.txt"]
    elif command == "evaluate":
        options = ["stranger", "--lengths", "40"]
    before = listing(place)
    capfd.readouterr()
    code = main([command, *options])
    printed = capfd.readouterr()
    assert code in (1, 2), printed
    assert printed.out == "" and printed.err.startswith("fastweights: error: ") and printed.err.count("\n") == 1, (
        printed
    )
    assert printed.err.rstrip("\n").isprintable() and len(printed.err) < 2000, printed.err
    assert "stranger" in printed.err, printed.err  # which file it is
    assert listing(place) == before
