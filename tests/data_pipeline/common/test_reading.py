"""JSON is checked for its shape; what is quick for a vocabulary is as strict as one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.common.reading import COUNT, find_mismatch

LEAVES = st.one_of(
    st.integers(-2, 9), st.just(1 << 62), st.booleans(), st.none(), st.text(max_size=2), st.floats()
)


@given(st.dictionaries(st.text(max_size=2), LEAVES, max_size=4), st.sampled_from([COUNT, str, int]))
def test_an_object_is_sound_if_each_of_its_values_is(value, shape) -> None:
    faults = {key for key, item in value.items() if find_mismatch(item, shape)}
    found = find_mismatch(value, {str: shape})
    assert (found is None) == (not faults)
    found = find_mismatch(list(value.values()), [shape])
    assert (found is None) == (not faults)


@pytest.mark.parametrize("value", [{"a": 1, "b": -1}, {"a": 1, "b": 1 << 62}, {"a": 1, "b": True}])
def test_the_first_value_that_is_no_count_is_named(value) -> None:
    assert find_mismatch(value, {str: COUNT}) == f"b is {value['b']}"
