"""The softmax teacher of `measure/linearization.py`, which replaces the paths: 64M tokens, four readings of PyTorch's source,
and two of the documents that `linearization_text` writes.

The same text a few times is worth nearly as much as new text (Muennighoff et al. 2023, up to four readings).
"""

from fastweights_studies.measure.linearization_text import with_recall

from fastweights.data.text import TextTokenizer
from fastweights.training.language import LanguageRun

run = LanguageRun(
    output="runs/linearization/teacher-training",
    cache="runs/linearization/tokens",
    model={"path": "runs/linearization/start"},  # first weights of a Llama, as a hybrid that keeps all attention
    corpus=with_recall("runs/linearization/recall.jsonl"),
    tokenizer=TextTokenizer(vocab_size=16384),
    length=1024,
    batch_size=32,
    max_tokens="64M",
    learning_rate=1e-3,
    warmup_fraction=0.05,
    precision="bf16",
    evaluate_every=200,
    evaluation_rows=48,
    checkpoint_every=250,
    keep_checkpoints=1,
    context_lengths=(),
)
