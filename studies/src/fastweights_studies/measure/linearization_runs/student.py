"""A student of `measure/linearization.py` from nothing, with as many tokens as a distillation reads."""

from fastweights_studies.measure.linearization_text import with_recall

from fastweights.training.language import LanguageRun

run = LanguageRun(
    output="runs/linearization/trained/gdn-none-seed0/nothing",
    cache="runs/linearization/tokens",
    model={"path": "runs/linearization/students/gdn-none-seed0/nothing"},
    corpus=with_recall("runs/linearization/recall.jsonl"),
    length=1024,
    batch_size=8,
    max_tokens="3.2M",
    learning_rate=6e-4,
    warmup_fraction=0.05,
    precision="bf16",
    compile=False,  # several trainings share a GPU, and compiling them takes longer than it saves
    evaluate_every=20,
    evaluation_rows=48,
    checkpoint_every=10_000,  # at the end, and where it stops
    keep_checkpoints=1,
    context_lengths=(),
)
