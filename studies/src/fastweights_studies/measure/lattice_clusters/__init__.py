"""An experiment: Lattice's decode objective with a head on several multiprocessors, beside the library's kernels.

The library runs a head on one multiprocessor, token after token. Here the channels of a head are spread over a cluster of
programs on a Hopper GPU. Once per token these exchange sums over channels, through each other's shared memory.

    exchange_code.py, exchanges.py   the sums over the channels of a cluster
    forward.py, backward.py          the kernels
    launches.py                      puts them in the place of the library's kernels
    cases.py, __main__.py            checks and times them: python -m fastweights_studies.measure.lattice_clusters

What is known of them is in studies/notes/kernels.md, "The decode objective on a cluster of multiprocessors".
"""
