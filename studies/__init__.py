"""The studies' checkout: its tests are the package studies.tests, beside the library's tests."""
