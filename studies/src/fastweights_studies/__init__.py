"""The studies of fastweights: the papers' claims, results of our own, the leaderboard, and what was measured of the kernels.

They use the library as any other project would; the library does not know them.
"""
