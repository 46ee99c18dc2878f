"""A distillation of `measure/linearization.py`: 5% of the teacher's tokens, a quarter of them in stage (a), with HALO's rates."""

from fastweights_studies.measure.linearization_text import with_recall

from fastweights.distillation import DistillRun

run = DistillRun(
    output="runs/linearization/trained/gdn-none-seed0/distilled",
    cache="runs/linearization/tokens",
    model={"path": "runs/linearization/students/gdn-none-seed0/distilled"},
    teacher="runs/linearization/teacher",
    corpus=with_recall("runs/linearization/recall.jsonl"),
    length=1024,
    batch_size=8,
    warmup_fraction=0.05,
    precision="bf16",
    compile=False,  # several trainings share a GPU, and compiling them takes longer than it saves
    evaluate_every=20,
    evaluation_rows=48,
    checkpoint_every=10_000,  # at the end, and where it stops
    keep_checkpoints=1,
    needles=(),
    context_lengths=(),
    stages=(
        {"name": "attention", "objective": "attention", "max_tokens": "0.8M", "learning_rate": 1e-3, "final_learning_rate": 1e-5},
        {"name": "logits", "objective": "logits", "max_tokens": "2.4M", "learning_rate": 1e-4, "final_learning_rate": 1e-5},
    ),
)  # fmt: skip
