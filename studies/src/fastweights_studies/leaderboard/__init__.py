"""The leaderboard: every mixer of the registry on the same tasks at equal state and parameters, and the memory rules without
training. `fastweights leaderboard` runs any part again; a new mixer joins by its name, its rule by `register_rule`."""

from .board import Board, board_path, load_board
from .part import Part
from .parts import PARTS, find_part, known_parts
from .request import Request
from .rules import Gates, RuleInputs, register_rule
from .run import part_rows, run_part, table_of
from .sizes import SIZES
from .standing import Standing, places

__all__ = [
    "PARTS",
    "SIZES",
    "Board",
    "Gates",
    "Part",
    "Request",
    "RuleInputs",
    "Standing",
    "board_path",
    "find_part",
    "known_parts",
    "load_board",
    "part_rows",
    "places",
    "register_rule",
    "run_part",
    "table_of",
]
