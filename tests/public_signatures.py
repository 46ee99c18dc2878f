"""The ops that users rely on, and their signatures: a change here is a change of the library's promise.

A new op works, and passes every test, without an entry here. Once it has one, the tests in tests/house ask for its test file and
its documents.
"""

PALIMPSA = "q, k, v, beta, g, *, prior=1.0, scale=None"
TRAILING = "initial_state=None, output_final_state=False, cu_seqlens=None, backend='auto', cp_group=None"
IN_PLACE = "state, state_indices=None, cu_seqlens=None, backend='auto'"

MEMORIES = {
    "linear_attention": "q, k, v, g=None, *, scale=None",
    "delta_rule": "q, k, v, beta, g=None, *, write_key=None, scale=None",
    "precondition_keys": "k, g, beta, center, *, bound=1.5, eps=1e-06, squash='softsign', ridge=0.1",
    "precondition_queries": "q, k, g, beta, *, ridge",
    "delta_product": "q, k, v, beta, g=None, *, write_key=None, scale=None",
    "dplr_delta_rule": "q, k, v, a, b, g=None, *, scale=None",
    "kalman_filter": "q, k, v, noise, process_noise=None, g=None, *, scale=None",
    "preconditioned_delta_rule": (
        "q, k, v, beta, g=None, *, precond_g, precond_beta, center, bound=1.5, eps=1e-06, scale=None"
    ),
    "elementwise_longhorn": "q, k, v, beta, *, scale=None",
    "palimpsa": PALIMPSA,
    "palimpsa_posterior": PALIMPSA,
    "gated_kalmanet": "q, k, v, g, *, mix=None, ridge=0.02, iterations=30, solver='chebyshev', adaptive_ridge=True, scale=None",
    "mesa": "q, k, v, g, beta, ridge, *, iterations=30, scale=None",
    "recursive_least_squares": "q, k, v, beta, g=None, *, ridge=1.0, scale=None",
    "variational_linear_attention": "q, k, v, u, *, ridge=0.1, refresh_every=None, refresh=0.001, eps=0.0001",
    "lattice": "q, k, v, gamma, *, objective='decode', decay=None, normalize=True, l1=0.0",
    "output_normalized_ttt": "q, k, v, gamma, *",
}
DECODING = {
    f"{name}_": MEMORIES[name]
    for name in (
        "linear_attention", "delta_rule", "delta_product", "dplr_delta_rule", "kalman_filter",
        "preconditioned_delta_rule", "palimpsa", "palimpsa_posterior",
        "gated_kalmanet", "mesa", "lattice", "output_normalized_ttt", "recursive_least_squares",
        "variational_linear_attention",
    )
}  # fmt: skip
AROUND = {
    "short_convolution": f"x, weight, bias=None, *, activation=None, normalize=None, eps=1e-06, {TRAILING}",
    "gated_rms_norm": "x, weight, gate=None, *, activation='silu', eps=1e-06, gate_first=False, value=None, skip=None, "
    "backend='auto'",
    "gated_writes": "v, s, z=None, c=None, *, backend='auto'",
}
SHAPES = {"gated_rms_norm": "[..., V]", "gated_writes": "[..., G, V]"}
SIGNATURES = {
    **{name: f"{begin}, {TRAILING}" for name, begin in MEMORIES.items()},
    **{name: f"{begin}, {IN_PLACE}" for name, begin in DECODING.items()},
    **AROUND,
}
