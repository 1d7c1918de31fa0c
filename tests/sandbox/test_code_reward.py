"""The reward that runs a completion: its data, the program it takes, and what counts as equal."""

import pytest

from hybrid_rl.sandbox.code import extract_code, passes_tests, read_tests, same, same_text
from tests.sandbox.test_sandbox import block, needs_sandbox, task


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("not json", "not JSON"),
        ('{"tests": [{"args": [1], "result": NaN}], "function": "f"}', "NaN is no JSON"),
        ("[]", "must be"),
        ({"test": []}, "must be"),
        ({"function": 3, "tests": []}, "must be"),
        ({"tests": []}, "no tests"),
        ({"tests": {}}, "no tests"),
        ({"tests": ["1"]}, "a test must be"),
        ({"tests": [{"stdin": 1, "stdout": "1"}]}, "a test must be"),
        ({"tests": [{"args": [1], "result": 1}]}, "a test must be"),
        ({"function": "f", "tests": [{"args": 1, "result": 1}]}, "a test must be"),
        ({"tests": [{"stdin": "1", "stdout": " \n"}]}, "does nothing passes"),
        ({"function": "f", "tests": [{"args": [1], "result": None}]}, "does nothing passes"),
    ],
)
def test_an_answer_without_tests_is_an_error_of_the_data(answer, message):
    with pytest.raises(ValueError, match=f"task t: .*{message}"):
        read_tests(task(answer))
    with pytest.raises(ValueError, match="task t: "):
        passes_tests("no code at all", task(answer))


@needs_sandbox
def test_the_share_of_tests_and_the_format_add_up_to_one():
    answer = task({"function": "f", "tests": [{"args": [n], "result": n * n} for n in range(4)]})
    half, right = block("def f(n): return n if n < 2 else -1"), block("def f(n): return n * n")
    assert passes_tests(half, answer) == {"format": 0.0, "tests": 0.5}
    assert passes_tests(half, answer, format_weight=0.2) == {"format": 0.2, "tests": 0.4}
    assert passes_tests(half, answer, partial=False) == {"format": 0.0, "tests": 0.0}
    assert passes_tests(right, answer, format_weight=0.2, partial=False) == {"format": 0.2, "tests": 0.8}
    assert passes_tests("def f(n): return n * n", answer, format_weight=0.2) == {"format": 0.0, "tests": 0.0}
    assert passes_tests(block("g = 1"), answer) == {"format": 0.0, "tests": 0.0}


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("```python\na\n```", "a"),
        ("```python\na\n```\ntext\n```py\nb\nc\n```\nend", "b\nc"),
        ("```python\na\n```\n```python\ntruncated", "a"),
        ("```python\na\n```\n```bash\nls\n```", "a"),
        ("  ```Python3  \n  a\n  ```", "  a"),
        ("```python\nx = '```python'\n```", "x = '```python'"),
        ("```\na\n```", None),
        ("a", None),
        ("", None),
        ("```python\n" * 20000, None),
    ],
)
def test_the_last_closed_python_block_is_the_program(completion, code):
    assert extract_code(completion) == code


@pytest.mark.parametrize(
    ("got", "expected", "equal"),
    [
        (1, 1, True), (True, 1, False), (1, True, False), (1.0, 1, False), (0, None, False), (None, False, False), ("1", 1, False),
        (1, 1.0, True), (True, 1.0, False), (0.1 + 0.2, 0.3, True), (0.3001, 0.3, False), (1e-10, 0.0, True), (float("inf"), 1e308, False),
        (10**400, 1.5, False), ("0.3", 0.3, False), ([1, [2]], [1, [2]], True), ([1, 2], [2, 1], False), ([1], [1, 2], False),
        ([True], [1], False), ({"a": 1.0000001}, {"a": 1.0}, True), ({"a": 1, "b": 2}, {"a": 1}, False), ([], {}, False), ("", [], False),
    ],
)  # fmt: skip
def test_values_are_equal_only_with_equal_types(got, expected, equal):
    assert same(got, expected) is equal


@pytest.mark.parametrize(
    ("got", "expected", "equal"),
    [
        ("1\n2\n", "1\n2", True), ("1  \n2\r\n\n\n", "1\n2", True), (" 1", "1", False), ("1\n\n2", "1\n2", False), ("1 2", "1  2", False),
        ("0.10", "0.1", False), ("", "1", False),
    ],
)  # fmt: skip
def test_text_is_equal_up_to_white_space_at_ends(got, expected, equal):
    assert same_text(got, expected) is equal
