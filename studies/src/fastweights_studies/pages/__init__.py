"""Writers of the pages that are made of results, each run by python -m fastweights_studies.pages.NAME."""
