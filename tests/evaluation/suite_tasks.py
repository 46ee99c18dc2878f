"""Copies of the suites' tasks on a few generated documents: prompts, metrics and filters are the harness's own, data is local."""

from __future__ import annotations

import json
from pathlib import Path

import lm_eval.tasks

from fastweights.evaluation.suites import SUITES

HARNESS = Path(lm_eval.tasks.__file__).parent
OWN = Path(__file__).parents[2] / "fastweights" / "evaluation" / "tasks"
CHOICES = {"text": ["rain", "snow"], "label": ["A", "B"]}
ARC = {"question": "What falls on the roof?", "choices": CHOICES, "answerKey": "A"}
CLOZE = {
    "context": "Rain falls on the roof. The road leads to the sea.",
    "question": "The road leads to the",
    "answers": ["sea"],
}
SPAN = {"text": "Rain falls on the roof. The road leads to the", "key": "road", "value": "sea"}
LONG = {
    "context": "Rain falls on the roof. " * 40, "question": "What falls?", "answers": ["Paragraph 1"],
    "all_classes": ["Rain", "Snow"],
}  # fmt: skip
# The task's file, the split that the harness asks, and a document in the format of the data set.
FORMATS = {
    "wikitext": ("wikitext/wikitext.yaml", "test", {"page": " = Rain = \n Rain falls on the roof . \n"}),
    "lambada_openai": ("lambada/lambada_openai.yaml", "test", {"text": "Rain falls and the road leads to the sea"}),
    "arc_easy": ("arc/arc_easy.yaml", "test", ARC),
    "arc_challenge": ("arc/arc_challenge.yaml", "test", ARC),
    "boolq": ("super_glue/boolq/default.yaml", "validation", {"question": "is it so", "passage": "It is so.", "label": 1}),
    "copa": (
        "super_glue/copa/default.yaml",
        "validation",
        {"premise": "It is wet.", "choice1": "Rain fell.", "choice2": "It was dry.", "question": "cause", "label": 0},
    ),
    "hellaswag": (
        "hellaswag/hellaswag.yaml",
        "validation",
        {"activity_label": "Roof", "ctx_a": "Rain", "ctx_b": "it", "endings": ["falls.", "sings.", "is.", "so."], "label": "0"},
    ),
    "piqa": ("piqa/piqa.yaml", "validation", {"goal": "Stay dry", "sol1": "take a coat", "sol2": "sit and wait", "label": 0}),
    "sciq": (
        "sciq/sciq.yaml",
        "test",
        {"support": "Rain is water.", "question": "What is rain?", "correct_answer": "water"}
        | {f"distractor{number}": word for number, word in enumerate(("air", "sand", "fire"), 1)},
    ),
    "social_iqa": (
        "siqa/siqa.yaml",
        "validation",
        {"context": "It rains.", "question": "Why?", "answerA": "so", "answerB": "it is", "answerC": "no", "label": "2"},
    ),
    "winogrande": (
        "winogrande/default.yaml",
        "validation",
        {"sentence": "The road to the sea is long because _ is far.", "option1": "sea", "option2": "road", "answer": "1"},
    ),
    "based_triviaqa": (OWN / "based_triviaqa.yaml", "validation", CLOZE),
    "based_drop": (OWN / "based_drop.yaml", "validation", CLOZE),
    "based_nq_2048": (OWN / "based_nq_2048.yaml", "validation", CLOZE),
}  # fmt: skip
CLASSES = {"swde": "SWDE", "fda": "FDA", "squad_completion": "SQUADCompletion"}
RULER_CODE = """
from datasets import Dataset

def documents(max_seq_lengths, **others):
    row = {"input": "A number is hidden. It is 17. Which is it?", "outputs": ["17"], "gen_prefix": "It is"}
    return {"test": Dataset.from_list([{**row, "max_length": length} for length in max_seq_lengths])}
"""


def write_suite(folder: Path, suite: str) -> None:
    """A task of its own name and format for each task of a suite, with data in the same folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ruler_data.py").write_text(RULER_CODE)
    for task in SUITES[suite].tasks:
        place = folder / task
        if task in CLASSES:
            write_data(place, "validation", SPAN)
            code = f"from lm_eval.tasks.{task}.task import {CLASSES[task]}\n\nclass Local({CLASSES[task]}):\n"
            (folder / f"{task}_data.py").write_text(code + f"    DATASET_PATH, DATASET_NAME = {str(place)!r}, None\n")
            text = f"task: {task}\nclass: !function {task}_data.Local\n"
        elif task == "json_kv":
            text = f"include: {OWN / 'json_kv.yaml'}\ntask: json_kv\ndataset_kwargs: {{questions: 2}}\n"
        elif task.startswith("many_shot"):
            text = many_shot(place, task)
        elif suite in ("ruler", "helmet-recall"):
            file = HARNESS / "ruler" / f"{task.removeprefix('ruler_')}.yaml"
            text = f"include: {file}\ntask: {task}\ncustom_dataset: !function ruler_data.documents\n"
        else:
            name = f"longbench/{task.removeprefix('longbench_')}.yaml"
            file, split, row = FORMATS.get(task, (name, "test", LONG))
            for each in {split, "train", "validation"}:  # the harness loads all that the file names
                write_data(place, each, row)
            text = f"include: {HARNESS / file}\ntask: {task}\ndataset_path: {place}\ndataset_name: null\n"
        few = "" if suite == "commonsense" else "generation_kwargs: {until: [], max_gen_toks: 4, do_sample: false}\n"
        (folder / f"{task}.yaml").write_text(text + few)


def many_shot(place: Path, task: str) -> str:
    """The file of a many-shot task whose texts name their label."""
    topics = ("rain", "road", "clock", "night", "sea")
    for split, count in (("train", 100), ("validation", 2), ("test", 2)):
        rows = [{"text": f"{topics[n % 5]} number {n} of {split}"} for n in range(count)]
        for n, row in enumerate(rows):
            row.update({label: n % 5 for label in ("label", "coarse_label", "fine_label", "intent")})
        write_data(place, split, *rows)
    label = {"trec_coarse": "coarse_label", "trec_fine": "fine_label", "clinic150": "intent"}
    options = {"source": {"path": str(place)}, "label": label.get(task.removeprefix("many_shot_"), "label")}
    return f"include: {OWN / task}.yaml\ntask: {task}\ndataset_kwargs: {json.dumps(options)}\n"


def write_data(folder: Path, split: str, *rows: dict) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
