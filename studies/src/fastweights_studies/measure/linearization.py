"""Hybrids of a softmax teacher of 112M parameters, beside the same students trained from nothing.

    python -m fastweights_studies.measure.linearization
    python -m fastweights_studies.measure.linearization --memories gdn,gka --workers 6 --limit 300
    python -m fastweights_studies.measure.linearization --parts teacher,speed --tokens 32M --minutes 8

Its parts, one after another:
    teacher     a Llama is trained on PyTorch's source text, and on documents that ask for what stands in them
    speed       steps of both stages of a distillation are timed beside those of plain training, each alone on the GPU
    students    hybrids with every memory, without attention and with that of one layer in four, are distilled with 5% of the
                teacher's tokens, and trained from nothing with as many
    seeds       two more of the four best
Of every model the loss, the recall and the needles are measured. `linearization_text` makes the text.

The trainings are those of the run files in `linearization_runs`. Several share the GPU. Writes
studies/results/linearization-<device>.json after each. What has its rows is not trained again; what was interrupted, or stopped
at its limit or when the minutes were over, continues with the next call.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fastweights.checks import check_tokens
from fastweights.data.text import TextCorpus, TextSource
from fastweights.distillation import DistillRun
from fastweights.distillation.trainer import DistillTrainer
from fastweights.evaluation import EvaluationSettings
from fastweights.layers import parse_mixers
from fastweights.stopping import StopSignals
from fastweights.training.language import LanguageRun, load_run
from fastweights.training.pool import Call, Pool, Task, WorkerError, run_tasks
from fastweights_studies.measure import scaling
from fastweights_studies.measure.environment import describe, find_gpu, parse_with_mixers
from fastweights_studies.measure.linearization_models import Student, write_start, write_student, write_teacher
from fastweights_studies.measure.linearization_text import CODE, DOCUMENTS, NEEDLE, RECALL, with_recall, write_recall
from fastweights_studies.measure.linearization_training import Measured, Training
from fastweights_studies.measure.rows import find_rows, make_rows, name_file, replace_rows, same_subject
from fastweights_studies.places import RESULTS
from fastweights_studies.record import Plain, Row, select

__all__ = ["DISTILLED", "FULL", "LOSS", "NOTHING", "SPEED", "TASK", "TEACHER", "Plan", "Study"]

TASK, SPEED = "linearization", "linearization_speed"
TEACHER, DISTILLED, NOTHING = "teacher", "distilled", "nothing"  # how a model was trained; a student from nothing
LOSS = "held_out_nats"
RUNS = Path(__file__).with_name("linearization_runs")
OBJECTIVES = ("text", "attention", "logits")  # plain training, stages (a) and (b)
PARTS = ("teacher", "speed", "students", "seeds")
SHARE = 0.05  # of the teacher's tokens that a student reads
ATTENTION_SHARE = 0.25  # of these in stage (a)
ENOUGH = 90.0  # seconds that must be left for the timing of steps


class TimeOver(Exception):
    """The minutes of the study are over."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is trained and measured.

    Attributes:
        llama: fields of the teacher's `LlamaConfig`.
        code: source code that all models read. documents: count of those that ask for recall.
        memories: mixers of the students, with options.
        kept: layers that keep attention, as `--keep` has them.
        seeds: of students; those after the first for the `best` ones.
        asked: what is measured of every model.
        timed: memories whose steps are timed. steps: that count. warm: steps before them.
        changes: fields of the run files, by their names.
    """

    llama: Mapping[str, Any]
    code: TextSource = CODE
    documents: int = DOCUMENTS
    memories: Mapping[str, Mapping[str, Plain]]
    kept: tuple[str, ...] = ("none", "every:4")
    seeds: tuple[int, ...] = (0, 1, 2)
    best: int = 4
    asked: EvaluationSettings
    timed: tuple[str, ...] = ("gdn",)
    steps: int = 20
    warm: int = scaling.WARM
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def load(self, name: str, **changes: Any) -> Any:
        """The run of a file in `linearization_runs`."""
        kind = DistillRun if name == "distill" else LanguageRun
        return load_run(RUNS / f"{name}.py", kind=kind, **{**self.changes.get(name, {}), **changes})

    def with_tokens(self, tokens: int) -> Plan:
        """The plan with a teacher that reads so many tokens, and students that read 5% of them."""
        own = int(SHARE * tokens)
        first = int(ATTENTION_SHARE * own)
        stages = self.load("distill").stages
        read: dict[str, dict[str, Any]] = {
            "teacher": {"max_tokens": tokens},
            "student": {"max_tokens": own},
            "distill": {
                "stages": tuple({**s, "max_tokens": n} for s, n in zip(stages, (first, own - first), strict=True))
            },
        }
        return dataclasses.replace(self, changes={name: {**self.changes.get(name, {}), **read[name]} for name in read})


FULL = Plan(
    llama={
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 12,
        "intermediate_size": 2560, "max_position_embeddings": 4096, "tie_word_embeddings": True,
    },
    memories={
        **{name: {} for name in ("gdn", "kda", "pgdn", "gka", "palimpsa-d", "lattice", "rls")},
        "softmax": {"window": 128},
    },
    asked=EvaluationSettings(
        measures=(RECALL, NEEDLE), lengths=(256, 512, 1024), ruler_examples=128, needle_examples=16, depths=(0.0, 0.5, 1.0),
        batch_size=64,
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Study:
    """A plan, and where it is carried out.

    Attributes:
        folder: of text, models and trainings. path: of the rows.
        device: as rows call it. cuda: whether models are on a GPU.
        workers: trainings at a time; 1 trains in this process.
        limit: seconds of a training, after which it waits for the next call.
        until: when all of them stop, in seconds since the epoch.
        imports: modules that register mixers.
    """

    plan: Plan
    folder: Path
    path: Path
    device: str
    cuda: bool = True
    workers: int = 1
    limit: float = 600.0
    until: float = math.inf
    imports: tuple[str, ...] = ()

    def carry_out(self, parts: Iterable[str] = PARTS) -> list[str]:
        """Carry out parts of the study, in their order. Returns what has not ended: the same call continues."""
        waiting: list[str] = []
        write_recall(self._recall, self.plan.documents)
        for part in parts:
            if part != "teacher" and not (self.folder / "teacher").exists():
                return [*waiting, f"{part}, which needs the teacher"]
            if part == "seeds" and any(self._loss(one) == math.inf for one in self._first_students):
                return [*waiting, "seeds, which need all students"]
            waiting += getattr(self, part)()
        return waiting

    def teacher(self) -> list[str]:
        """Train and measure the teacher."""
        waiting = self._carry_out([self._teacher()])
        if not waiting:
            write_teacher(self.folder / "teacher", self.folder / "teacher-training")
        return waiting

    def students(self) -> list[str]:
        """Train and measure the students, with one seed."""
        return self._carry_out(self._trainings(self._first_students))

    def seeds(self) -> list[str]:
        """Train and measure the best of them with the other seeds."""
        best = sorted(self._first_students, key=lambda one: self._loss(one))[: self.plan.best]
        more = [Student(**{**vars(one), "seed": seed}) for one in best for seed in self.plan.seeds[1:]]
        return self._carry_out(self._trainings(more))

    @property
    def _first_students(self) -> list[Student]:
        return self._students(self.plan.memories, self.plan.kept, self.plan.seeds[:1])

    def speed(self) -> list[str]:
        """Time steps of the stages and of plain training."""
        tasks = {}
        for student in self._students(self.plan.timed, ("none",), self.plan.seeds[:1]):
            for objective in OBJECTIVES:
                column: dict[str, Plain] = {"kept": student.kept, "objective": objective}
                if not select(self._rows(SPEED), mixer=student.memory, column=column):
                    tasks[f"steps of {student.memory}, {objective}"] = (student, column)

        def ended(name: str, found: Mapping[str, Any]) -> None:
            student, column = tasks[name]
            values = {key: x for key, x in found.items() if key not in ("lanes", "parameters")}
            fields: dict[str, Any] = {"mixer": student.memory, "options": student.options, "column": column}
            replace_rows(self.path, make_rows(SPEED, describe(self.device), values, **fields))

        calls = [
            Call(name, self._time_steps, (student, column["objective"])) for name, (student, column) in tasks.items()
        ]
        return self._run(calls, ended, workers=1, needed=ENOUGH)

    def _time_steps(self, student: Student, objective: str) -> dict[str, Any] | None:
        """All objectives have the same student, trainer, output layer and random tokens; plain training has no teacher."""
        place = self.folder / "students" / student.name / DISTILLED
        write_student(place, self.folder / "teacher", student, new=False)
        steps = self.plan.warm + self.plan.steps
        usual = self.plan.load("teacher")
        run = self.plan.load(
            "distill", stages=(), objective=objective, teacher=str(self.folder / "teacher"), model={"path": str(place)},
            max_steps=steps, checkpoint_every=steps, max_tokens=None, log_every=steps, evaluate_every=0,
            batch_size=usual.batch_size, compile=usual.compile, **{**self._text, "corpus": TextCorpus()},
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            text = Path(folder, "text")
            text.mkdir()
            scaling.write_text(text, usual.tokenizer.vocab_size, 16 * usual.batch_size * (usual.length + 1))
            run = dataclasses.replace(run, output=f"{folder}/run")
            return scaling.train(run, text, warm=self.plan.warm, trainer=DistillTrainer)

    def _students(self, memories: Iterable[str], kept: Iterable[str], seeds: Iterable[int]) -> list[Student]:
        kept, seeds = tuple(kept), tuple(seeds)
        return [
            Student(memory=memory, options=self.plan.memories[memory], kept=layers, seed=seed)
            for memory in memories
            for layers in kept
            for seed in seeds
        ]

    def _teacher(self) -> Training:
        start, output = self.folder / "start", self.folder / "teacher-training"
        run = self.plan.load("teacher", output=str(output), model={"path": str(start)}, **self._text)
        return Training(
            name=TEACHER, run=run, write=partial(write_start, start, self.plan.llama, run), asked=self.plan.asked,
            limit=self.limit, until=self.until,
            subject={"mixer": "softmax", "column": {"kept": "all", "trained": TEACHER}, "seed": run.seed},
        )  # fmt: skip

    def _trainings(self, students: Sequence[Student]) -> list[Training]:
        (teacher,) = select(self._rows(TASK), measure=LOSS, column={"trained": TEACHER})
        made = []
        for student in students:
            for trained, file in ((DISTILLED, "distill"), (NOTHING, "student")):
                start = self.folder / "students" / student.name / trained
                fields: dict[str, Any] = {
                    "output": str(self.folder / "trained" / student.name / trained), "model": {"path": str(start)},
                    "seed": student.seed, **self._text,
                }  # fmt: skip
                if trained == DISTILLED:
                    fields["teacher"] = str(self.folder / "teacher")
                made.append(
                    Training(
                        name=f"{student.name}, {trained}", run=self.plan.load(file, **fields), asked=self.plan.asked,
                        write=partial(write_student, start, self.folder / "teacher", student, new=trained == NOTHING),
                        limit=self.limit, until=self.until, near=teacher.value,
                        subject={
                            "mixer": student.memory, "options": student.options, "seed": student.seed,
                            "column": {"kept": student.kept, "trained": trained},
                        },
                    )
                )  # fmt: skip
        return made

    @property
    def _recall(self) -> Path:
        return self.folder / "recall.jsonl"

    @property
    def _text(self) -> dict[str, Any]:
        """The fields of a run that say what it reads: the same tokens in every training."""
        return {"corpus": with_recall(self._recall, self.plan.code), "cache": str(self.folder / "tokens")}

    def _rows(self, task: str) -> list[Row]:
        return select(find_rows(self.path), task=task)

    def _loss(self, student: Student) -> float:
        found = select(
            self._rows(TASK), measure=LOSS, mixer=student.memory, options=student.options, seed=student.seed,
            column={"kept": student.kept, "trained": DISTILLED},
        )  # fmt: skip
        return min((row.value for row in found if row.value is not None), default=float("inf"))

    def _carry_out(self, trainings: Sequence[Training]) -> list[str]:
        """Those without rows, each with its rows written as soon as it has ended."""
        there = self._rows(TASK)
        left = {one.name: one for one in trainings if not select(there, measure=LOSS, **one.subject)}

        return self._run(list(left.values()), lambda name, found: self._keep(left[name], found), workers=self.workers)

    def _keep(self, training: Training, found: Measured) -> None:
        """Write the rows of a training, and delete what only a continuation needs, and the weights of a student."""
        rows, origin = [], describe(self.device)
        for length, values in found.by_length.items():
            column = {**training.subject["column"], "length": length}
            rows += make_rows(TASK, origin, values, **{**training.subject, "column": column}, run=found.run)
        replace_rows(self.path, rows, measured_together)
        shutil.rmtree(training.run.model["path"], ignore_errors=True)
        for name in ("checkpoints",) if training.name == TEACHER else ("checkpoints", "model"):
            for folder in list(Path(training.run.output).rglob(name)):
                shutil.rmtree(folder)

    def _run(
        self, tasks: Sequence[Task], ended: Callable[[str, Any], None], workers: int, needed: float = 0.0
    ) -> list[str]:
        """Carry out tasks; the names of those that failed, stopped at their limit, or did not begin before time was over. needed:
        seconds that must be left for one to begin."""
        waiting = {task.name: task.name for task in tasks}

        def end(worker: int, task: Task, result: Any) -> None:
            if result is not None:
                del waiting[task.name]
                ended(task.name, result)
            print(f"{task.name}: {'stopped' if result is None else 'measured'}", flush=True)
            check_time()

        def check_time() -> None:
            if time.time() > self.until - needed:  # else every task left would start a process, which takes seconds
                raise TimeOver

        def fail(task: Task, error: WorkerError) -> None:
            waiting[task.name] += f" ({error})"
            print(error.details, file=sys.stderr, flush=True)

        with suppress(TimeOver):
            check_time()
            if self.cuda or workers > 1:
                self._share_out(tasks, workers, end, fail)
            else:
                for task in tasks:
                    end(0, task, task(None))  # type: ignore[arg-type]
        return list(waiting.values())

    def _share_out(
        self,
        tasks: Sequence[Task],
        workers: int,
        end: Callable[[int, Task, Any], None],
        fail: Callable[[Task, WorkerError], None],
    ) -> None:
        pool = Pool(
            workers=workers, devices=("cuda" if self.cuda else "cpu",), imports=self.imports, what="training", one_gpu=True,
            renewed=True, less_memory="fewer --workers", stop_seconds=120.0,
        )  # fmt: skip
        with StopSignals():
            try:
                run_tasks(tasks, pool, on_end=end, on_failure=fail)
            except WorkerError as error:
                if error.ends_all:
                    raise


def measured_together(row: Row) -> Hashable:
    """Equal for the rows of one model."""
    column = {name: value for name, value in row.column.items() if name != "length"}
    return same_subject(dataclasses.replace(row, column=column)), row.seed


def choose(plan: Plan, memories: str | None) -> Plan:
    """The plan with some of its memories, or others."""
    if memories is None:
        return plan
    choices = parse_mixers(memories)
    found = {one.name: {**plan.memories.get(one.name, {}), **one.options} for one in choices}
    return dataclasses.replace(plan, memories=found, timed=tuple(name for name in plan.timed if name in found))


def main() -> None:
    began = time.time()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memories", help=f"such as gdn,softmax:window=64; {', '.join(FULL.memories)} if not given")
    parser.add_argument("--parts", default=",".join(PARTS), help="all if not given")
    parser.add_argument("--tokens", help="that the teacher reads, such as 32M; students read 5%% of them")
    parser.add_argument("--workers", type=int, default=4, help="trainings that share the GPU")
    parser.add_argument("--limit", type=float, default=600, help="seconds of a training, which the next call continues")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which all trainings stop")
    parser.add_argument("--folder", type=Path, default=Path("runs/linearization"), help="of models and trainings")
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parse_with_mixers(parser)
    parts = tuple(asked.parts.split(","))
    if not set(parts) <= set(PARTS):
        parser.error(f"--parts must be of {', '.join(PARTS)}, got {asked.parts}")
    device, plan = find_gpu(), choose(FULL, asked.memories)
    if asked.tokens is not None:
        plan = plan.with_tokens(check_tokens("--tokens", asked.tokens))
    study = Study(
        plan=plan, folder=asked.folder.resolve(), path=name_file(asked.results, "linearization", device),
        device=device, workers=asked.workers, limit=asked.limit, until=began + 60 * asked.minutes, imports=tuple(asked.imports),
    )  # fmt: skip
    waiting = study.carry_out(parts)
    if waiting:
        raise SystemExit("not measured yet; the same command continues: " + "; ".join(waiting))


if __name__ == "__main__":
    main()
