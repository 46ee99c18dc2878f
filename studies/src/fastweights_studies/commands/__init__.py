"""The subcommands that the studies add to the command `fastweights` (entry point group `fastweights.commands`)."""
