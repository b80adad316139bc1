"""A page for the web whose engine is asked without a browser: its model and its code in Node.js."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

REPORTS = Path(__file__).parents[1] / "src" / "triptych" / "seeing" / "reports"
# What the page's script gives for each question: a record, or the message of an error.
_ASK = """
const [record, weights, questions] = JSON.parse(require("fs").readFileSync(0, "utf8"));
const answers = new Answers(record, weights);
const floats = ({ logits }) => Array.from({ length: logits.rows }, (_, i) => [...engine.row(logits, i)]);
const answer = ([name, fields]) => {
  const { text, ids, source = null, changes = [], beam, count } = fields;
  if (name === "logits") return floats(answers.changed(changes).run(ids, source));
  if (name === "search") return answers.search(text, changes, beam, beam, count);
  if (name === "words") return wordStarts(answers.source, answers.source.encode(text, true));
  if (name === "encode") return answers.source.encode(text, fields.parses);
  return answers[name](fields);
};
const told = (question) => {
  try { return answer(question); } catch (error) { return { error: error.message }; }
};
process.stdout.write(JSON.stringify(questions.map(told)));
"""


def found_node() -> str | None:
    return shutil.which("node")


def parts_of(page: Path) -> tuple[dict[str, Any], str]:
    """The record of the model and its weights, in base64."""
    text = page.read_text(encoding="utf-8")
    (record,) = re.findall(r'id="model-here">(.*?)</script>', text)
    (weights,) = re.findall(r'id="weights">(.*?)</script>', text)
    return json.loads(unescape(record)), weights


def ask(page: Path, *questions: tuple[str, dict[str, Any]], held_out: int | None = None) -> list[Any]:
    """What the page's model answers to the page's questions; `held_out` is a number of held-out windows."""
    names = ("engine.js", "changes.js", "forms.js", "answers.js")
    code = "".join((REPORTS / name).read_text(encoding="utf-8") for name in names)
    record, weights = parts_of(page)
    if held_out is not None:
        record["held_out"]["windows"] = record["held_out"]["windows"][:held_out]
    given = json.dumps([record, weights, questions])
    node = found_node()
    assert node is not None
    done = subprocess.run(
        [node, "-e", code + _ASK], input=given, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return list(json.loads(done.stdout))
