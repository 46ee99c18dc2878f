"""What every op shares: checks, packing, chunking, decay and the run around an implementation."""
