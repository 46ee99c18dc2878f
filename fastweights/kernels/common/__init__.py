"""What the families of kernels share. A family imports from here, from `runtime` and from its own folder, never from another.

`call` has what every call needs, and makes a rule of a family's class. Device functions: `math` of single numbers, `packing` of
where chunks and segments lie, `tiles` of how tokens are loaded, `lanes` of sums inside a warp. `rows` are those of a pool of
states. `joining` has the kernels that join the work of several programs. `delta_rule` is the memory in chunks that four
families ask.
"""
