"""Drafters, one file each. They hear of committed tokens and propose the next ones; none knows the engine."""
