"""Tasks that lm-evaluation-harness lacks, in its format: a YAML file each, and what the prompts are made by."""
