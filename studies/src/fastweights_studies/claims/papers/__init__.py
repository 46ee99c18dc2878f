"""One file per claim. Each declares a `CLAIM`: what a paper says, what was expected, how it is measured and what decides."""
