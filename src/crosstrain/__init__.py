"""crosstrain: on this machine, how fast and how well does each deep-learning framework train the same network?"""

__version__ = "0.1.0"
