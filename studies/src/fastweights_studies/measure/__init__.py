"""The scripts that measure, and the judge of the kernels. Each is run by python -m fastweights_studies.measure.NAME."""
