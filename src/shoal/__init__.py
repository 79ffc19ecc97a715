"""Shoal trains, measures, watches and ships teams of reinforcement-learning agents."""

__version__ = "0.1.0"
