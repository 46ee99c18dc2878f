"""One sequence over several processes, each with a part of the tokens; ops and short convolutions exchange what they need."""
