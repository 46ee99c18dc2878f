"""Saved models behind a server that other programs ask for text."""
