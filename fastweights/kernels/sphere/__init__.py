r"""Lattice token after token, the state in registers: the derivation.

One head. Lattice keeps K slots as directions s (rows of S, length 1) and lengths n. With h and c of the rule turned over where
that saves a sign, a token moves a slot by a = gamma c / n^2 across itself:

    decode: h = v - S^T k, c = k        encode: h = v, c = k - S v        similarity: h = v, c = k
    b = s.h      1/m = (d^2 + a^2 (|h|^2 - b^2))^-1/2      f = (d - a b) / m      w = a / m
    s <- f s + w h      n <- 1 or n m      o = S^T (n q)

So a token is S <- f S + w h. The forward keeps f, w, b and h of every token and the state of every 16th. Backward, with L the
gradient in the state after the token, that of its output included, A = L s and D = L h, slot by slot:

    E = L s' = f A + w D is the part of L along the slot. It changes nothing and would grow: L, A and D are freed of it.
    da = (D - b A) / m + w (|h|^2 - b^2) / m N        db = -w A - w^2 b N - (encode: gamma / n^2) da
    x = db - w f E        dh = sum over slots (w L + x s + w^2 (N - E) h)        L <- f (L - f E s) + x h - (decode: k dh)

with N the gradient in log n where lengths are free (0 otherwise), which becomes N - 2 a da.

Where slots have length 1, decode has kernels of its own, decode_steps.py; its outputs come from slot_outputs.py.
Normalised encode and similarity take 16 tokens together: slot_turns.py and slot_outputs.py, backwards slot_outputs_back.py,
slot_turns_back.py and slot_gradients.py. Of f, w and b they keep b alone, from which the backward finds the others again.
"""
