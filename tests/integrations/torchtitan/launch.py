"""torchtitan's own command, with what this package sets: `torchrun -m tests.integrations.torchtitan.launch --module ...`."""

from torchtitan.train import main

if __name__ == "__main__":
    main()
