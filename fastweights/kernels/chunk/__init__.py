r"""Linear attention and the delta rules, with and without the diagonal preconditioner.

The memory is that of `common.delta_rule`, where its derivation stands. The preconditioner runs before it: the energy of the key
channels (`key_energy.py`), then the write keys or queries that follow from it (`precondition.py`).

    A_i = exp(G_i) A + sum_{j <= i} exp(G_i - G_j) beta_j k_j^2  per channel
    w_i = x^(-r/(1+|r|)) k_i  with  r = log(A_i + eps) - c,  x the bound
"""
