"""Compile kernels for Hopper on a machine without a GPU, so that a rented GPU does not wait for them.

Commands, each `python -m fastweights_studies.measure.compile_ahead --into runs/kernels` with these options:
    --ops gka,rls --sizes 4,2048,8,128,128
    --training "24 layers of vla" --decoding rls,vla --claims C24,C25
    --leaderboard mqar,language --mixers gdn,vla
    --leaderboard recall --mixers gdn,kda --column "mqar-shuffled, heads of 32"
    --leaderboard language-proxies --mixers gdn,lattice:objective=similarity@lattice-similarity
    --students gdn,gka
    --tests tests/gpu/test_large_tensors.py

On the machine with the GPU, after the folder was copied there:

    export TRITON_CACHE_DIR=$PWD/runs/kernels
    python -m fastweights_studies.measure.compile_ahead --place
    python -m fastweights_studies.measure.kernels --no-peers --only gka,rls --sizes 4,2048,8,128,128

Ops are those of kernels.py, with initial states and without. Training and decoding take the comparisons of training_steps.py and
the batches of decode_table.py, with one layer of every kind of mixer but softmax attention. Claims are those that train models.
The leaderboard is compiled for its full size, one process per mixer. Of language models in one block these are a training step
and the reading of test text and prompts, for which a little text of the Python installation stands. Students are those of
linearization.py, by their memories.
All run on the CPU as if their tensors were on a GPU: kernels are compiled and not run. Matrix products around the kernels of a
model are skipped. Tests are those that need a GPU, as files or tests that pytest takes, one process per name; see tests_ahead.py.

Triton finds a compiled kernel by a hash of its source, options, versions and some environment variables: set the same ones, such
as TRITON_DISABLE_LINE_INFO, on both machines. The hash also has a fingerprint of Triton's own files, which differs from one
version of Python to another: --place renames what was compiled by the same version of Triton.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest import mock

from fastweights_studies.places import ROOT

sys.path.insert(0, str(ROOT))  # for the described GPU of the tests

HOPPER = 90
NOTES = "compiled-ahead"  # files <NOTES>-<process>.jsonl in the cache folder


class Noted(NamedTuple):
    """What Triton's cache key of a compiled kernel is made of, after the kernel's name and Triton's version."""

    kernel: str
    triton: str
    fingerprint: str
    source: str
    backend: str
    options: str
    environment: str

    def place(self, fingerprint: str, backend: str) -> str:
        """The name of the kernel's folder in the cache of a Triton with this fingerprint and backend."""
        from triton.runtime.cache import _base32

        text = "-".join((fingerprint, self.source, backend, self.options, self.environment))
        return str(_base32(hashlib.sha256(text.encode()).hexdigest()))


def own_backend() -> str:
    """The hash of Triton's backend for Hopper."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    return str(make_backend(GPUTarget("cuda", HOPPER, 32)).hash())


@contextmanager
def compiling_only() -> Iterator[None]:
    """Inside, tensors of the CPU take the kernels, which are compiled and noted."""
    import triton
    from triton.compiler import compiler
    from triton.runtime import cache

    from fastweights_studies.measure.without_gpu import tensors_as_on_gpu
    from tests.kernels.described_gpu import described_gpu

    own_backend()  # before our own ptxas becomes a part of it; see private_api.keep_cache_key
    notes = Path(os.environ["TRITON_CACHE_DIR"], f"{NOTES}-{os.getpid()}.jsonl")
    key_of = cache.get_cache_key

    def note(source: Any, backend: Any, options: Any, env_vars: Any) -> str:
        found = (source.hash(), backend.hash(), options.hash(), str(sorted(env_vars.items())))
        with notes.open("a") as file:
            file.write(json.dumps([source.name, triton.__version__, cache.triton_key(), *found]) + "\n")
        return key_of(source, backend, options, env_vars)

    with described_gpu(), tensors_as_on_gpu(), mock.patch.object(compiler, "get_cache_key", note):
        yield


def compile_op(name: str, shape: str) -> None:
    import torch

    from fastweights_studies.measure.judge.accuracy import cotangents, results
    from fastweights_studies.measure.judge.cases import CASES, Sizes

    case, sizes = CASES[name], Sizes.read(shape)
    inputs, states = case.draw(sizes, torch.bfloat16, "cpu", 0), case.draw_states(sizes, sizes.B, "cpu", 1)
    results(case, inputs, states, cotangents(case, inputs, states, 2), backend="triton")
    o, _ = case.ours(inputs, backend="triton")
    torch.autograd.grad(o, list(inputs.values()), torch.zeros_like(o), allow_unused=True)
    with torch.no_grad():
        case.ours(inputs, backend="triton")


def one_of_each(config: Any) -> Any:
    """The configuration with one layer of every mixer but softmax attention, whose kernels are not ours."""
    kinds = {f"{name} {options}": {"name": name, **options} for name, options in config.mixers() if name != "softmax"}
    mixers = list(kinds.values())
    one_of_mixers = {"mixer": mixers[0] if len(mixers) == 1 else mixers, "num_hidden_layers": len(mixers)}
    return type(config)(**{**config.to_dict(), **one_of_mixers, "softmax_layers": [], "softmax_options": None})


def trained_models() -> dict[str, tuple[Any, int]]:
    """By title, the models of training_steps.py and 24 layers of every mixer, with sequences per step."""
    from fastweights.layers import MIXERS
    from fastweights_studies.measure.models import Model
    from fastweights_studies.measure.training_steps import COMPARISONS, LAYERS_BATCH

    found = {model.title: (model, LAYERS_BATCH) for model in (Model(mixer=name) for name in MIXERS)}
    return found | {model.title: (model, one.batch) for one in COMPARISONS for model in (one.model, one.base)}


def compile_training(name: str) -> None:
    import torch

    from fastweights.models import FastWeightsForCausalLM

    asked, batch = trained_models()[name]
    model = FastWeightsForCausalLM(one_of_each(asked.configuration())).train()
    ids = torch.zeros(batch, 2048, dtype=torch.long)
    with without_products():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()


def compile_decoding(mixer: str) -> None:
    import torch

    from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM, decoding
    from fastweights_studies.measure.decode_table import BATCHES, REPLAYS

    model = FastWeightsForCausalLM(FastWeightsConfig(mixer=mixer, num_hidden_layers=1)).bfloat16().eval()
    layer = model.model.layers[0].mixer
    overlapping = mock.patch.object(decoding, "can_overlap", lambda device: True)
    with torch.no_grad(), without_products(), overlapping:
        for batch in BATCHES:
            ids = torch.zeros(batch, 1, dtype=torch.long)
            (cache,) = model(ids, use_cache=True).past_key_values.layers
            steps = decoding.DecodeSteps(model, 1 + REPLAYS, replayed=False)
            steps.begin(ids, [layer.fixed_cache(cache, REPLAYS)])


class Gathered(Exception):
    """Raised in the place of a training."""


@contextmanager
def compiled_trainings(owner: str) -> Iterator[None]:
    """Compiles a step and a test of every training that is begun inside and differs in more than its rate and seed.

    The code inside ends with the first call that begins trainings.
    """
    from fastweights.training.language import together
    from fastweights_studies.claims import trained

    from .. import rate_search

    found: dict[str, Any] = {}

    def gather_recall(experiments: Any, outputs: Any, **rest: Any) -> None:
        for experiment in experiments.values():
            found.update({str({**run.record(), "learning_rate": None, "seed": None}): run for run in experiment.runs()})
        raise Gathered

    def gather_language(runs: Any, *rest: Any) -> None:
        for run in runs:
            found.setdefault(str(replace(run, learning_rate=1.0, seed=0, output="any")), run)
        raise Gathered

    with (
        mock.patch.object(trained, "run_recall_parts", gather_recall),
        mock.patch.object(rate_search, "run_recall_parts", gather_recall),
        mock.patch.object(together, "train_together", gather_language),
        suppress(Gathered),
    ):
        yield
    if not found:
        raise SystemExit(f"{owner} trains no models")
    for run in found.values():
        (compile_recall if hasattr(run, "record") else compile_language)(run)


def compile_claim(name: str) -> None:
    from fastweights_studies.claims import trained
    from fastweights_studies.claims.claim import Conditions
    from fastweights_studies.claims.ledger import claims_of

    claim = next((one for one in claims_of() if one.name == name), None)
    if claim is None:
        raise SystemExit(f"--claims must name claims of the papers, got {name}")
    assert claim.measure is not None
    with compiled_trainings(name), mock.patch.object(trained, "passes_over_text", lambda run: 0.0):
        claim.measure(Conditions(seeds=claim.seeds[:1]))


def compile_leaderboard(mixer: str, column: str, *parts: str) -> None:
    """What the parts of the full size train with a mixer, in the columns with this text in their title; "" for all."""
    from fastweights.layers import parse_mixers
    from fastweights_studies.leaderboard.matched_language import MatchedLanguagePart
    from fastweights_studies.leaderboard.parts import find_part
    from fastweights_studies.leaderboard.request import Request
    from fastweights_studies.leaderboard.run import run_part

    for name in parts:
        part = find_part(name)
        with TemporaryDirectory() as folder:
            request = Request(
                mixers=tuple(parse_mixers(mixer)), size="full", device="cpu", output=Path(folder, "leaderboard"), workers=2,
                columns=(column,) if column else None,
            )  # fmt: skip
            if isinstance(part, MatchedLanguagePart):
                compile_matched(part, request)
            else:
                with compiled_trainings(name):
                    run_part(part, request)


def compile_matched(part: Any, request: Any) -> None:
    """A training step of one model of a part of `matched_language`, with fewer rows, and its measurements. They read a little
    text of the Python installation.

    Raises:
        ValueError: columns that the part does not have.
    """
    from fastweights.training.language import together, trainer
    from fastweights_studies.leaderboard import matched_language, matched_measures
    from fastweights_studies.leaderboard.sizes import SIZES

    full = SIZES[request.size]
    small = {
        name: replace(
            size, source="python", corpus={"max_megabytes": 4, "held_out_fraction": 0.3}, recall_documents=50, train_pieces=None,
            rows=8, context_texts=1, examples=2, depths=(0.5,), decoded=0,
            training={**size.training, "batch_size": 4, "accumulation": 1, "compile": False},
        )
        for name, size in full.matched_language.items()
    }  # fmt: skip

    def gather(runs: Any, *rest: Any) -> None:
        raise Gathered(runs[0])

    part.check_columns(request)
    with (
        without_products(),
        mock.patch.dict(SIZES, {request.size: replace(full, matched_language=small)}),
        # Any rate will do: no smaller models look for one.
        mock.patch.object(type(part), "_rates", lambda part, variants, *rest: dict.fromkeys(variants, 1e-3)),
        mock.patch.object(trainer, "check_finite"),
    ):
        try:
            with mock.patch.object(together, "train_together", gather):
                part.run(request)
        except Gathered as gathered:
            run = replace(gathered.args[0], max_steps=1, max_tokens=None)
        together.train_here(run)
        matched_measures.measure_losses(
            part.size(request.size), run.output, str(request.output / matched_language.TEXT), "cpu"
        )


def compile_recall(run: Any) -> None:
    from fastweights.training.recall.batches import training_batches
    from fastweights.training.recall.train import Training

    training = Training(run)
    for number, objective in enumerate(training.objectives):
        begin = next(step for step in range(run.steps) if run.stage_at(step) == number)
        training.take(objective, next(training_batches(run, begin)), 0.0)
        objective.measure(training.model, seed=0, examples=run.test_examples, device=run.device)


def compile_language(run: Any) -> None:
    """A step and the measurements after it, of the precision on a GPU. Kernels that do not run give any numbers."""
    from fastweights.training.language import train_language, trainer
    from fastweights_studies.measure.training_steps import CACHE

    with TemporaryDirectory() as folder, without_products(), mock.patch.object(trainer, "check_finite"):
        train_language(replace(run, max_steps=1, output=f"{folder}/model", precision="bf16", cache=CACHE))


def compile_student(memory: str) -> None:
    """A step of a student of linearization.py, and what is read when it is measured."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from fastweights.models import linearize
    from fastweights_studies.measure.linearization import FULL

    run, asked = FULL.load("student"), FULL.asked
    config = LlamaConfig(**{**FULL.llama, "num_hidden_layers": 1}, vocab_size=512)
    student: Any = linearize(LlamaForCausalLM(config), to=memory, **FULL.memories[memory])  # type: ignore[arg-type]
    student.train()
    tokens = run.batch_size * run.length
    ids, edges = torch.zeros(1, tokens, dtype=torch.long), torch.arange(0, tokens + 1, 256, dtype=torch.int32)
    with without_products():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = student(ids, labels=ids, cu_seqlens=edges).loss
        loss.backward()
        with torch.no_grad():
            student.eval()(ids, cu_seqlens=edges, logits_to_keep=1)  # for the divergence from the teacher, in float32
            for length in asked.lengths:
                student.bfloat16()(torch.zeros(asked.batch_size, length, dtype=torch.long), logits_to_keep=1)


@contextmanager
def without_products() -> Iterator[None]:
    """Inside, matrix products are zeros: those of a large model take minutes on a CPU. So is what kernels would have written."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Zeros(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.overloadpacket.__name__
            if name in ("mm", "addmm", "bmm"):
                a, b = args[1:3] if name == "addmm" else args[:2]
                return a.new_zeros(*a.shape[:-1], b.shape[-1])
            result = func(*args, **(kwargs or {}))
            return result.zero_() if name in ("empty", "empty_like", "empty_strided", "new_empty") else result

    with Zeros():
        yield


def compile_tests(path: str) -> None:
    from fastweights_studies.measure.tests_ahead import run_tests

    run_tests(path, compiling_only)


WORK: dict[str, Callable[..., None]] = {
    "op": compile_op, "training": compile_training, "decoding": compile_decoding, "claim": compile_claim,
    "leaderboard": compile_leaderboard, "student": compile_student, "tests": compile_tests,
}  # fmt: skip


def work(kind: str, names: tuple[str, ...]) -> float:
    """Seconds."""
    import torch

    import fastweights.models  # noqa: F401  # what is imported inside still asks for a GPU

    torch.set_num_threads(1)
    begin = time.perf_counter()
    with nullcontext() if kind == "tests" else compiling_only():  # tests are collected before
        WORK[kind](*names)
    return time.perf_counter() - begin


def place(folder: Path) -> int:
    """Renames kernels that were compiled elsewhere, so that this machine's Triton finds them; returns how many."""
    import triton
    from triton.runtime.cache import triton_key

    notes = {
        Noted(*json.loads(line))
        for path in folder.glob(f"{NOTES}-*.jsonl")
        for line in path.read_text().splitlines()
    }  # fmt: skip
    others = sorted({note.triton for note in notes} - {triton.__version__})
    if others:
        raise SystemExit(f"{folder} holds kernels of triton {', '.join(others)}, and here is {triton.__version__}")
    placed, fingerprint, backend = 0, triton_key(), own_backend()
    for note in notes:
        old, new = note.place(note.fingerprint, note.backend), note.place(fingerprint, backend)
        if (folder / old).is_dir() and not (folder / new).exists():
            placed += 1
            (folder / old).rename(folder / new)
        for group in (folder / new).glob("__grp__*.json"):  # has the absolute paths of its files
            content = json.loads(group.read_text())
            content["child_paths"] = {name: str(folder / new / name) for name in content["child_paths"]}
            group.write_text(json.dumps(content))
    return placed


def main() -> None:
    from fastweights.layers import MIXERS
    from fastweights_studies.leaderboard.language import LanguagePart
    from fastweights_studies.leaderboard.matched_language import MatchedLanguagePart
    from fastweights_studies.leaderboard.parts import PARTS
    from fastweights_studies.leaderboard.trainings import TaskPart
    from fastweights_studies.measure.judge.cases import CASES
    from fastweights_studies.measure.linearization import FULL

    trained = [name for name, part in PARTS.items() if isinstance(part, (TaskPart, LanguagePart, MatchedLanguagePart))]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, help="folder for the kernels")
    parser.add_argument("--ops", default="", help="of kernels.py, comma-separated")
    parser.add_argument("--sizes", action="append", default=[], help="B,T,H,K,V of the ops; may be repeated")
    parser.add_argument(
        "--training",
        nargs="+",
        default=[],
        metavar="NAME",
        help="models of training_steps.py, or '24 layers of' any mixer",
    )
    parser.add_argument("--decoding", default="", help="mixers, comma-separated")
    parser.add_argument("--claims", default="", help="claims that train models, comma-separated")
    parser.add_argument("--leaderboard", default="", help="parts that train models, comma-separated; needs --mixers")
    parser.add_argument(
        "--mixers", default="", help="of the leaderboard, comma-separated, each with at most one option"
    )
    parser.add_argument(
        "--column", default="", help="of the leaderboard: text in the titles of its columns; all if not given"
    )
    parser.add_argument("--students", default="", help="memories of linearization.py, comma-separated")
    parser.add_argument("--tests", nargs="+", default=[], metavar="PATH", help="that need a GPU, as pytest takes them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument(
        "--place", action="store_true", help="make TRITON_CACHE_DIR's kernels known to this machine's Triton"
    )
    asked = parser.parse_args()
    if asked.place:
        if "TRITON_CACHE_DIR" not in os.environ:
            parser.error("--place needs TRITON_CACHE_DIR, the folder that kernels were compiled into")
        folder = Path(os.environ["TRITON_CACHE_DIR"]).absolute()
        print(f"{place(folder)} kernels placed in {folder}")
        return
    if asked.into is None:
        parser.error("--into must name a folder for the kernels, or pass --place")
    listed = {
        "op": asked.ops, "decoding": asked.decoding, "claim": asked.claims, "part": asked.leaderboard, "mixer": asked.mixers,
        "student": asked.students,
    }  # fmt: skip
    given = {kind: [name for name in names.split(",") if name] for kind, names in listed.items()}
    if given["op"] and not asked.sizes:
        parser.error("--ops needs --sizes")
    if given["part"] and not given["mixer"]:
        parser.error("--leaderboard needs --mixers")
    for option, names, known in (
        ("--ops", given["op"], CASES), ("--decoding", given["decoding"], MIXERS),
        ("--leaderboard", given["part"], trained), ("--mixers", [re.split("[:@]", name)[0] for name in given["mixer"]], MIXERS),
        ("--training", asked.training, trained_models()), ("--students", given["student"], FULL.memories),
    ):  # fmt: skip
        unknown = sorted(set(names) - set(known))
        if unknown:
            parser.error(f"{option} names {', '.join(unknown)}; choose from {', '.join(dict.fromkeys(known))}")
    wanted: list[tuple[str, tuple[str, ...]]] = [("op", (name, sizes)) for name in given["op"] for sizes in asked.sizes]
    wanted += [(kind, (name,)) for kind in ("decoding", "claim", "student") for name in given[kind]]
    wanted += [("leaderboard", (mixer, asked.column, *given["part"])) for mixer in given["mixer"]]
    wanted += [("training", (name,)) for name in asked.training]
    wanted += [("tests", (path,)) for path in asked.tests]
    asked.into.mkdir(parents=True, exist_ok=True)
    # Of a compiled kernel only the machine code is kept.
    os.environ.update(TRITON_CACHE_DIR=str(asked.into.absolute()), TRITON_STORE_BINARY_ONLY="1", OMP_NUM_THREADS="1")
    failed = 0
    with ProcessPoolExecutor(asked.jobs, get_context("spawn")) as pool:
        begun = {pool.submit(work, *one): one for one in wanted}
        for done in as_completed(begun):
            kind, names = begun[done]
            error = done.exception()
            failed += error is not None
            print(f"{kind} {' '.join(names)}: {f'{done.result():.0f} s' if error is None else repr(error)}", flush=True)
    if failed:
        raise SystemExit(f"{failed} of {len(wanted)} failed")


if __name__ == "__main__":
    main()
