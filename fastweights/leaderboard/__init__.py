"""The leaderboard: every mixer of the registry on the same tasks at equal state and parameters, and the memory rules without
training. `fastweights leaderboard` runs any part again; a new mixer joins by its name."""

from .parts import PARTS, Part, find_part
from .record import Board, board_path, load_board
from .request import Request
from .run import part_rows, run_part, table_of
from .sizes import SIZES
from .standing import Standing, places

__all__ = [
    "PARTS",
    "SIZES",
    "Board",
    "Part",
    "Request",
    "Standing",
    "board_path",
    "find_part",
    "load_board",
    "part_rows",
    "places",
    "run_part",
    "table_of",
]
