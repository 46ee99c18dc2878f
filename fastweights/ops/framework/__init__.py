"""What every op shares: checks, packed sequences, the choice of a backend and the run around an implementation."""
