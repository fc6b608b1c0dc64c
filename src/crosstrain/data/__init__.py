"""Data sets: one file each, turned into plain .npy files in the user cache that every framework's worker opens with mmap."""

from crosstrain.data.recipe import Recipe, Request, Target
from crosstrain.data.sets import DataSet, Split, check, prepare

__all__ = ["DataSet", "Recipe", "Request", "Split", "Target", "check", "prepare"]
