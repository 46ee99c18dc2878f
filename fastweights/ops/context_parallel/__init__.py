"""One sequence over several processes: each holds a part of the tokens, and ops and short convolutions exchange what they need."""
