"""The rewards that come with hybrid_rl, each against cases written by hand; the judge against a server on loopback."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hybrid_rl.rewards import JsonSchema, Judge, MathVerify, contains, exact, json_fields, matches, numeric, similarity
from hybrid_rl.rewards.maths import last_number
from hybrid_rl.rewards.text import find_answer
from hybrid_rl.types import Task


def task(answer: str, **columns) -> Task:
    return Task("t", ({"role": "user", "content": "What is 6 × 7?"},), answer, columns=columns)


@pytest.mark.parametrize(
    ("completion", "within", "expected"),
    [
        (" a b \n", None, "a b"),
        (r"so \boxed{1} no, \boxed{\frac{1}{2}}.", "boxed", r"\frac{1}{2}"),
        (r"\boxed{1", "boxed", None),
        ("none", "boxed", None),
        ("6 × 7 = 42\n#### 42 \nbye", "####", "42"),
        ("none", "####", None),
        ("<answer>a</answer> no: <answer> b\n</answer> end", "answer", "b"),
        ("<answer>a", "answer", None),
        ("a</answer>", "answer", None),
    ],
)
def test_where_the_answer_stands(completion, within, expected):
    assert find_answer(completion, within) == expected


def test_texts():
    assert exact(" Paris\n", task("Paris")) == (1.0, {"answer": "Paris"})
    assert exact("paris", task("Paris"))[0] == 0.0
    assert exact("<a>paris</a>", task("Paris"), within="a", ignore_case=True) == (1.0, {"answer": "paris"})
    assert exact("paris", task("None"), within="a") == (0.0, {"answer": None})
    assert contains("It is Paris.", task("Paris")) == 1.0
    assert contains("It is Rome.", task("Paris")) == 0.0
    with pytest.raises(ValueError, match="has no answer to look for"):
        contains("It is Rome.", task(""))
    # order matters in Ratcliff–Obershelp: tide to diet is 0.25, diet to tide 0.5
    assert similarity("tide", task("diet"))[0] == 0.25
    assert similarity("diet", task("tide"))[0] == 0.5
    assert similarity("tide", task("diet"), within="a")[0] == 0.0
    assert matches("<think>\nx</think>\n42", task(""), pattern=r"<think>.*</think>\s*\d+") == 1.0
    assert matches("a 42 b", task(""), pattern=r"\d+") == 0.0
    assert matches("a 42 b", task(""), pattern=r"\d+", whole=False) == 1.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1,234.5", 1234.5), ("3/4.", 0.75), ("-2e-3", -0.002), ("x=5.", 5), ("no", None), ("12%", 12), ("$1,000", 1000),
        (".5", 0.5), ("7 1/0", 7), ("10 -3", -3), ("3-4", 4), ("1,2,3", 3), ("9" * 5000, None), ("3/00", None), ("", None), ("x = \u22125", -5),
    ],
)  # fmt: skip
def test_the_last_number(text, expected):
    assert last_number(text) == (None if expected is None else pytest.approx(expected, rel=1e-12))


def test_numbers():
    assert numeric("It is 42.0", task("42")) == (1.0, {"answer": "42"})
    assert numeric("first 42, then 43", task("42"))[0] == 0.0
    assert numeric("6 × 7\n#### 42", task("… = 42\n#### 42"), within="####")[0] == 1.0
    assert numeric("3.1416", task("3.14159265"))[0] == 0.0
    assert numeric("3.1416", task("3.14159265"), tolerance=1e-4)[0] == 1.0
    assert numeric("none", task("0")) == (0.0, {"answer": None})
    with pytest.raises(ValueError, match="task t: its answer 'many' holds no number"):
        numeric("1", task("many"))


def test_formulas():
    pytest.importorskip("math_verify")
    judged = MathVerify()
    for completion, answer, right in [
        (r"so $\frac{1}{2}$", "0.5", 1.0),
        (r"\boxed{x^2+1}", "1+x^2", 1.0),
        (r"\boxed{x^2-1}", "1+x^2", 0.0),
        (r"\boxed{(1,2)}", "(1,2)", 1.0),
        ("nothing", "3", 0.0),
    ]:
        assert judged(completion, task(answer))[0] == right, completion
    with pytest.raises(ValueError, match="finds no formula in its answer ''"):
        judged("1", task(""))


@pytest.mark.slow
def test_a_formula_that_hangs_fails_alone():
    errors = pytest.importorskip("math_verify.errors")
    judged = MathVerify(seconds=1)
    with pytest.raises(errors.TimeoutException):
        judged(r"\boxed{9^{9^{9^9}}}", task("3"))
    assert judged("3", task("3"))[0] == 1.0


SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


def test_json():
    pytest.importorskip("jsonschema")
    accepts = JsonSchema(schema=SCHEMA)
    assert [accepts(text, task("")) for text in ('{"age": 3}', '{"age": "3"}', "{", 'x\n```json\n{"age": 3}\n```')] == [
        1,
        0,
        0,
        1,
    ]
    own = JsonSchema(column="schema")
    assert own('{"age": 3}', task("", schema=SCHEMA)) == own("3", task("", schema='{"type": "integer"}')) == 1.0
    with pytest.raises(ValueError, match="has no column 'schema'"):
        own("3", task(""))
    with pytest.raises(ValueError, match="either schema or column"):
        JsonSchema()
    truth = task('{"a": 1, "b": "x"}')
    assert json_fields('{"a": 1, "b": "x"}', truth) == (1.0, {"exact": 1.0})
    assert json_fields('{"a": 1, "b": "y"}', truth) == (0.5, {"exact": 0.0})
    assert json_fields('{"a": 1, "b": "x", "c": 0, "d": 0}', truth) == (0.5, {"exact": 0.0})
    assert json_fields("[1]", truth)[0] == json_fields("{", truth)[0] == 0.0


class Server(BaseHTTPRequestHandler):
    """An API of OpenAI's form whose answers follow from what it is asked."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, self.headers["Authorization"], body))
        text = body["messages"][0]["content"]
        if "busy" in text and len(self.server.asked) == 1:
            return self.send_error(503)
        if "drop" in text and len(self.server.asked) == 1:
            return self.connection.close()
        if "forbidden" in text:
            return self.send_error(401, "no such key")
        said = (
            "No idea." if "odd" in text else "It is wrong.\nScore: 11" if "far" in text else "Score: 1? No.\nScore: 7.5"
        )
        answer = json.dumps({"choices": [{"message": {"content": said}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server():
    found = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    found.asked = []
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    yield found
    found.shutdown()
    found.server_close()
    thread.join(5)


def test_a_judge(server, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    judge = Judge(f"http://127.0.0.1:{server.server_port}/v1/", "m", key="JUDGE_KEY")

    def judged(completion):
        return asyncio.run(judge(completion, task("42")))

    assert judged("busy {answer}") == 0.75
    path, key, body = server.asked[-1]
    assert (len(server.asked), path, key) == (2, "/v1/chat/completions", "Bearer secret")
    assert (body["model"], body["temperature"]) == ("m", 0)
    assert "What is 6 × 7?" in body["messages"][0]["content"]
    assert "Reference answer:\n42" in body["messages"][0]["content"]
    assert "busy {answer}" in body["messages"][0]["content"]  # a completion fills nothing in
    for text in ("drop", "busy"):  # a connection that is closed is tried again, too
        server.asked.clear()
        assert judged(text) == 0.75
        assert len(server.asked) == 2
    choice = Judge(f"http://127.0.0.1:{server.server_port}/v1", "m", pattern=r"Score: (\d+)(\.\d)?")
    assert asyncio.run(choice("x", task("42"))) == 0.7
    for text, message in {
        "odd": "gave no score between 0 and 10",
        "far": "gave no score",
        "forbidden": "the judge answered 401: .*no such key",
    }.items():
        with pytest.raises(Exception, match=message):
            judged(text)
    with pytest.raises(ValueError, match="no such environment variable"):
        Judge("http://127.0.0.1/v1", "m", key="NO_SUCH_KEY")
