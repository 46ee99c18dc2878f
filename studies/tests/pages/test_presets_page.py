"""The presets' parameters beside the counts that the papers state."""

import pytest
from fastweights_studies.pages import presets

from fastweights.models import PRESETS


def test_counts_and_sizes_are_on_a_page_that_is_generated():
    presets.PAGE.check()


@pytest.mark.parametrize("name", PRESETS)
def test_a_count_is_within_two_percent_of_the_papers_or_the_file_says_why(name):
    """The papers state two or three digits."""
    apart = abs(presets.difference(name))
    assert apart < 0.15 and (apart > presets.EXPLAINED) == bool(PRESETS[name].difference)
