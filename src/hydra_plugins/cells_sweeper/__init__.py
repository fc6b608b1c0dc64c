from hydra_plugins.cells_sweeper.cells import CellsSweeper

__all__ = ["CellsSweeper"]
